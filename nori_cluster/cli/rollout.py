"""`nori rollout restart`: every group of a model anew, one after another."""

from typing import Annotated

import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin, Json
from nori_cluster.cli.operations import finish, only_model, to_json

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def rollout() -> None:
    """Operations on group after group of a model, while the others serve."""


@app.command()
def restart(
    model: Annotated[str | None, typer.Argument(help="Name of the model.", show_default="the only one")] = None,
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", min=1, help="Groups out of service at a time.")
    ] = 1,
    grace: Annotated[
        float | None,
        typer.Option("--grace", min=0, help="Seconds for running requests before they move.", show_default="5"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when all are back, or at once.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = 1800.0,
    as_json: Json = False,
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Drain, end and start every group of a model, one after another; requests move to the others and go on.

    The first group that does not come back ends it; the rest stays untouched.

    Example: nori rollout restart smollm2-135m --grace 10
    """
    with connect(admin) as client:
        name = only_model(client, model)
        operation = client.restart(name, max_unavailable, grace)
        if wait:
            operation = finish(client, operation, timeout, f"the restart of {name}")
    if as_json:
        typer.echo(to_json(operation))
    else:
        typer.echo(f"every group of {name} {'was restarted' if operation.done else 'is being restarted'}")

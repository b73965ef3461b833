"""`nori scale MODEL N`: how many worker groups serve a model."""

from typing import Annotated

import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin, Json
from nori_cluster.cli.operations import finish, to_json

app = typer.Typer(add_completion=False)


@app.command()
def scale(
    model: Annotated[str, typer.Argument(help="Name of the model as `nori status` shows it.")],
    groups: Annotated[int, typer.Argument(min=1, help="Worker groups that shall serve it.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when they are ready, or at once.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = 900.0,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the number can be asked for.")] = False,
    as_json: Json = False,
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Start more worker groups of a model, or drain and end the last ones.

    What runs in a group that goes moves to another one. A group without room stays wanted; the command says so.

    Example: nori scale smollm2-135m 3
    """
    with connect(admin) as client:
        operation = client.scale(model, groups, validate_only=check)
        if wait and not check:
            operation = finish(client, operation, timeout, f"scaling {model} to {groups} groups")
    if as_json:
        typer.echo(to_json(operation))
    elif check:
        typer.echo(f"{model} can have {groups} groups")
    else:
        typer.echo(f"{model} {'has' if operation.done else 'is getting'} {groups} groups")

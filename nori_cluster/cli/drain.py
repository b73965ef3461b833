"""`nori drain GROUP`: stop new work of a group and wait for what runs."""

from typing import Annotated

import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin
from nori_cluster.cli.operations import finish
from nori_cluster.cli.options import LONGEST_DRAIN

app = typer.Typer(add_completion=False)
SLACK = 60.0  # seconds beyond the grace period, before the answer is that it goes on


@app.command()
def drain(
    group: Annotated[str, typer.Argument(help="Name of the group as `nori status` shows it.")],
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", min=0, help="Seconds for running requests.", show_default="the cluster's drain timeout"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is drained, or at once.")] = True,
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Let a group finish its running requests and take no more, until `nori resume`.

    What still runs after the grace period goes on in another group, where there is one that is ready.

    Example: nori drain smollm2-135m-0 --grace 10
    """
    with connect(admin) as client:
        operation = client.drain(group, grace)
        if wait:
            operation = finish(
                client, operation, (LONGEST_DRAIN if grace is None else grace) + SLACK, f"draining {group}"
            )
    typer.echo(f"{group} {'is drained' if operation.done else 'is draining'}")

"""`nori resume GROUP`: let a drained group take work again, or start one again that was given up."""

from typing import Annotated

import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin

app = typer.Typer(add_completion=False)


@app.command()
def resume(
    group: Annotated[str, typer.Argument(help="Name of the group as `nori status` shows it.")],
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Undo `nori drain`, or start a group again that failed too often in a row.

    Example: nori resume smollm2-135m-0
    """
    with connect(admin) as client:
        info = client.resume(group)
    typer.echo(f"{group} is {info.state.name.lower()}")

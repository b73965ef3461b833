"""`nori events`: what happened to the worker groups: starts, losses with their cause, drains."""

import json
import time
from typing import Annotated

import msgspec
import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin
from nori_cluster.rpc.admin_types import EventInfo

app = typer.Typer(add_completion=False)


@app.command()
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more; Ctrl-C ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event.")] = False,
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Show what happened to the worker groups, oldest first.

    Example: nori events --follow
    """
    with connect(admin) as client:
        try:
            for event in client.events(follow=follow):
                typer.echo(json.dumps(msgspec.structs.asdict(event)) if as_json else line(event))
        except KeyboardInterrupt:
            return


def line(event: EventInfo) -> str:
    """One event for people."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    return f"{when}  {event.group} #{event.incarnation}  {event.kind:<9} {event.message}".rstrip()

"""`nori bench null`: what the load client itself can take, measured against a server without a model."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from nori_cluster.bench.client_limit import Limit, measure
from nori_cluster.cli.bench_show import LoadBar
from nori_cluster.cli.flags import Json

app = typer.Typer(add_completion=False)


def line(name: str, limit: Limit) -> str:
    return (
        f"{name}: {limit.events_s:,.0f} events/s at {limit.cpu:.0%} of a core, {limit.events_per_read:.1f} per read: "
        f"{limit.cpu_us_per_event:.1f} us each, {limit.events_per_core_s:,.0f} events per core-second"
    )


@app.command()
def null(
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, max=600, help="About this long each.")] = 5.0,
    json: Json = False,
) -> None:
    """Measure the client's own limit: 256 streams at 100 events/s each, then 64 streams flat out.

    Paced, nearly every event is a read of its own, as from a real server; flat out the kernel joins several.
    The last line on stdout is one JSON object.
    """
    notes = Console(stderr=True, highlight=False)
    with LoadBar(notes) as bar:
        limits = {"paced": measure(256, 0.01, seconds, bar), "flat_out": measure(64, 0.0, seconds, bar)}
    if not json:
        for name, limit in limits.items():
            notes.print(line(name.replace("_", " "), limit))
    typer.echo(msgspec.json.encode({"kind": "null", **limits}))

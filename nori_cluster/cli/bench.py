"""`nori bench`: measurements, each verb a file of its own, imported when it is called."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nori_cluster.registry import Registry

VERBS = Registry(
    "bench command",
    {
        "serve": "nori_cluster.cli.bench_serve:app",
        "null": "nori_cluster.cli.bench_null:app",
    },
)
SUMMARIES = {
    "serve": "Send a load to a served model: latencies, throughput, goodput, failures.",
    "null": "What the load client itself can take.",
}


class BenchGroup(TyperGroup):
    """Lists the verbs from a table and imports one only to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, summary in SUMMARIES.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return (name, typer.main.get_command(VERBS[name]), rest) if name else (name, command, rest)


app = typer.Typer(cls=BenchGroup, no_args_is_help=True, add_completion=False)


@app.callback(help="Measure: a served model, the engine in this process, the client itself.")
def bench() -> None:
    """For the help text."""

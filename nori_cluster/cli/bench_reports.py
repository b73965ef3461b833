"""`nori bench compare`, `verify`, `headline`, `schema`: what is done with reports once they are there."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from nori_cluster.bench.compare import Comparison, Difference, compare
from nori_cluster.bench.markdown import number
from nori_cluster.bench.report import headline, read, schema
from nori_cluster.bench.runner import run_load
from nori_cluster.bench.served import serve_report, write
from nori_cluster.bench.verify import Verification, again_loads, check_can_run, verify
from nori_cluster.cli import bench_load as flags
from nori_cluster.cli import bench_output as output
from nori_cluster.cli.bench_show import LoadBar
from nori_cluster.cli.flags import Json

compare_app, verify_app, headline_app, schema_app = (typer.Typer(add_completion=False) for _ in range(4))
COLOURS = {"better": "green", "worse": "red", "same": ""}
ReportPath = Annotated[Path, typer.Argument(help="A report.json, or the folder that holds one.")]


@compare_app.command("compare")
def compare_verb(a: ReportPath, b: ReportPath, json: Json = False) -> None:
    """Ratios B / A of two reports with their spread; warns of every condition in which they differ.

    Example: nori bench compare results/before results/after
    """
    found = compare(read(a), read(b))
    if not json:
        show_comparison(found)
    output.last_line({"kind": "compare", "a": str(a), "b": str(b), "comparison": found})


def show_comparison(found: Comparison) -> None:
    table = Table("figure", "A", "B", "B / A", "spread", "B is", box=None, pad_edge=False)
    for ratio in found.ratios:
        cells = (ratio.metric, number(ratio.a), number(ratio.b), f"{ratio.ratio:.3f}", f"± {ratio.spread:.0%}")
        table.add_row(*cells, Text(ratio.verdict, style=COLOURS[ratio.verdict]))
    output.NOTES.print(table)
    output.NOTES.print("rounds paired" if found.paired else "medians (rounds not paired)")
    show_differences(found.differences)
    for warning in found.warnings:
        output.NOTES.print(Text(f"warning: {warning}", style="yellow"))


def show_differences(differences: list[Difference]) -> None:
    for difference in differences:
        sides = (f"{side[:80]}…" if len(side) > 80 else side or "unknown" for side in (difference.a, difference.b))
        output.NOTES.print(Text(f"  {difference.what}: {' → '.join(sides)}"))


@verify_app.command("verify")
def verify_verb(
    report: ReportPath,
    url: Annotated[str | None, typer.Option("--url", help="Server.", show_default="the report's")] = None,
    model: flags.Model = None,
    api_key: flags.ApiKey = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, show_default="the report's", help="Runs.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, help="Of the prompts; the report's own may be in caches.", show_default="a new one"
        ),
    ] = None,
    server_info: output.ServerInfo = None,
    admin: output.Admin = None,
    out: output.Out = None,
    json: Json = False,
) -> None:
    """Run a report's load again; exit code 0 when every deciding figure is within the report's stated spread.

    Example: nori bench verify results/report.json --url http://127.0.0.1:8000
    """
    stated = read(report)
    check_can_run(stated)
    assert stated.load is not None
    names = {"server_info": server_info, "admin": admin, "prices": None, "label": stated.label, "api_key": api_key}
    told = output.told_by(names)
    target, name = url or stated.target, model or stated.conditions.model or None
    with LoadBar(output.NOTES) as bar:
        loads = again_loads(stated.load, rounds or len(stated.rounds), seed)
        results = [run_load(target, name, load, api_key=told.api_key, progress=bar) for load in loads]
    again = serve_report(results, loads[0], stated.slo, told, kind=stated.kind)
    if out is not None:
        write(again, out)
    found = verify(stated, again)
    if not json:
        show_verification(found)
    line = {"kind": "verify", "report": str(report), "url": target, "verification": found}
    output.last_line({**line, "again": again.metrics, "rounds": again.rounds})
    raise typer.Exit(0 if found.reproduces else 1)


def show_verification(found: Verification) -> None:
    table = Table("figure", "stated", "again", "again / stated", "stated spread", "", box=None, pad_edge=False)
    for row in found.checked:
        cells = (row.metric, number(row.stated), number(row.again), f"{row.ratio:.3f}", f"± {row.spread:.0%}")
        word = row.verdict if row.decides else f"({row.verdict})"
        table.add_row(*cells, Text(word, style=COLOURS[row.verdict] if row.decides else "dim"))
    output.NOTES.print(table)
    output.NOTES.print(Text("figures in parentheses do not decide", style="dim"))
    if found.differences:
        output.NOTES.print(Text("conditions that differ from the report's:", style="yellow"))
        show_differences(found.differences)
    for warning in found.warnings:
        output.NOTES.print(Text(f"warning: {warning}", style="yellow"))
    output.NOTES.print(Text("it reproduces" if found.reproduces else "it does not reproduce:", style="bold"))
    for reason in found.because:
        output.NOTES.print(Text(f"  {reason}", style="red"))


@headline_app.command("headline")
def headline_verb(report: ReportPath, json: Json = False) -> None:
    """The one sentence that may be quoted. Exit code 1, naming what is missing, when its conditions are not all there.

    Example: nori bench headline results/report.json
    """
    text = headline(read(report))
    if not json:
        output.NOTES.print(text, markup=False)
    output.last_line({"kind": "headline", "report": str(report), "headline": text})


@schema_app.command("schema")
def schema_verb() -> None:
    """The JSON schema of reports."""
    output.last_line(schema())

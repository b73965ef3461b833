"""What verbs with a report share: the flags that say what a server cannot, where files go, and the last line."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nori_cluster import env
from nori_cluster.bench import markdown
from nori_cluster.bench.environment import busy_share
from nori_cluster.bench.report import Report, headline, missing_for_headline
from nori_cluster.bench.served import Told, check_told, write

REPORT = "Report"
NOTES = Console(stderr=True, highlight=False)

ServerInfo = Annotated[
    list[str] | None,
    typer.Option(
        "--server-info",
        help="A condition the server does not tell, key=value; several times. E.g. kv_cache=float16.",
        show_default=False,
        rich_help_panel=REPORT,
    ),
]
Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        help="host:port of a Nori cluster's admin service, which tells the conditions.",
        show_default="127.0.0.1:8001 for a server on the default port",
        rich_help_panel=REPORT,
    ),
]
PriceFile = Annotated[
    Path | None,
    typer.Option("--prices", help="YAML file of prices per hour.", show_default="no cost", rich_help_panel=REPORT),
]
Label = Annotated[str, typer.Option("--label", help="A name for the report.", rich_help_panel=REPORT)]
Rounds = Annotated[
    int,
    typer.Option("--rounds", min=1, max=100, help="Runs of the load; the median one counts.", rich_help_panel=REPORT),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder for report.json, report.md and report.html.",
        show_default="none written",
        rich_help_panel=REPORT,
    ),
]


def told_by(given: Mapping[str, Any]) -> Told:
    """The Told of a verb's parameters by name, checked; called before the load. Raises ConfigError."""
    told = Told(
        server_info=given["server_info"] or (),
        admin=given["admin"],
        prices=given["prices"],
        label=given["label"],
        api_key=given.get("api_key") or env.api_key(),
        busy_before=busy_share(),
    )
    check_told(told)
    return told


def finish(report: Report, folder: Path | None, as_json: bool) -> None:
    """Write the files, show the figures on stderr, print one JSON object as the last line on stdout."""
    if folder is not None:
        write(report, folder)
    if not as_json:
        show(report)
        if folder is not None:
            NOTES.print(f"report: {folder / 'report.html'}", markup=False)
    last_line(report_line(report, folder))


def report_line(report: Report, folder: Path | None) -> dict[str, Any]:
    """The report without its curves, with its headline or null."""
    line: dict[str, Any] = msgspec.to_builtins(report)
    del line["figures"]
    said = None if missing_for_headline(report) else headline(report)
    folder_text = None if folder is None else str(folder)
    return {**line, "model": report.conditions.model, "headline": said, "folder": folder_text}


def last_line(values: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(values) + b"\n")
    sys.stdout.flush()


def show(report: Report) -> None:
    """Figures with their spread, then the headline or why there is none."""
    table = Table("figure", "value", "spread", box=None, pad_edge=False)
    for row in markdown.figure_rows(report):
        table.add_row(*(Text(cell) for cell in row))
    NOTES.print(table)
    missing = missing_for_headline(report)
    if not missing:
        NOTES.print(Text(headline(report), style="bold"))
        return
    NOTES.print(Text("no headline, because:", style="yellow"))
    for reason in missing:
        NOTES.print(Text(f"  {reason}", style="yellow"))

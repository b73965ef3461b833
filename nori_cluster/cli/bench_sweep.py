"""`nori bench sweep`: the latency–throughput frontier of a served model, and its highest load within an SLO."""

from typing import Annotated, Any

import typer

from nori_cluster.bench.records import LoadSpec, Slo
from nori_cluster.bench.report import SweepPoint
from nori_cluster.bench.runner import LoadResult, run_load
from nori_cluster.bench.served import serve_report
from nori_cluster.bench.sweep import Search, check_bounds, sweep
from nori_cluster.cli import bench_load as flags
from nori_cluster.cli import bench_output as output
from nori_cluster.cli.bench_show import LoadBar
from nori_cluster.cli.flags import Json
from nori_cluster.errors import ConfigError

app = typer.Typer(add_completion=False)
SEARCH = "Search"


def option(flag: str, text: str, **more: object) -> object:
    return typer.Option(flag, help=text, rich_help_panel=SEARCH, **more)  # type: ignore[arg-type]


def values_of(text: str | None) -> tuple[float, ...]:
    """ "1,2,4". Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"--values {text!r} is not a list of numbers like 1,2,4") from error


def bounds_of(given: dict[str, str]) -> dict[str, float]:
    """Name → ms of the bounds that are set. Raises ConfigError."""
    read = {name: flags.milliseconds(text, f"--{name.replace('_', '-')}") for name, text in given.items()}
    bounds = {name: bound for name, bound in read.items() if bound is not None}
    check_bounds(bounds)
    return bounds


def search_of(by: str, values: str | None, start: float | None, highest: float | None, tolerance: float) -> Search:
    """Raises ConfigError."""
    if by not in ("rate", "concurrency"):
        raise ConfigError(f"--by {by!r} is unknown; choose rate or concurrency")
    lowest = 0.05 if by == "rate" else 1.0
    top = highest or (10_000.0 if by == "rate" else 4096.0)
    return Search(
        by="rate" if by == "rate" else "concurrency",
        values=values_of(values),
        start=min(start or 1.0, top),
        lowest=min(lowest, top),
        highest=top,
        tolerance=tolerance,
    )


@app.command("sweep")
def sweep_verb(
    context: typer.Context,
    url: flags.Url = "http://127.0.0.1:8000",
    model: flags.Model = None,
    endpoint: flags.Endpoint = "completions",
    api_key: flags.ApiKey = None,
    by: Annotated[str, option("--by", "rate (open loop) or concurrency (closed loop).")] = "rate",
    values: Annotated[str | None, option("--values", "Measured first, e.g. 1,2,4,8.", show_default="none")] = None,
    start: Annotated[float | None, option("--start", "First value of the search.", show_default="1")] = None,
    highest: Annotated[float | None, option("--highest", "Never more than this.", show_default="any")] = None,
    tolerance: Annotated[float, option("--tolerance", "The bisection stops at this relative width.")] = 0.1,
    ttft_p99: Annotated[str, option("--ttft-p99", "Bound; none = no bound.")] = "500ms",
    tpot_p99: Annotated[str, option("--tpot-p99", "Bound; none = no bound.")] = "30ms",
    burstiness: flags.Burstiness = None,
    duration: flags.Duration = None,
    requests: flags.Requests = None,
    warmup: flags.Warmup = 2,
    seed: flags.Seed = 0,
    input: flags.Input = "128",
    output_length: Annotated[str, typer.Option("--output", help="Output tokens, the same way.")] = "128",
    shared_prefix: flags.SharedPrefix = 0,
    vocab_size: flags.VocabSize = 32_000,
    temperature: flags.Temperature = 0.0,
    ignore_eos: flags.IgnoreEos = True,
    processes: flags.Processes = 1,
    rounds: output.Rounds = 1,
    server_info: output.ServerInfo = None,
    admin: output.Admin = None,
    prices: output.PriceFile = None,
    label: output.Label = "",
    out: output.Out = None,
    json: Json = False,
) -> None:
    """Measure loads until the highest one within the bounds is known. Defaults: MLPerf Interactive.

    Example: nori bench sweep --ttft-p99 500ms --tpot-p99 30ms --duration 60 --out results/sweep
    """
    measure(context.params)


def measure(given: dict[str, Any]) -> None:
    """given: the verb's parameters by name."""
    by, rounds = given["by"], given["rounds"]
    search = search_of(by, given["values"], given["start"], given["highest"], given["tolerance"])
    bounds = bounds_of({name: given[name] for name in ("ttft_p99", "tpot_p99")})
    if given["requests"] is None and given["duration"] is None:
        given = {**given, "duration": flags.DEFAULT_SECONDS}
    load = flags.spec_of({**given, "output": given["output_length"], "rate": search.start if by == "rate" else None})
    told = output.told_by(given)
    slo = Slo(ttft=bounds.get("ttft_p99"), tpot=bounds.get("tpot_p99"))
    with LoadBar(output.NOTES) as bar:

        def run(spec: LoadSpec) -> LoadResult:
            return run_load(given["url"], given["model"], spec, api_key=told.api_key, progress=bar)

        swept = sweep(load, slo, search, bounds, run, rounds=rounds, show=lambda point: show(by, point))
    report = serve_report(swept.results, swept.load, slo, told, kind="sweep", sweep=swept.sweep)
    output.finish(report, given["out"], given["json"])


def show(by: str, point: SweepPoint) -> None:
    found = point.summary
    told = "; ".join(point.missed) or "within"
    output.NOTES.print(f"{by} {point.value:.4g}: {found.output_tok_s:.1f} tok/s, {told}", markup=False)

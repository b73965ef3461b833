"""The report: one self-describing JSON per measurement, from which every other view is made.

build → Report → write (report.json, report.md, report.html); read checks version and types. report.schema.json is
generated from these structs (`nori bench schema`). `headline` is the only place that forms a sentence to be quoted.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from nori_cluster.bench import spread, validity
from nori_cluster.bench.conditions import Conditions
from nori_cluster.bench.cost import Cost, Prices, cost
from nori_cluster.bench.environment import Git, Machine, git, is_loopback, machine
from nori_cluster.bench.figures import Figures, figures
from nori_cluster.bench.records import LoadSpec, RequestRecord, Slo, Summary
from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.version import __version__

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).parent / "report.schema.json"
Kind = Literal["serve", "sweep", "throughput", "latency", "startup"]


class NoHeadline(NoriError):
    """The conditions of a headline are not there; the message names what is missing."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Work given to LLM(...) in this process: `size` prompts of `input` tokens at once, `output` tokens each."""

    size: int
    input: int
    output: int
    seed: int = 0
    warmup: int = 1


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a sweep. value: its rate (requests/s) or concurrency. missed: the bounds it is outside of."""

    value: float
    summary: Summary
    missed: list[str]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """bounds: metric → ms, e.g. {"ttft_p99": 500}. best: highest value tried within all; next: lowest outside."""

    by: Literal["rate", "concurrency"]
    bounds: dict[str, float]
    points: list[SweepPoint]
    best: float | None
    next: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """See docs/benchmarking.md. time: UTC, start of the run. target: url or "in process". client: its machine.

    metrics: the median round by output rate (summary is of the same one); rounds: every one. spread: relative, per
    metric. A sweep's metrics, summary and load are those of its best point.
    """

    kind: Kind
    time: str
    target: str
    conditions: Conditions
    client: Machine
    metrics: dict[str, float]
    rounds: list[dict[str, float]]
    spread: dict[str, float]
    spread_rule: str
    invalid_because: list[str]
    schema_version: int = SCHEMA_VERSION
    nori_version: str = __version__
    git: Git | None = None
    command: list[str] = []
    label: str = ""
    slo: Slo = Slo()
    load: LoadSpec | None = None
    summary: Summary | None = None
    batch: Batch | None = None
    sweep: Sweep | None = None
    cost: Cost | None = None
    figures: Figures = Figures()


class Round(msgspec.Struct, frozen=True):
    """One run of a load."""

    records: Sequence[RequestRecord]
    summary: Summary


def build(
    *,
    kind: Kind,
    load: LoadSpec,
    slo: Slo,
    rounds: Sequence[Round],
    target: str,
    conditions: Conditions,
    started: str,
    prices: Prices | None = None,
    label: str = "",
    host: Machine | None = None,
    tree: Git | None = None,
    sweep: Sweep | None = None,
) -> Report:
    """Of one or more rounds of the same load. Raises ConfigError when a device has no price in `prices`.

    host, tree: this machine and this package's work tree; None = look now.
    """
    middle = median_round([round.summary.output_tok_s for round in rounds])
    chosen = rounds[middle]
    summaries = [round.summary for round in rounds]
    metrics = [spread.metrics_of(summary) for summary in summaries]
    wide, rule = spread.over_rounds(metrics) if len(rounds) > 1 else spread.within(chosen.summary, chosen.records)
    tree = git() if tree is None else tree
    host = machine() if host is None else host
    problems = [
        *validity.load_problems(load, summaries),
        *validity.busy(host, is_loopback(target)),
        *validity.unknown_conditions(conditions),
        *validity.tree(tree),
        *_sweep_problems(sweep),
    ]
    rates = (chosen.summary.output_tok_s, chosen.summary.total_tok_s, chosen.summary.uncached_tok_s)
    return Report(
        kind=kind,
        time=started,
        target=target,
        conditions=conditions,
        client=host,
        metrics=metrics[middle],
        rounds=metrics,
        spread=wide,
        spread_rule=rule,
        invalid_because=problems,
        git=tree,
        command=command(),
        label=label,
        slo=slo,
        load=load,
        summary=chosen.summary,
        sweep=sweep,
        cost=None if prices is None else cost(prices, conditions.devices, *rates),
        figures=figures(chosen.records),
    )


def build_in_process(
    *,
    kind: Kind,
    batch: Batch,
    rounds: Sequence[Mapping[str, float]],
    conditions: Conditions,
    started: str,
    host: Machine,
    prices: Prices | None = None,
    label: str = "",
) -> Report:
    """Of repeated work in this process; the median of each metric."""
    metrics = {name: statistics.median([round[name] for round in rounds]) for name in rounds[0]}
    wide, rule = spread.over_rounds(rounds)
    tree = git()
    few = [f"{len(rounds)} repetitions, fewer than 3"] if len(rounds) < 3 else []
    output = metrics.get("output_tok_s", 0.0)
    return Report(
        kind=kind,
        time=started,
        target="in process",
        conditions=conditions,
        client=host,
        metrics=metrics,
        rounds=[dict(round) for round in rounds],
        spread=wide,
        spread_rule=rule,
        invalid_because=[
            *few,
            *validity.busy(host, True),
            *validity.unknown_conditions(conditions),
            *validity.tree(tree),
        ],
        git=tree,
        command=command(),
        label=label,
        batch=batch,
        cost=cost(prices, conditions.devices, output, metrics.get("total_tok_s")) if prices and output else None,
    )


def median_round(rates: Sequence[float]) -> int:
    """Index of the round in the middle (the lower one of two)."""
    return sorted(range(len(rates)), key=lambda index: rates[index])[(len(rates) - 1) // 2]


def command() -> list[str]:
    """How this was called, without where the program lies and without keys."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    hidden = {index + 1 for index, word in enumerate(words) if word == "--api-key"}
    words = ["…" if index in hidden else word for index, word in enumerate(words)]
    return ["--api-key=…" if word.startswith("--api-key=") else word for word in words]


def _sweep_problems(sweep: Sweep | None) -> list[str]:
    if sweep is None or sweep.best is not None:
        return []
    bounds = ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in sweep.bounds.items())
    return [f"no {sweep.by} that was tried is within {bounds}; the figures are of the lowest one"]


def describe_load(load: LoadSpec) -> str:
    """closed loop, concurrency 8; 128 in / 64 out"""
    kinds = {
        "closed": f"closed loop, concurrency {load.concurrency}",
        "poisson": f"open loop, Poisson at {load.rate or 0:g} requests/s",
        "gamma": f"open loop, gamma bursts (shape {load.burstiness:g}) at {load.rate or 0:g} requests/s",
        "constant": f"open loop, constant {load.rate or 0:g} requests/s",
        "trace": f"trace {Path(load.trace or '').name} ({load.trace_format}) at {load.trace_speed:g} × its speed",
    }
    if load.arrival == "trace":
        return f"{kinds['trace']}, lengths of the trace"
    spans = []
    for lengths in (load.input, load.output):
        about = "" if lengths.kind == "fixed" else f" (log-normal, mean {lengths.mean or lengths.median:g})"
        spans.append(f"{lengths.median}{about}")
    shared = f", first {load.shared_prefix} shared" if load.shared_prefix else ""
    return f"{kinds[load.arrival]}; {spans[0]} in / {spans[1]} out{shared}"


def describe_slo(slo: Slo) -> str:
    bounds = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    return ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in bounds if bound is not None) or "no bound"


def describe_cost(found: Cost | None) -> str:
    if found is None:
        return "cost not stated"
    source = f"; prices: {found.source}" if found.source else ""
    return f"{found.per_million_output:.4g} {found.currency} per million output tokens ({found.priced}{source})"


def missing_for_headline(report: Report) -> list[str]:
    """What keeps this report from having a headline."""
    missing = list(report.invalid_because)
    summary = report.summary
    if summary is None or report.load is None:
        return [
            *missing,
            f"`nori bench {report.kind}` sends no requests: TTFT, TPOT, goodput and the load are not there",
        ]
    missing += [f"{name.upper()} was not measured" for name in ("ttft", "tpot") if getattr(summary, name) is None]
    if "output_tok_s" not in report.spread:
        missing.append("no spread of the output rate")
    if report.slo.ttft is None and report.slo.tpot is None and report.slo.e2e is None:
        missing.append("no SLO, so no goodput")
    return missing


def headline(report: Report) -> str:
    """One sentence with all its conditions. Raises NoHeadline naming what is missing."""
    if missing := missing_for_headline(report):
        raise NoHeadline("no headline: " + "; ".join(missing))
    summary, conditions = report.summary, report.conditions
    assert summary is not None
    assert summary.ttft is not None
    assert summary.tpot is not None
    assert report.load is not None
    devices = " + ".join(f"{device.count} × {device.name}" for device in conditions.devices)
    rounds = f"{len(report.rounds)} round{'s' if len(report.rounds) > 1 else ''}"
    uncached = "" if summary.uncached_tok_s is None else f", {summary.uncached_tok_s:.1f} total without cached input"
    return (
        f"{summary.output_tok_s:.1f} output tokens/s ± {report.spread['output_tok_s']:.0%} over {rounds} "
        f"({summary.total_tok_s:.1f} with input{uncached}), "
        f"{conditions.model} (revision {conditions.revision}; weights {conditions.weights}, KV {conditions.kv_cache}) "
        f"on {devices}, {conditions.parallelism}, {conditions.server}; {describe_load(report.load)}; "
        f"TTFT P50 {summary.ttft.p50:.0f} ms, P99 {summary.ttft.p99:.0f} ms; "
        f"TPOT P50 {summary.tpot.p50:.1f} ms, P99 {summary.tpot.p99:.1f} ms; "
        f"goodput {summary.goodput_request_s:.3g} requests/s "
        f"({summary.good_share:.0%} within {describe_slo(report.slo)}); "
        f"{describe_cost(report.cost)}."
    )


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a report."""
    made = msgspec.json.schema(Report)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Nori Cluster benchmark report"}
    return {**head, "description": f"schema_version {SCHEMA_VERSION}", **made}


def read(path: Path) -> Report:
    """A report.json, or the folder that holds one. Raises ConfigError."""
    path = path / "report.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ConfigError(f"{path}: schema_version {version!r}; this program knows reports up to {SCHEMA_VERSION}")
        return msgspec.json.decode(data, type=Report)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: no benchmark report: {error}") from error


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"

"""Report → Markdown: the headline or why there is none, the figures with their spread, every condition, every round."""

import math
from collections.abc import Iterable, Sequence

from nori_cluster.bench.environment import Device, Machine
from nori_cluster.bench.records import Percentiles, Summary
from nori_cluster.bench.report import (
    Report,
    Sweep,
    describe_cost,
    describe_load,
    describe_slo,
    headline,
    missing_for_headline,
)

LATENCIES = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("E2E", "e2e"),
)
Row = Sequence[str]


def to_markdown(report: Report) -> str:
    parts = [f"# {title(report)}", *verdict(report)]
    parts += ["## Figures", table(("figure", "value", "spread"), figure_rows(report))]
    if report.summary is not None:
        parts += [table(("ms", "mean", "P50", "P90", "P99", "max", "samples"), latency_rows(report.summary))]
    if report.sweep is not None:
        parts += ["## Sweep", sweep_text(report.sweep), table(SWEEP_HEAD, sweep_rows(report.sweep))]
    parts += ["## Conditions", table(("condition", "value", "told by"), condition_rows(report))]
    parts += ["## How it was measured", table(("", ""), method_rows(report))]
    if len(report.rounds) > 1:
        names = list(report.rounds[0])
        rows = [[str(n), *(number(round.get(name)) for name in names)] for n, round in enumerate(report.rounds, 1)]
        parts += ["## Rounds", table(("round", *names), rows)]
    return "\n\n".join(parts) + "\n"


def title(report: Report) -> str:
    label = f": {report.label}" if report.label else ""
    return f"nori bench {report.kind}{label} — {report.conditions.model or report.target}, {report.time}"


def verdict(report: Report) -> list[str]:
    """The headline, or the reasons against one as a list."""
    missing = missing_for_headline(report)
    if not missing:
        return [f"**{headline(report)}**"]
    return ["**No headline**, because:", "\n".join(f"- {reason}" for reason in missing)]


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )


def number(value: float | None) -> str:
    """Four significant digits, without an exponent where people read figures."""
    if value is None:
        return "unknown"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figure_rows(report: Report) -> list[Row]:
    def row(name: str) -> Row:
        spread = report.spread.get(name)
        return name, number(report.metrics[name]), "" if spread is None else f"± {spread:.0%}"

    rows = [row(name) for name in report.metrics]
    if report.summary is not None:
        rows += summary_rows(report.summary, report)
    return [*rows, ("cost", describe_cost(report.cost), "")]


def summary_rows(summary: Summary, report: Report) -> list[Row]:
    failed = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items()) or "none"
    rows: list[Row] = [
        ("total tokens/s without cached input", number(summary.uncached_tok_s), ""),
        ("good share", f"{summary.good_share:.1%} within {describe_slo(report.slo)}", ""),
        ("requests", f"{summary.requests}, completed {summary.completed}, failed: {failed}", ""),
        ("most at once", str(summary.max_concurrency), ""),
        ("window", f"{summary.window_start:.1f} to {summary.window_end:.1f} s of {summary.run_s:.1f} s", ""),
        ("whole run output_tok_s", number(summary.run_output_tok_s), ""),
        ("client", f"{summary.client_cpu:.0%} busy at {summary.client_events_s:.0f} events/s", ""),
    ]
    return rows + [("failure", example, "") for example in summary.failure_examples]


def latency_rows(summary: Summary) -> list[Row]:
    rows: list[Row] = []
    for name, field in LATENCIES:
        values: Percentiles | None = getattr(summary, field)
        if values is not None:
            cells = (values.mean, values.p50, values.p90, values.p99, values.max)
            rows.append((name, *map(number, cells), str(values.count)))
    return rows


SWEEP_HEAD = ("value", "output tok/s", "requests/s", "TTFT P50", "TTFT P99", "TPOT P50", "TPOT P99", "good", "misses")


def sweep_text(sweep: Sweep) -> str:
    bounds = ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in sweep.bounds.items())
    if sweep.best is None:
        return f"No {sweep.by} that was tried is within {bounds}."
    above = "no higher one was outside" if sweep.next is None else f"{sweep.next:.4g} is outside"
    return f"Highest {sweep.by} within {bounds}: **{sweep.best:.4g}** ({above})."


def sweep_rows(sweep: Sweep) -> list[Row]:
    rows: list[Row] = []
    for point in sorted(sweep.points, key=lambda point: point.value):
        summary = point.summary
        latencies = [getattr(getattr(summary, n), p, None) for n in ("ttft", "tpot") for p in ("p50", "p99")]
        rates = (summary.output_tok_s, summary.request_s)
        cells = [number(value) for value in (point.value, *rates, *latencies)]
        rows.append((*cells, f"{summary.good_share:.0%}", "; ".join(point.missed) or "none"))
    return rows


def condition_rows(report: Report) -> list[Row]:
    conditions = report.conditions
    rows: list[Row] = []
    for name in conditions.__struct_fields__:
        value = getattr(conditions, name)
        if name == "told_by":
            continue
        if name == "devices":
            value = "; ".join(map(device, value))
        elif name == "software":
            value = ", ".join(f"{package} {version}" for package, version in value.items())
        elif name == "stream_interval" and value is not None:
            value = f"{value:g} tokens per event"
        rows.append((name, str(value or "unknown"), conditions.told_by.get(name, "")))
    return rows


def device(value: Device) -> str:
    memory = f", {value.memory_bytes / 2**30:.0f} GiB" if value.memory_bytes else ""
    return f"{value.count} × {value.name}{memory}"


def method_rows(report: Report) -> list[Row]:
    tree = report.git
    git = "not a work tree" if tree is None else tree.revision + (" with changes" if tree.dirty else "")
    rows: list[Row] = []
    if report.load is not None:
        load = report.load
        rows += [("load", describe_load(load)), ("endpoint", load.endpoint), ("seed", str(load.seed))]
        rows += [("sampling", str(load.sampling or "the server's default") + (", ignore_eos" * load.ignore_eos))]
        rows += [("warm-up", f"{load.warmup} requests"), ("client processes", str(load.processes))]
        rows += [("SLO", describe_slo(report.slo))]
    if report.summary is not None:
        rows.append(("window", report.summary.steady_rule))
    if report.batch is not None:
        batch = report.batch
        rows.append(("work", f"{batch.size} prompts at once, {batch.input} in / {batch.output} out, seed {batch.seed}"))
    rows += [("spread", report.spread_rule), ("target", report.target), ("measured from", machine(report.client))]
    rows += [("program", f"nori {report.nori_version}, git {git}"), ("command", " ".join(report.command))]
    return rows


def machine(host: Machine) -> str:
    gpus = "; ".join(map(device, host.gpus)) or "no GPU"
    memory = f"{host.memory_bytes / 2**30:.0f} GiB" if host.memory_bytes else "memory unknown"
    busy = "not looked at before" if host.busy_before is None else f"{host.busy_before:.0%} busy before"
    return (
        f"{host.cpu}, {host.cores} of {host.logical_cpus} cores, {memory}, {gpus}, {host.system}, {host.python}, {busy}"
    )

"""Two reports → ratios B / A with their spread, and every condition in which they differ. Pure.

Rounds are paired in their order when both have as many (servers measured in turn, A B A B); else the medians are.
"""

import statistics
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from nori_cluster.bench.conditions import Conditions
from nori_cluster.bench.report import Report
from nori_cluster.bench.spread import HIGHER_IS_BETTER
from nori_cluster.errors import ConfigError

Verdict = Literal["better", "worse", "same"]
# stream_interval and cache_state are measured anew by each run, told_by is about the telling.
NOT_COMPARED = frozenset({"told_by", "stream_interval", "cache_state"})
CLIENT_FIELDS = ("cpu", "cores", "memory_bytes", "gpus", "driver", "system", "python")
# What decides whether a report was reproduced; the other figures are shown only.
DECIDING = (
    "output_tok_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99",
    "latency_p50", "latency_p99", "total_ms",
)  # fmt: skip


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """ratio: B / A. spread: relative; a ratio within 1 ± spread, or its inverse, is "same"."""

    metric: str
    a: float
    b: float
    ratio: float
    spread: float
    verdict: Verdict


class Difference(msgspec.Struct, frozen=True):
    """A condition in which two reports differ, as text."""

    what: str
    a: str
    b: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """paired: rounds were compared one by one."""

    paired: bool
    ratios: list[Ratio]
    differences: list[Difference]
    warnings: list[str]


def compare(a: Report, b: Report) -> Comparison:
    """Raises ConfigError when they share no figure."""
    paired = len(a.rounds) == len(b.rounds) > 1
    ratios = [_ratio(name, a, b, paired) for name in a.metrics if a.metrics[name] > 0 and b.metrics.get(name, 0) > 0]
    if not ratios:
        raise ConfigError(f"a {a.kind} report and a {b.kind} report have no figure in common")
    differences = list(_differences(a, b))
    warnings = [f"conditions differ: {', '.join(d.what for d in differences)}"] if differences else []
    for name, report in (("A", a), ("B", b)):
        if report.invalid_because:
            warnings.append(f"{name} is not valid: {report.invalid_because[0]}" + _more(report))
    return Comparison(paired=paired, ratios=ratios, differences=differences, warnings=warnings)


def _more(report: Report) -> str:
    others = len(report.invalid_because) - 1
    return f" (and {others} more)" if others else ""


def _ratio(name: str, a: Report, b: Report, paired: bool) -> Ratio:
    ratio = b.metrics[name] / a.metrics[name]
    own = [report.spread.get(name, 0.0) for report in (a, b)]
    spread = max(*own, (own[0] ** 2 + own[1] ** 2) ** 0.5)
    if paired:
        pairs = [y[name] / x[name] for x, y in zip(a.rounds, b.rounds, strict=True) if x.get(name) and y.get(name)]
        if len(pairs) == len(a.rounds):
            ratio = statistics.median(pairs)
            spread = (max(pairs) - min(pairs)) / ratio
    return Ratio(
        metric=name,
        a=a.metrics[name],
        b=b.metrics[name],
        ratio=ratio,
        spread=spread,
        verdict=judge(name, ratio, spread),
    )


def judge(metric: str, ratio: float, spread: float) -> Verdict:
    """Whether B is better than A by more than the spread."""
    if max(ratio, 1 / ratio) <= 1 + spread:
        return "same"
    return "better" if (ratio > 1) == (metric in HIGHER_IS_BETTER) else "worse"


def _differences(a: Report, b: Report) -> Iterator[Difference]:
    yield from differing("", a, b, ("kind", "nori_version", "slo", "batch"))
    if a.load is not None and b.load is not None:
        yield from differing("load.", a.load, b.load, a.load.__struct_fields__)
    yield from condition_differences(a.conditions, b.conditions)
    yield from differing("client.", a.client, b.client, CLIENT_FIELDS)
    revisions = [report.git.revision if report.git else "" for report in (a, b)]
    if revisions[0] != revisions[1]:
        yield Difference("git revision", *revisions)


def condition_differences(a: Conditions, b: Conditions) -> Iterator[Difference]:
    yield from differing("", a, b, [name for name in a.__struct_fields__ if name not in NOT_COMPARED])


def differing(prefix: str, a: Any, b: Any, names: Any) -> Iterator[Difference]:
    for name in names:
        values = [getattr(side, name) for side in (a, b)]
        if values[0] != values[1]:
            yield Difference(prefix + name, *(_text(value) for value in values))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()

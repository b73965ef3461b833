"""A report and the same load run again → does it reproduce? Each deciding figure must lie within the report's own
stated spread, upwards and downwards; what the report does not state a spread for decides nothing. Pure.

The load is the same but for its seed: a server that still runs has the old prompts in its prefix cache.
"""

import secrets

import msgspec

from nori_cluster.bench.compare import DECIDING, Difference, Verdict, compare, judge
from nori_cluster.bench.records import LoadSpec
from nori_cluster.bench.report import Report
from nori_cluster.errors import ConfigError

UNKNOWN = ("", "[]", "{}")  # a condition that nobody told this time is no difference


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ratio: again / stated. decides: counts for the answer."""

    metric: str
    stated: float
    again: float
    ratio: float
    spread: float
    verdict: Verdict
    decides: bool


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """because: why it does not reproduce. differences: conditions that were not those of the report. warnings: what
    speaks against either run."""

    reproduces: bool
    because: list[str]
    warnings: list[str]
    checked: list[Checked]
    differences: list[Difference]


def check_can_run(report: Report) -> None:
    """Raises ConfigError when there is no load to send again."""
    if report.load is None:
        raise ConfigError(
            f"a {report.kind} report was made in one process and has no load to send; "
            f"run `nori bench {report.kind}` again and `nori bench compare` the two"
        )


def again_loads(load: LoadSpec, rounds: int, seed: int | None) -> list[LoadSpec]:
    """The loads to send. seed: of the first; None = one that nobody used before."""
    first = secrets.randbelow(1 << 31) if seed is None else seed
    return [msgspec.structs.replace(load, seed=first + number) for number in range(rounds)]


def verify(stated: Report, again: Report) -> Verification:
    """again: of the same load. Raises ConfigError when they share no figure."""
    checked = []
    for ratio in compare(stated, again).ratios:
        name, value = ratio.metric, again.metrics[ratio.metric] / stated.metrics[ratio.metric]
        spread = stated.spread.get(name)
        checked.append(
            Checked(
                metric=name,
                stated=stated.metrics[name],
                again=again.metrics[name],
                ratio=value,
                spread=spread or 0.0,
                verdict=judge(name, value, spread or 0.0),
                decides=name in DECIDING and spread is not None,
            )
        )
    because = [
        f"{c.metric} is {c.again:.4g}, stated {c.stated:.4g} ± {c.spread:.0%} ({c.verdict}: {c.ratio:.2f} ×)"
        for c in checked
        if c.decides and c.verdict != "same"
    ]
    lost = [name for name in DECIDING if name in stated.metrics and name not in again.metrics]
    because += [f"{name} could not be measured again" for name in lost]
    summary = again.summary
    if summary is not None and not summary.completed:
        because.append("no request ended well")
    if not any(c.decides for c in checked):
        because.append("the report states no figure with a spread")
    differences = [d for d in compare(stated, again).differences if d.what != "load.seed" and d.b not in UNKNOWN]
    warnings = [f"the report is not valid: {reason}" for reason in stated.invalid_because]
    warnings += [f"about the run again: {reason}" for reason in again.invalid_because]
    return Verification(
        reproduces=not because, because=because, warnings=warnings, checked=checked, differences=differences
    )

"""The numbers of a report that another run is held against, and by how much two honest runs may differ.

A spread is relative: 0.1 says that another run under the same conditions may be 10 % off. Over several rounds it is
twice their range over their median (a few rounds see only a part of what happens); within one round, twice the standard
error between its quarters of time. Never below a floor: no run sees the drift of its machine between hours, and fewer
than three rounds see next to none of it, so their floor is doubled.
"""

import statistics
from collections.abc import Mapping, Sequence

from nori_cluster.bench.metrics import output_over_time, percentiles, tpot_of
from nori_cluster.bench.records import RequestRecord, Summary

HIGHER_IS_BETTER = frozenset({"output_tok_s", "total_tok_s", "request_s", "goodput_request_s"})
FLOORS = {"p99": 0.35, "p90": 0.25, "p50": 0.15, "": 0.10}  # by what a metric's name ends with
GOODPUT_FLOOR = 0.25  # requests at the edge of a bound fall to either side
QUARTERS = 4
ENOUGH_ROUNDS = 3
RULE_ROUNDS = "twice the range over the median of {rounds} rounds, at least {floors}"
RULE_ONE = "one round: twice the standard error between its quarters of time, at least {floors}"


def metrics_of(summary: Summary) -> dict[str, float]:
    """Name → value of a run that was completed by at least one request."""
    found = {
        "output_tok_s": summary.output_tok_s,
        "total_tok_s": summary.total_tok_s,
        "request_s": summary.request_s,
        "goodput_request_s": summary.goodput_request_s,
    }
    for name in ("ttft", "tpot", "e2e"):
        values = getattr(summary, name)
        if values is not None:
            found |= {f"{name}_{rank}": getattr(values, rank) for rank in ("p50", "p90", "p99")}
    return found


def floor(metric: str, rounds: int) -> float:
    value = GOODPUT_FLOOR
    if not metric.startswith("goodput"):
        value = next(value for end, value in FLOORS.items() if metric.endswith(end))
    return value * _widening(rounds)


def _widening(rounds: int) -> int:
    return 1 if rounds >= ENOUGH_ROUNDS else 2


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
    """Spread of each metric that all rounds have, and the rule in words. rounds: two or more."""
    spread = {}
    for name in rounds[0]:
        values = [metrics[name] for metrics in rounds if name in metrics]
        middle = statistics.median(values)
        if len(values) == len(rounds) and middle > 0:
            spread[name] = max(floor(name, len(rounds)), 2 * (max(values) - min(values)) / middle)
    return spread, RULE_ROUNDS.format(rounds=len(rounds), floors=_floors(len(rounds)))


def within(summary: Summary, records: Sequence[RequestRecord]) -> tuple[dict[str, float], str]:
    """Spread of each metric of a single round."""
    seen = _quarters(summary, records)
    spread = {}
    for name in metrics_of(summary):
        values = [value for value in seen.get(name.rpartition("_")[0] if "_p" in name else "rate", []) if value > 0]
        wide = 0.0
        if len(values) == QUARTERS:
            error = statistics.stdev(values) / statistics.mean(values) / QUARTERS**0.5
            wide = 2 * 2**0.5 * error  # two runs differ by the root of two more than one from the truth
        spread[name] = max(floor(name, 1), wide)
    return spread, RULE_ONE.format(floors=_floors(1))


def _quarters(summary: Summary, records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Output rate and median latencies in each quarter of the window."""
    ended = [record for record in records if record.failure is None and record.events]
    tokens = output_over_time(ended)
    width = (summary.window_end - summary.window_start) / QUARTERS
    found: dict[str, list[float]] = {"rate": [], "ttft": [], "tpot": [], "e2e": []}
    for number in range(QUARTERS):
        start = summary.window_start + number * width
        found["rate"].append(tokens.between(start, start + width))
        inside = [record for record in ended if start <= record.due <= start + width]
        samples = {
            "ttft": [record.first - record.due for record in inside if record.first is not None],
            "tpot": [tpot for record in inside if (tpot := tpot_of(record)) is not None],
            "e2e": [record.last - record.due for record in inside if record.last is not None],
        }
        for name, seconds in samples.items():
            if (values := percentiles(seconds)) is not None:
                found[name].append(values.p50)
    return found


def _floors(rounds: int) -> str:
    rate, middle, tail = (FLOORS[end] * _widening(rounds) for end in ("", "p50", "p99"))
    return f"{rate:.0%} (rates), {middle:.0%} (P50), {tail:.0%} (P99)"

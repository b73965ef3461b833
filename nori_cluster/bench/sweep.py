"""Many loads of one kind: the latency–throughput frontier, and the highest load within bounds by bisection.

`next_value` decides from what was measured so far (pure); `sweep` runs loads until it says None. It assumes that more
load is never faster: whatever lies above the lowest value outside of a bound is not believed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.records import LoadSpec, Slo, Summary
from nori_cluster.bench.report import Sweep, SweepPoint
from nori_cluster.bench.runner import LoadResult
from nori_cluster.bench.validity import MAX_FAILED
from nori_cluster.errors import ConfigError

By = Literal["rate", "concurrency"]
SERVED_SHARE = 0.9  # an open loop that serves less of what is sent is over its limit, however short its run
GROWTH = 2.0


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """values: measured whatever comes of them. start: where to begin when there are none; then times GROWTH, up or
    down, within [lowest, highest]. tolerance: relative width at which the bisection stops."""

    by: By = "rate"
    values: tuple[float, ...] = ()
    start: float = 1.0
    lowest: float = 0.05
    highest: float = 10_000.0
    tolerance: float = 0.1
    most_points: int = 24

    def __post_init__(self) -> None:
        for name in ("start", "lowest", "highest", "tolerance"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name} must be above 0, not {getattr(self, name):g}")
        if not all(0 < value < math.inf for value in self.values):
            raise ConfigError(f"--values must be above 0, not {', '.join(f'{value:g}' for value in self.values)}")
        if self.by == "concurrency" and any(value != int(value) for value in (*self.values, self.start)):
            raise ConfigError("concurrencies are whole numbers")
        if self.lowest > self.highest or not self.lowest <= self.start <= self.highest:
            raise ConfigError(f"--start {self.start:g} is not within {self.lowest:g} to {self.highest:g}")


def next_value(search: Search, within: Mapping[float, bool]) -> float | None:
    """What to measure next; None = found. within: value → whether it was inside of all bounds."""
    if len(within) >= search.most_points:
        return None
    for value in search.values:
        if value not in within:
            return value
    if not within:
        return search.start
    good, bad = best_and_next(within)
    if bad is None:
        assert good is not None
        above = min(good * GROWTH, search.highest)
        return above if above > good else None
    if good is None:
        below = _whole(search, max(bad / GROWTH, search.lowest))
        return below if below < bad and below not in within else None
    if bad / good <= 1 + search.tolerance:
        return None
    middle = _whole(search, math.sqrt(good * bad))
    if search.by == "concurrency":
        middle = max(middle, good + 1)
    return middle if good < middle < bad else None


def best_and_next(within: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """The highest value inside below the lowest one outside, and that one."""
    bad = min((value for value, inside in within.items() if not inside), default=None)
    good = max((value for value, inside in within.items() if inside and (bad is None or value < bad)), default=None)
    return good, bad


def _whole(search: Search, value: float) -> float:
    return float(max(1, int(value))) if search.by == "concurrency" else float(f"{value:.4g}")


def missed(summary: Summary, load: LoadSpec, bounds: Mapping[str, float]) -> list[str]:
    """The bounds this run is outside of. bounds: e.g. {"ttft_p99": 500.0}, in ms."""
    outside = []
    for name, bound in bounds.items():
        field, _, rank = name.partition("_")
        values = getattr(summary, field)
        seen = None if values is None else getattr(values, rank)
        if seen is None:
            outside.append(f"{name} not measured")
        elif seen > bound:
            outside.append(f"{name} {seen:.4g} ms")
    failed = sum(summary.failures.values())
    if summary.requests and failed / summary.requests > MAX_FAILED:
        outside.append(f"{failed} of {summary.requests} failed")
    rate = summary.requests / load.duration if load.duration and load.arrival != "closed" else None
    if rate and summary.completed and summary.steady and summary.request_s < SERVED_SHARE * rate:
        outside.append(f"served {summary.request_s:.3g} of {rate:.3g} requests/s")
    return outside


def at(load: LoadSpec, by: By, value: float, number: int = 0) -> LoadSpec:
    """The load with this rate or concurrency. number: of the run."""
    load = msgspec.structs.replace(load, seed=load.seed + number)
    if by == "concurrency":
        return msgspec.structs.replace(load, arrival="closed", rate=None, concurrency=int(value))
    arrival = "poisson" if load.arrival in ("closed", "trace") else load.arrival
    return msgspec.structs.replace(load, arrival=arrival, rate=value)


def check_bounds(bounds: Mapping[str, float]) -> None:
    """Raises ConfigError."""
    if not bounds:
        raise ConfigError("a sweep needs a bound: --ttft-p99 or --tpot-p99")
    for name, bound in bounds.items():
        if not bound > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0: nothing is answered in {bound:g} ms")


class Swept(msgspec.Struct, frozen=True):
    """results: the rounds at `load`, the best point's (the lowest point's when none is within)."""

    sweep: Sweep
    load: LoadSpec
    results: Sequence[LoadResult]


def sweep(
    load: LoadSpec,
    slo: Slo,
    search: Search,
    bounds: Mapping[str, float],
    run: Callable[[LoadSpec], LoadResult],
    *,
    rounds: int = 1,
    show: Callable[[SweepPoint], None] = lambda point: None,
) -> Swept:
    """Measure until the frontier and its best point are known. rounds: runs of the best point in all.

    Every run has a seed of its own, counted up from the load's: no prefix cache knows its prompts.

    Raises ConfigError for bounds nothing can meet, and what `run` raises.
    """
    check_bounds(bounds)
    points: dict[float, SweepPoint] = {}
    results: dict[float, LoadResult] = {}
    within: dict[float, bool] = {}
    while (value := next_value(search, within)) is not None:
        spec = at(load, search.by, value, len(points))
        results[value] = run(spec)
        summary = summarize(results[value].records, spec, slo, results[value].cpus)
        points[value] = SweepPoint(value=value, summary=summary, missed=missed(summary, spec, bounds))
        within[value] = not points[value].missed
        show(points[value])
    best, above = best_and_next(within)
    chosen = min(points) if best is None else best
    spec = at(load, search.by, chosen, list(points).index(chosen))
    more = (at(load, search.by, chosen, len(points) + number) for number in range(rounds - 1))
    again = [results[chosen], *map(run, more)]
    ordered = [points[value] for value in sorted(points)]
    found = Sweep(by=search.by, bounds=dict(bounds), points=ordered, best=best, next=above)
    return Swept(found, spec, again)

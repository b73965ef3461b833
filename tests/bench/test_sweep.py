"""The search for the highest load within bounds, on servers made of a formula."""

from collections.abc import Callable

import msgspec
import pytest
from fakes.bench_runs import LOAD, run

from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.records import LoadSpec, Slo
from nori_cluster.bench.runner import LoadResult
from nori_cluster.bench.sweep import Search, at, best_and_next, missed, next_value, sweep
from nori_cluster.cli.bench_sweep import bounds_of, search_of, values_of
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit
BOUNDS = {"ttft_p99": 500.0, "tpot_p99": 30.0}


def found_by(search: Search, limit: float) -> tuple[float | None, list[float]]:
    """What the search ends with when everything up to `limit` is within, and what it measured."""
    within: dict[float, bool] = {}
    while (value := next_value(search, within)) is not None:
        assert value not in within, "nothing is measured twice"
        within[value] = value <= limit
    return best_and_next(within)[0], list(within)


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3, 150.0, 999.0])
def test_bisection_finds_the_limit_within_its_tolerance(limit: float) -> None:
    best, measured = found_by(Search(tolerance=0.05), limit)
    assert best is not None
    assert best <= limit < best * 1.055
    assert len(measured) <= 20


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 100])
def test_concurrencies_are_found_exactly(limit: int) -> None:
    search = Search(by="concurrency", lowest=1.0, tolerance=0.001)
    best, measured = found_by(search, limit)
    assert best == limit
    assert all(value == int(value) for value in measured)


def test_the_ends_of_the_range() -> None:
    assert found_by(Search(highest=16.0), 1e9) == (16.0, [1.0, 2.0, 4.0, 8.0, 16.0])
    best, measured = found_by(Search(), 0.0)
    assert best is None
    assert measured[-1] == 0.05
    assert found_by(Search(by="concurrency", lowest=1.0), 0.5) == (None, [1.0])
    assert len(found_by(Search(tolerance=1e-9, most_points=12), 3.0)[1]) == 12


def test_given_values_come_first() -> None:
    best, measured = found_by(Search(values=(8.0, 1.0, 2.0), tolerance=0.5), 5.0)
    assert measured[:3] == [8.0, 1.0, 2.0]
    assert measured[3] == 4.0
    assert best == 4.0


def test_what_lies_above_a_bad_load_is_not_believed() -> None:
    assert best_and_next({1.0: True, 2.0: False, 4.0: True}) == (1.0, 2.0)
    assert best_and_next({}) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 0.0}, "--start must be above 0"),
        ({"tolerance": float("nan")}, "--tolerance"),
        ({"values": (1.0, -1.0)}, "--values must be above 0, not 1, -1"),
        ({"by": "concurrency", "values": (1.5,)}, "whole numbers"),
        ({"start": 5.0, "highest": 2.0}, "--start 5 is not within"),
    ],
)
def test_impossible_searches(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Search(**arguments)  # type: ignore[arg-type]


def queueing(knee: float, sent: list[LoadSpec]) -> Callable[[LoadSpec], LoadResult]:
    """TTFT grows as 1 / (knee - rate), as a queue's does."""

    def send(load: LoadSpec) -> LoadResult:
        sent.append(load)
        rate = load.rate or float(load.concurrency)
        wait = 0.05 / max(1e-3, 1 - rate / knee)
        return run(msgspec.structs.replace(load, rate=rate), ttft=wait, tpot=0.02)

    return send


def test_a_sweep_ends_at_the_knee() -> None:
    sent: list[LoadSpec] = []
    load = msgspec.structs.replace(LOAD, arrival="poisson", rate=1.0)
    shown: list[float] = []
    swept = sweep(
        load, Slo(), Search(tolerance=0.05), BOUNDS, queueing(20.0, sent), rounds=3,
        show=lambda point: shown.append(point.value),
    )  # fmt: skip
    # 0.05 / (1 - rate / 20) is 0.5 s at a rate of 18; noise of 2 % moves the P99 a little.
    assert swept.sweep.best == pytest.approx(17.5, abs=1.0)
    assert swept.sweep.next is not None
    assert swept.sweep.next <= swept.sweep.best * 1.06
    assert len(swept.results) == 3
    assert (swept.load.arrival, swept.load.rate) == ("poisson", swept.sweep.best)
    assert len({spec.seed for spec in sent}) == len(sent), "every run has prompts of its own"
    assert sorted(shown) == [point.value for point in swept.sweep.points]
    assert next(p for p in swept.sweep.points if p.value == swept.sweep.next).missed[0].startswith("ttft_p99 ")


def test_a_server_that_is_never_fast_enough() -> None:
    swept = sweep(LOAD, Slo(), Search(by="concurrency", lowest=1.0), BOUNDS, queueing(0.5, []))
    assert swept.sweep.best is None
    assert swept.load.concurrency == 1


def test_what_a_run_misses() -> None:
    def missing(result: LoadResult, load: LoadSpec = LOAD) -> list[str]:
        return missed(summarize(result.records, load, Slo(), result.cpus), load, BOUNDS)

    assert missing(run(LOAD)) == []
    assert missing(run(LOAD, ttft=0.6, noise=0.0)) == ["ttft_p99 600 ms"]
    assert missing(run(LOAD, failures=4)) == ["4 of 200 failed"]
    assert missing(run(LOAD, failures=200))[0] == "ttft_p99 not measured"


def test_loads_of_a_sweep() -> None:
    closed = at(LOAD, "concurrency", 4.0, 2)
    assert (closed.arrival, closed.concurrency, closed.rate, closed.seed) == ("closed", 4, None, 2)
    assert at(closed, "rate", 4.0).arrival == "poisson"
    assert at(msgspec.structs.replace(LOAD, arrival="gamma"), "rate", 4.0).arrival == "gamma"


def test_flags() -> None:
    assert values_of("1,2.5") == (1.0, 2.5)
    assert bounds_of({"ttft_p99": "0.5s", "tpot_p99": "none"}) == {"ttft_p99": 500.0}
    assert search_of("concurrency", None, None, 8.0, 0.1).highest == 8.0
    for call, words in (
        (lambda: values_of("a"), "not a list of numbers"),
        (lambda: bounds_of({"ttft_p99": "none"}), "a sweep needs a bound"),
        (lambda: bounds_of({"ttft_p99": "0ms"}), "--ttft-p99 must be above 0: nothing is answered in 0 ms"),
        (lambda: search_of("x", None, None, None, 0.1), "choose rate or concurrency"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()

"""The drain rate on a made-up clock, and the router's Retry-After that comes from it."""

import pytest

from nori_cluster.routing.base import Finished, GroupRegistration, GroupReport, GroupState, Place, Placement, Refusal
from nori_cluster.routing.drain import LEAST, MOST, SHARES, UNKNOWN, WINDOW, DrainRate, spread
from nori_cluster.routing.least_loaded import LeastLoaded
from nori_cluster.routing.router import Router

pytestmark = pytest.mark.unit


def busy(per_second: float, seconds: float) -> DrainRate:
    drain = DrainRate()
    drain.begin(0.0)
    for number in range(round(per_second * seconds)):
        drain.departed((number + 1) / per_second)
    return drain


@pytest.mark.parametrize("per_second", [0.5, 3.0, 200.0])
def test_a_steady_rate_is_measured(per_second: float) -> None:
    drain = busy(per_second, 30.0)
    assert drain.rate(30.0) == pytest.approx(per_second, rel=0.15, abs=0.1)
    assert drain.wait(30.0, 10) == pytest.approx(min(max(10 / per_second, LEAST), MOST), rel=0.2)


def test_before_anything_is_known_the_wait_is_short() -> None:
    drain = DrainRate()
    assert drain.rate(5.0) is None
    assert drain.wait(5.0, 1000) == UNKNOWN
    drain.begin(5.0)
    assert drain.wait(5.5, 1000) == UNKNOWN


def test_nothing_leaves_and_the_wait_grows_to_its_bound() -> None:
    drain = DrainRate()
    drain.begin(0.0)
    assert drain.rate(100.0) == 0
    assert drain.wait(100.0, 2) == 2 * WINDOW
    assert drain.wait(100.0, 1000) == MOST


def test_old_departures_are_forgotten() -> None:
    drain = busy(10.0, 20.0)
    assert drain.rate(20.0 + WINDOW + 1) == 0


def test_idle_time_between_busy_periods_does_not_count() -> None:
    drain = busy(10.0, 20.0)
    drain.end(20.0)
    assert drain.rate(500.0) == pytest.approx(10.0, rel=0.1)
    drain.begin(500.0)
    assert drain.rate(500.5) == pytest.approx(10.0, rel=0.1)  # the last one's, until this one says something


def test_an_idle_router_does_not_tell_the_first_refused_of_a_flood_to_wait_long() -> None:
    """One request every two seconds, each placed at once and none waiting: no rate is known, it is not 0."""
    router = Router(LeastLoaded, max_waiting=10)
    facts = GroupRegistration(
        group_id="g", incarnation=1, model="m", address="", max_context_tokens=1000, max_running_sequences=1,
        max_batched_tokens=50,
    )  # fmt: skip
    router.register(facts, GroupState.READY, GroupReport(), 0.0)
    for number in range(10):
        router.place("gw", Place(request=number, model="m", prompt_tokens=100, max_tokens=1), 2.0 * number)
        router.finish("gw", Finished(number, 1), 2.0 * number + 1.0)
    assert router.drain.rate(25.0) is None
    router.take()
    for number in range(10, 40):
        router.place("gw", Place(request=number, model="m", prompt_tokens=100, max_tokens=1), 25.0)
    waits = [decision.retry_after for _, decision in router.take() if isinstance(decision, Refusal)]
    assert len(waits) > 10
    assert all(wait is not None and UNKNOWN <= wait < 2 * UNKNOWN for wait in waits)


def test_spread_keeps_between_once_and_twice() -> None:
    times = [spread(4.0, number) for number in range(SHARES)]
    assert min(times) == 4.0
    assert max(times) < 8.0
    assert len(set(times)) == SHARES


def test_the_router_tells_the_refused_when_its_queue_will_have_emptied() -> None:
    """Two requests a second leave a queue of ten: come back in five to ten seconds."""
    router = Router(LeastLoaded, max_waiting=10)
    facts = GroupRegistration(
        group_id="g", incarnation=1, model="m", address="", max_context_tokens=1000, max_running_sequences=1,
        max_batched_tokens=50,
    )  # fmt: skip
    router.register(facts, GroupState.READY, GroupReport(), 0.0)
    placed: list[int] = []
    number, refusals = 0, []
    for tick in range(200):  # 20 s in steps of 0.1 s
        now = tick / 10
        while not router.queue.full:
            number += 1
            router.place("gw", Place(request=number, model="m", prompt_tokens=100, max_tokens=1), now)
        number += 1
        router.place("gw", Place(request=number, model="m", prompt_tokens=100, max_tokens=1), now)
        if tick % 5 == 4:
            router.finish("gw", Finished(placed.pop(0), 1), now)
        for _, decision in router.take():
            if isinstance(decision, Placement):
                placed.append(decision.request)
            elif isinstance(decision, Refusal):
                refusals.append((now, decision.retry_after))
        router.check()
    assert {wait for now, wait in refusals if now < 1.0} <= {spread(UNKNOWN, n) for n in range(SHARES)}
    late = [wait for now, wait in refusals if now > 5.0 and wait is not None]
    assert 4.0 <= min(late) <= 6.0
    assert 8.0 <= max(late) <= 12.0

"""The controller's decisions as a pure function, under a random walk."""

import random

import pytest

from nori_cluster.cluster.reconcile import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    MAX_FAILURES,
    PLACE_AGAIN,
    STEADY,
    GroupRecord,
    Phase,
    to_start,
)

pytestmark = pytest.mark.unit


def test_a_new_group_starts_at_once_and_once() -> None:
    records = {"m-0": GroupRecord(name="m-0"), "m-1": GroupRecord(name="m-1")}
    assert to_start(["m-0", "m-1"], records, 0.0) == ["m-0", "m-1"]
    records["m-0"].started()
    assert to_start(["m-0", "m-1"], records, 0.0) == ["m-1"]


def test_failures_in_a_row_wait_longer_and_a_steady_run_forgives() -> None:
    record, now, waits = GroupRecord(name="m-0"), 100.0, []
    for _ in range(9):
        record.started()
        record.failed("x", now)
        record.gone()
        waits.append(record.not_before - now)
        now = record.not_before
    assert waits[:3] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
    assert waits[-1] == LONGEST_BACKOFF
    record.started()
    record.became_ready(now)
    record.failed("x", now + STEADY)
    assert record.not_before == now + STEADY + FIRST_BACKOFF


def test_an_end_on_purpose_and_a_lack_of_room_are_no_failures() -> None:
    record = GroupRecord(name="m-0")
    for _ in range(30):
        record.started()
        record.became_ready(100.0)
        record.ended()
        record.gone()
        assert to_start(["m-0"], {"m-0": record}, 100.0) == ["m-0"]
        record.started()
        record.unplaced("no room", 100.0)
        record.gone()
        assert to_start(["m-0"], {"m-0": record}, 100.0) == []
        assert to_start(["m-0"], {"m-0": record}, 100.0 + PLACE_AGAIN) == ["m-0"]
    assert (record.phase, record.failures, record.lost, record.restarts) == (Phase.ABSENT, 0, 0, 30)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk(seed: int) -> None:
    """Never two incarnations at once, never a start before its time; every incarnation number is new."""
    rng, now = random.Random(seed), 0.0
    names = [f"m-{i}" for i in range(3)]
    records = {name: GroupRecord(name=name) for name in names}
    seen: set[tuple[str, int]] = set()
    for _ in range(300):
        now += rng.random() * 3
        for name in to_start(names, records, now):
            record = records[name]
            assert record.phase is Phase.ABSENT
            assert now >= record.not_before
            record.started()
            assert (name, record.incarnation) not in seen
            seen.add((name, record.incarnation))
        record = records[rng.choice(names)]
        if record.phase is Phase.STARTING:
            turn = rng.random()
            if turn < 0.5:
                record.became_ready(now)
            else:
                record.failed("start", now) if turn < 0.9 else record.unplaced("no room", now)
        elif record.phase is Phase.READY and rng.random() < 0.3:
            record.failed("lost", now) if rng.random() < 0.7 else record.ended()
        elif record.phase is Phase.GIVEN_UP:
            assert record.failures == MAX_FAILURES
            record.retry()
        elif record.phase is Phase.STOPPING:
            record.gone()
    assert len(seen) > 20

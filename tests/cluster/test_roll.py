"""The order of a rolling operation, alone and under a random walk."""

import random

import pytest

from nori_cluster.cluster.roll import Roll
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit


def test_one_after_another_in_order() -> None:
    roll = Roll(["m-0", "m-1"], 1)
    assert roll.take([]) == ["m-0"]
    assert roll.take([]) == []
    roll.back("m-0")
    assert (roll.percent, roll.over) == (50, False)
    assert roll.take([]) == ["m-1"]
    roll.back("m-1")
    assert roll.over
    assert roll.verdict() is None


def test_a_group_that_is_down_by_itself_counts_and_is_passed_over() -> None:
    roll = Roll(["m-0", "m-1", "m-2"], 1)
    assert roll.take(["m-0"]) == []
    assert Roll(["m-0", "m-1", "m-2"], 2).take(["m-0"]) == ["m-1"]


def test_a_failure_ends_it_after_what_is_under_way() -> None:
    roll = Roll(["m-0", "m-1", "m-2"], 2)
    assert roll.take([]) == ["m-0", "m-1"]
    roll.failed("m-0", "no memory")
    assert roll.take([]) == []
    assert not roll.over
    roll.back("m-1")
    assert roll.over
    assert str(roll.verdict()) == "m-0: no memory (done: m-1; not touched: m-2)"


def test_none_at_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_unavailable must be at least 1"):
        Roll(["m-0"], 0)


@pytest.mark.parametrize("seed", range(50))
def test_random_walk(seed: int) -> None:
    """Each group is taken at most once; nothing is taken beyond the limit or after a failure; it ends."""
    rng = random.Random(seed)
    names = [f"m-{i}" for i in range(rng.randint(0, 8))]
    limit = rng.randint(1, 3)
    roll, down, taken = Roll(names, limit), set(), []
    for _ in range(1000):
        if roll.over:
            break
        down = {name for name in names if name not in roll.active and rng.random() < 0.2}
        failed_before = bool(roll.failures)
        news = roll.take(down)
        taken += news
        assert not (news and failed_before)
        assert not news or len(roll.active | down) <= limit
        assert not down & set(news)
        for name in sorted(roll.active):
            if rng.random() < 0.5:
                roll.failed(name, "lost") if rng.random() < 0.05 else roll.back(name)
        if rng.random() < 0.01 and (idle := [*roll.waiting, *roll.done]):
            roll.failed(rng.choice(idle), "given up")
        states = [*roll.waiting, *roll.active, *roll.done, *roll.failures]
        assert sorted(states) == names, "every group is in exactly one state"
    assert roll.over
    assert len(taken) == len(set(taken))
    assert (roll.verdict() is None) == (not roll.failures)
    if not roll.failures:
        assert sorted(roll.done) == names
        assert roll.percent == 100

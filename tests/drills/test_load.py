"""What the drills' judge calls lost and changed."""

import pytest
from drills.drill import Result, report_of
from drills.load import Load, Outcome, says

pytestmark = pytest.mark.unit

WANTED = {0: [5, 6, 7, 8], 1: [5, 9, 9, 9]}


def outcome(ids: dict[int, list[int]], *, done: bool = True, error: str = "", gateway: str = "a") -> Outcome:
    ended = set(ids) if done else set()
    return Outcome(0, gateway, ids=ids, ended=ended, status=200, done=done, error=error)


@pytest.mark.parametrize(
    ("ids", "right"),
    [
        ({0: [5, 6, 7], 1: [5, 9, 9]}, True),
        ({0: [5, 6, 6], 1: [5, 9, 9]}, False),  # another token
        ({0: [5, 6, 7, 8], 1: [5, 9, 9]}, False),  # one too many
        ({0: [5, 6], 1: [5, 9, 9]}, False),  # one too few
        ({0: [5, 6, 7]}, False),  # a candidate left out
        ({0: [5, 6, 7], 1: [5, 9, 9], 2: [1]}, False),  # one nobody asked for
    ],
)
def test_a_whole_stream_says_exactly_what_it_says_undisturbed(ids: dict[int, list[int]], right: bool) -> None:
    assert says(outcome(ids), WANTED, 3) is right


@pytest.mark.parametrize(
    ("ids", "right"), [({0: [5, 6]}, True), ({}, True), ({0: [5, 5]}, False), ({0: [5, 6, 7, 8]}, False)]
)
def test_a_cut_stream_is_a_right_beginning(ids: dict[int, list[int]], right: bool) -> None:
    assert says(outcome(ids, done=False), WANTED, 3) is right


def test_what_counts_as_lost() -> None:
    load = Load({"a": "", "b": ""}, 1, 3, {0: WANTED})
    whole = {0: [5, 6, 7], 1: [5, 9, 9]}
    load.outcomes = [
        outcome(whole),
        outcome(whole, error="the group was lost"),
        outcome({0: [5]}, done=False),
        outcome({0: [5]}, done=False, gateway="b"),
        Outcome(0, "a", status=-503, error="no Retry-After"),
    ]
    assert len(load.lost) == 4
    load.leaves("b")
    assert len(load.lost) == 3
    assert len(load.ended_with_gateway) == 1
    assert not load.changed


def test_a_pause_counts_from_the_question_unless_requests_queue() -> None:
    load = Load({"a": ""}, 1, 3, {})
    load.outcomes = [Outcome(0, "a", waited=7.0, gap=2.0)]
    assert load.longest_gap(queues=False) == 7.0
    assert load.longest_gap(queues=True) == 2.0


def result(name: str, **fields: object) -> Result:
    usual = {"requests": 10, "lost": 0, "changed": 0, "refused": 0, "gap": 1.0, "longest_gap": 10.0, "recovery": 3.0}
    return Result(name=name, **usual | fields)  # type: ignore[arg-type]


def test_the_report_sums_up() -> None:
    results = [
        result("x"),
        result("x", lost=1, gap=2.0),
        result("y", gap=40.0, longest_gap=45.0, verdict="fine"),
        result("z", gap=11.0),
        result("w", failure="not whole"),
    ]
    report = report_of(results, {"v": "needs tc"})
    assert (report["drills"], report["requests"], report["lost"], report["failed"]) == (5, 50, 1, 3)
    assert report["longest_gap_s"] == 11.0
    assert report["by_drill"]["x"] == {
        "drills": 2, "requests": 20, "lost": 1, "changed": 0, "failed": 1, "gap_s": 2.0, "recovery_s": 3.0,
    }  # fmt: skip
    assert report["verdicts"] == {
        "x": "FAILED: 1 lost",
        "y": "fine",
        "z": "FAILED: a pause of 11.0 s, at most 10",
        "w": "FAILED: not whole",
        "v": "SKIPPED: needs tc",
    }

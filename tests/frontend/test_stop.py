"""StopMatcher against its slow twin: one character at a time over the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nori_cluster.frontend.stop import StopMatcher, StopStrings

pytestmark = pytest.mark.unit


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            best = max(matches, key=len)
            return text[: end if include else end - len(best)], best
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out = []
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out.append(emitted)
        if matched is not None:
            return out, matched
    out.append(matcher.flush())
    assert matcher.flush() == ""
    return out, None


@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_equals_one_character_at_a_time(pieces: list[str], stops: list[str], include: bool) -> None:
    out, matched = run(pieces, stops, include)
    assert ("".join(out), matched) == reference("".join(pieces), stops, include)


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_holds_back_nothing_it_need_not(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    held = ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        if matched is not None:
            return
        held = (held + piece)[len(emitted) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["ABC", "DEF", "G"], ["DEFG"], ["ABC", "", ""], "DEFG"),
        (["ABC", "DEF", "G"], ["DEFX"], ["ABC", "", "DEFG", ""], None),
        (["ABC", "DEF", "G"], ["\n", "DEFGH", "EFX"], ["ABC", "", "", "DEFG"], None),
        (["ABC", "DEF", "G"], ["FG"], ["ABC", "DE", ""], "FG"),
    ],
)
def test_f04_pieces(pieces: list[str], stops: list[str], text: list[str], matched: str | None) -> None:
    assert run(pieces, stops, False) == (text, matched)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=60, max_size=90), min_size=1, max_size=3),
    cut=st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_long_stop_strings_that_are_not_listed(pieces: list[str], stops: list[str], cut: int) -> None:
    """The way without a list of prefixes gives the same: a text that nearly, then wholly, holds a stop string."""
    stops = [stop * 3 for stop in stops]
    assert StopStrings(stops).prefixes is None or sum(map(len, stops)) <= StopStrings.LISTED
    text = [*pieces, stops[0][:-1], "c", stops[0][:cut], *stops[0][cut:]]
    out, matched = run(text, stops, False)
    assert ("".join(out), matched) == reference("".join(text), stops, False)

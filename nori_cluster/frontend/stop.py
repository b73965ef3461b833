"""Stop strings over streamed text: what may be sent, what is held back, where it ends.

Equal to feeding one character at a time: the match that completes first wins, at a tie the longest string.
"""

import functools
import re
from collections.abc import Sequence


class StopStrings:
    """What can be known of a set of stop strings before any text comes; shared by the streams that have it.

    prefixes: every proper prefix; any: finds one. Both None where the strings are long: too much to list and compile.
    """

    LISTED = 256  # characters of all strings together

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: of the strings that end at the same character, the longest starts first.
        self.longest_first = sorted(set(stops), key=len, reverse=True)
        self.reach = len(self.longest_first[0]) - 1
        self.first = re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]")
        self.any: re.Pattern[str] | None = None
        self.prefixes: frozenset[str] | None = None
        if sum(map(len, stops)) <= self.LISTED:
            self.any = re.compile("|".join(map(re.escape, self.longest_first)))
            self.prefixes = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))

    def within(self, text: str, start: int) -> bool:
        """Whether text holds a stop string at `start` or later."""
        if self.any is not None:
            return self.any.search(text, start) is not None
        return any(text.find(stop, start) >= 0 for stop in self.longest_first)

    def begins(self, text: str) -> bool:
        """Whether text is a proper prefix of a stop string, given that it holds none."""
        if self.prefixes is not None:
            return text in self.prefixes
        return any(stop.startswith(text) for stop in self.longest_first)


@functools.lru_cache(maxsize=256)
def _known(stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops)


class StopMatcher:
    """Finds any of `stops` (non-empty strings) across push borders. include: the match itself is part of the output."""

    __slots__ = ("_first", "_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert stops, "no stop strings"
        assert all(stops), "empty stop string"
        self._stops = _known(tuple(stops))
        self._include = include
        self._held = ""
        self._first = self._stops.first.search

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send now, and the stop string that matched (then nothing may be pushed any more)."""
        if self._held and text:
            text = self._held + text
        first = self._first(text)
        if first is None:
            return text, None
        start = first.start()
        if self._stops.within(text, start):
            return self._matched(text)
        cut = self._held_from(text, start)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text still held back; the stream has ended."""
        held, self._held = self._held, ""
        return held

    def _matched(self, text: str) -> tuple[str, str]:
        """The end of a text that holds a stop string."""
        best_end, best = -1, ""
        for stop in self._stops.longest_first:
            start = text.find(stop)
            if start >= 0 and (best_end < 0 or start + len(stop) < best_end):
                best_end, best = start + len(stop), stop
        self._held = ""
        return text[: best_end if self._include else best_end - len(best)], best

    def _held_from(self, text: str, start: int) -> int:
        """Where the longest suffix that is a proper prefix of a stop string begins, at `start` or later; len(text) when
        there is none."""
        found = self._first(text, max(start, len(text) - self._stops.reach))
        while found:
            start = found.start()
            if self._stops.begins(text[start:]):
                return start
            found = self._first(text, start + 1)
        return len(text)

"""Stop strings over streamed text: what may be sent, what is held back, where it ends.

Equal to feeding one character at a time: the match that completes first wins, at a tie the longest string.
"""

import re
from collections.abc import Sequence


class StopMatcher:
    """Finds any of `stops` (non-empty strings) across push borders. include: the match itself is part of the output."""

    __slots__ = ("_first", "_held", "_include", "_reach", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert stops, "no stop strings"
        assert all(stops), "empty stop string"
        # Longest first: of the strings that end at the same character, the longest starts first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self._reach = len(self._stops[0]) - 1
        self._first = re.compile("[" + re.escape("".join({stop[0] for stop in self._stops})) + "]")

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send now, and the stop string that matched (then nothing may be pushed any more)."""
        if not text:
            return "", None
        text = self._held + text
        best_end, best = -1, ""
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best_end < 0 or start + len(stop) < best_end):
                best_end, best = start + len(stop), stop
        if best_end >= 0:
            self._held = ""
            return text[: best_end if self._include else best_end - len(best)], best
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text still held back; the stream has ended."""
        held, self._held = self._held, ""
        return held

    def _held_from(self, text: str) -> int:
        """Where the longest suffix that is a proper prefix of a stop string begins; len(text) when there is none."""
        found = self._first.search(text, max(0, len(text) - self._reach))
        while found:
            start = found.start()
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
            found = self._first.search(text, start + 1)
        return len(text)

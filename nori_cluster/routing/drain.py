"""How fast the waiting queue empties, and when a refused client should come back. Pure; owned by routing/router.py.

A rate is taken over one busy period (while something waits): idle time would make a queue look slower than it is.
"""

import math
from collections import deque

WINDOW = 10.0  # seconds over which the rate is taken
WARM_UP = 1.0  # seconds of a busy period before its rate says something
UNKNOWN = 1.0  # seconds to come back in, before any rate is known
LEAST, MOST = 1.0, 60.0  # seconds; clients of the OpenAI kind ignore anything above 120
SHARES = 16  # parts into which the return of the refused is spread
_BUCKET = 0.5  # seconds


class DrainRate:
    """Told when something begins to wait, when something that had waited left, for whatever reason, and when nothing
    waits any more."""

    def __init__(self) -> None:
        self._busy_since: float | None = None  # None while nothing waits
        self._prior: float | None = None  # rate at the end of the last busy period in which something left
        self._left: deque[tuple[int, int]] = deque()  # (bucket, departures), oldest first
        self._count = 0

    def begin(self, now: float) -> None:
        """Something waits; says nothing new within a busy period."""
        if self._busy_since is None:
            self._busy_since = now

    def end(self, now: float) -> None:
        """Nothing waits; the rate stays what it was until the next busy period has one."""
        if self._count:
            self._prior = self.rate(now)
        self._busy_since = None
        self._left.clear()
        self._count = 0

    def departed(self, now: float) -> None:
        bucket = math.floor(now / _BUCKET)
        last = self._left.pop()[1] if self._left and self._left[-1][0] == bucket else 0
        self._left.append((bucket, last + 1))
        self._count += 1
        self._forget(now)

    def rate(self, now: float) -> float | None:
        """Departures per second; None before anything is known."""
        if self._busy_since is None or now - self._busy_since < WARM_UP:
            return self._prior
        self._forget(now)
        return self._count / min(now - self._busy_since, WINDOW)

    def wait(self, now: float, ahead: int) -> float:
        """Seconds until `ahead` waiting requests have left. Where none left yet, as if one were about to."""
        rate = self.rate(now)
        if rate is None:
            return UNKNOWN
        return min(max(ahead / max(rate, 1 / WINDOW), LEAST), MOST)

    def _forget(self, now: float) -> None:
        oldest = math.floor((now - WINDOW) / _BUCKET)
        while self._left and self._left[0][0] <= oldest:
            self._count -= self._left.popleft()[1]


def spread(seconds: float, number: int) -> float:
    """Between once and twice the time, by the number of the refusal: the refused do not come back all at once."""
    return seconds * (1 + (number % SHARES) / SHARES)

"""What the controller does next, as a pure function of what is wanted and what it saw. A group is replaced whole."""

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

FIRST_BACKOFF = 0.5  # seconds before the first replacement; doubles with each failure in a row
LONGEST_BACKOFF = 30.0
STEADY = 60.0  # a group that was ready for so long starts afresh with its backoff
MAX_FAILURES = 10  # in a row: then the group stays down until somebody resumes it
PLACE_AGAIN = 5.0  # seconds until a group without a place is tried again; this is no failure of the group


class Phase(Enum):
    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GIVEN_UP = "given up"


class GroupRecord(msgspec.Struct, kw_only=True):
    """One place in the pool. incarnation grows with every start. ready_at, not_before: monotonic seconds.

    failures: in a row. lost, restarts: incarnations lost and ended on purpose, in all. unplaceable: why there is no
    room for the group; empty once it was placed.
    """

    name: str
    phase: Phase = Phase.ABSENT
    incarnation: int = 0
    failures: int = 0
    ready_at: float | None = None
    not_before: float = 0.0
    last_failure: str = ""
    unplaceable: str = ""
    lost: int = 0
    restarts: int = 0

    def started(self) -> None:
        self.phase = Phase.STARTING
        self.incarnation += 1

    def became_ready(self, now: float) -> None:
        self.phase = Phase.READY
        self.ready_at = now
        self.unplaceable = ""

    def failed(self, reason: str, now: float) -> None:
        """The incarnation is lost; its processes are being ended."""
        if self.ready_at is not None and now - self.ready_at >= STEADY:
            self.failures = 0
        self.phase = Phase.STOPPING
        self.failures += 1
        self.lost += 1
        backoff: float = FIRST_BACKOFF * 2 ** (self.failures - 1)
        self.ready_at, self.not_before = None, now + min(backoff, LONGEST_BACKOFF)
        self.last_failure, self.unplaceable = reason, ""

    def ended(self) -> None:
        """The incarnation is ended on purpose: no failure, no backoff."""
        self.phase = Phase.STOPPING
        self.restarts += 1
        self.ready_at, self.not_before = None, 0.0

    def unplaced(self, reason: str, now: float) -> None:
        """There was no room for it. It is tried until there is, however often."""
        self.phase = Phase.STOPPING
        self.ready_at, self.not_before = None, now + PLACE_AGAIN
        self.unplaceable = reason

    def postponed(self, reason: str, now: float) -> None:
        """There is no room to start it: it stays absent, and is looked at again as above."""
        self.not_before, self.unplaceable = now + PLACE_AGAIN, reason

    def taken_over(self, whole: bool, now: float) -> bool:
        """Another controller watches from now on. whole: every process of a group that was ready is there and answers;
        what is not whole has been ended. True: this is when the group was lost."""
        lost = self.phase is Phase.READY and not whole
        if lost:
            self.failed("it was not whole when another controller took over", now)
        if self.phase is Phase.STOPPING:
            self.gone()
        elif self.phase is Phase.STARTING:  # cut off with its controller: not its failure
            self.phase, self.not_before = Phase.ABSENT, 0.0
        return lost

    def look_again(self) -> None:
        """Somebody asks for groups anew: if there was no room for this one, there may be now."""
        if self.unplaceable:
            self.unplaceable, self.not_before = "", 0.0

    def gone(self) -> None:
        """Its processes have ended. A crash loop stops here."""
        self.phase = Phase.ABSENT if self.failures < MAX_FAILURES else Phase.GIVEN_UP

    def retry(self) -> None:
        """Somebody asks for a group that was given up."""
        assert self.phase is Phase.GIVEN_UP
        self.phase, self.failures, self.not_before = Phase.ABSENT, 0, 0.0


class Deaths:
    """Too many are `limit` within `window` seconds."""

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._times: list[float] = []

    def too_many(self, now: float) -> bool:
        """Counts one more."""
        self._times = [*(time for time in self._times if now - time < self._window), now]
        return len(self._times) >= self._limit


def to_start(wanted: Sequence[str], records: Mapping[str, GroupRecord], now: float) -> list[str]:
    """Names of the groups to start now."""
    absent = (records[name] for name in wanted if records[name].phase is Phase.ABSENT)
    return [record.name for record in absent if record.not_before <= now]

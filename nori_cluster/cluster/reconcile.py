"""What the controller does next, as a pure function of what is wanted and what it saw. A group is replaced whole."""

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

FIRST_BACKOFF = 0.5  # seconds before the first replacement; doubles with each failure in a row
LONGEST_BACKOFF = 30.0
STEADY = 60.0  # a group that was ready for so long starts afresh with its backoff
MAX_FAILURES = 10  # in a row: then the group stays down until somebody resumes it


class Phase(Enum):
    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GIVEN_UP = "given up"


class GroupRecord(msgspec.Struct, kw_only=True):
    """One place in the pool. incarnation grows with every start. ready_at, failed_at: monotonic seconds."""

    name: str
    phase: Phase = Phase.ABSENT
    incarnation: int = 0
    failures: int = 0
    ready_at: float | None = None
    failed_at: float | None = None
    last_failure: str = ""

    def started(self) -> None:
        self.phase = Phase.STARTING
        self.incarnation += 1

    def became_ready(self, now: float) -> None:
        self.phase = Phase.READY
        self.ready_at = now

    def failed(self, reason: str, now: float) -> None:
        """The incarnation is lost; its processes are being ended."""
        if self.ready_at is not None and now - self.ready_at >= STEADY:
            self.failures = 0
        self.phase = Phase.STOPPING
        self.failures += 1
        self.ready_at, self.failed_at = None, now
        self.last_failure = reason

    def gone(self) -> None:
        """Its processes have ended. A crash loop stops here."""
        self.phase = Phase.ABSENT if self.failures < MAX_FAILURES else Phase.GIVEN_UP

    def retry(self) -> None:
        """Somebody asks for a group that was given up."""
        assert self.phase is Phase.GIVEN_UP
        self.phase, self.failures, self.failed_at = Phase.ABSENT, 0, None

    def start_at(self) -> float:
        """When the next incarnation may start."""
        if self.failed_at is None:
            return 0.0
        backoff: float = FIRST_BACKOFF * 2 ** (self.failures - 1)
        return self.failed_at + min(backoff, LONGEST_BACKOFF)


def to_start(wanted: Sequence[str], records: Mapping[str, GroupRecord], now: float) -> list[str]:
    """Names of the groups to start now."""
    absent = (records[name] for name in wanted if records[name].phase is Phase.ABSENT)
    return [record.name for record in absent if record.start_at() <= now]

"""What one gateway holds at once: calls and the bytes of their bodies. Asked before a body is read, and as it comes.

The router bounds what waits in the cluster; this bounds the process's own memory, whatever waits where.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import msgspec

from nori_cluster.errors import GatewayFull

LEAST, MOST = 1.0, 60.0  # seconds a client is told to wait
WEIGHT = 0.05  # of the newest call in the mean duration


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """calls: waiting and running, of any kind with a body. held_bytes: of the bodies of all these calls."""

    calls: int = 8192
    held_bytes: int = 256 << 20


class Held:
    """The room that one call takes. bytes: of its body that have come."""

    def __init__(self, gate: "Gate") -> None:
        self._gate = gate
        self.bytes = 0

    def add(self, size: int) -> None:
        """So many more bytes came. Raises GatewayFull when they have no room."""
        if size:
            self._gate.check_bytes(size, own=self.bytes)
            self._gate.held_bytes += size
            self.bytes += size


class Gate:
    """Belongs to one loop. seconds: moving mean of how long a call stays, None before the first has left."""

    def __init__(self, limits: GateLimits = GateLimits()) -> None:
        self.limits = limits
        self.calls = 0
        self.held_bytes = 0
        self.seconds: float | None = None

    @contextmanager
    def hold(self, expected: int) -> Iterator[Held]:
        """For the life of one call; its bytes count as they are added. Raises GatewayFull when the call, or as many
        bytes as it announces, has no room."""
        if self.calls >= self.limits.calls:
            raise GatewayFull(f"this gateway holds {self.calls} requests already", retry_after=self.retry_after())
        self.check_bytes(expected)
        held = Held(self)
        self.calls += 1
        entered = monotonic()
        try:
            yield held
        finally:
            self.calls -= 1
            self.held_bytes -= held.bytes
            stayed = monotonic() - entered
            self.seconds = stayed if self.seconds is None else self.seconds + WEIGHT * (stayed - self.seconds)

    def check_bytes(self, size: int, own: int = 0) -> None:
        """Raises GatewayFull when so many more have no room. own: what the call holds already; it always has room
        while no other holds any."""
        if self.held_bytes > own and self.held_bytes + size > self.limits.held_bytes:
            message = f"this gateway holds {self.held_bytes} bytes of {self.calls} requests already"
            raise GatewayFull(message, retry_after=self.retry_after())

    def retry_after(self) -> float:
        """Seconds after which what is held now has left: calls leave at calls / seconds."""
        return LEAST if self.seconds is None else min(max(self.seconds, LEAST), MOST)

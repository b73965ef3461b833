"""What one gateway holds at once: calls and the bytes of their bodies. Asked before a body is read.

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


class Gate:
    """Belongs to one loop. seconds: moving mean of how long a call stays, None before the first has left."""

    def __init__(self, limits: GateLimits = GateLimits()) -> None:
        self.limits = limits
        self.calls = 0
        self.held_bytes = 0
        self.seconds: float | None = None

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """For the life of one call with a body of so many bytes. Raises GatewayFull; one body always has room."""
        limits = self.limits
        if self.calls >= limits.calls:
            raise GatewayFull(f"this gateway holds {self.calls} requests already", retry_after=self.retry_after())
        if self.calls and self.held_bytes + size > limits.held_bytes:
            message = f"this gateway holds {self.held_bytes} bytes of {self.calls} requests already"
            raise GatewayFull(message, retry_after=self.retry_after())
        self.calls += 1
        self.held_bytes += size
        entered = monotonic()
        try:
            yield
        finally:
            self.calls -= 1
            self.held_bytes -= size
            stayed = monotonic() - entered
            self.seconds = stayed if self.seconds is None else self.seconds + WEIGHT * (stayed - self.seconds)

    def retry_after(self) -> float:
        """Seconds after which what is held now has left: calls leave at calls / seconds."""
        return LEAST if self.seconds is None else min(max(self.seconds, LEAST), MOST)

"""Prefix-cache changes of a group, numbered, for StreamCacheEvents: 64-bit routing hashes, a hint and never a proof.

Lives on the event loop of the data-plane server. Who asks for changes that are no longer kept gets a snapshot.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator

import msgspec

from nori_cluster.engine.prefix import CacheEvents
from nori_cluster.hashing import hint

KEPT_BATCHES = 1024
SNAPSHOT_PART = 1 << 16  # hashes in one message


class CacheChange(msgspec.Struct, frozen=True):
    """sequence: number of the last change in it. snapshot: stored is all there is (parts of it share a sequence)."""

    sequence: int
    stored: list[int]
    removed: list[int]
    snapshot: bool = False


class CacheEventLog:
    """What the cache holds, and the latest changes."""

    def __init__(self) -> None:
        self.sequence = 1  # 0 asks for a snapshot
        self._held: Counter[int] = Counter()  # two digests may share a hint
        self._changes: deque[CacheChange] = deque(maxlen=KEPT_BATCHES)
        self._changed = asyncio.Event()

    def append(self, events: CacheEvents) -> None:
        stored, removed = [hint(d) for d in events.stored], [hint(d) for d in events.removed]
        self._held.update(stored)
        self._held.subtract(removed)
        for value in removed:
            if self._held[value] <= 0:
                del self._held[value]
        self.sequence += 1
        self._changes.append(CacheChange(self.sequence, stored, removed))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int) -> AsyncIterator[CacheChange]:
        """Changes after that number, for ever; a snapshot first where 0 was asked for or they are no longer kept."""
        while True:
            oldest = self._changes[0].sequence if self._changes else self.sequence + 1
            if after == 0 or after < oldest - 1 or after > self.sequence:
                after = self.sequence
                held = list(self._held)
                for start in range(0, max(len(held), 1), SNAPSHOT_PART):
                    yield CacheChange(after, held[start : start + SNAPSHOT_PART], [], snapshot=True)
            for change in [c for c in self._changes if c.sequence > after]:
                after = change.sequence
                yield change
            if after == self.sequence:
                await self._changed.wait()

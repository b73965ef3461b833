"""The prefix index: which block holds which digest, and which digests a running sequence is about to compute.

A block enters when the step that filled it has been applied, never earlier; it leaves when it is evicted.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.hashing import Digest


class CacheEvents(msgspec.Struct, frozen=True):
    """Digests that became visible and that went, in order of happening within each list (stored come first)."""

    stored: Sequence[Digest] = ()
    removed: Sequence[Digest] = ()


class PrefixIndex:
    """digest → block, one block per digest. queries, hits: tokens asked for and found at starts of sequences."""

    def __init__(self, num_blocks: int) -> None:
        self.queries = 0
        self.hits = 0
        self._blocks: dict[Digest, int] = {}
        self._digests: list[Digest | None] = [None] * num_blocks
        self.indexed = np.zeros(num_blocks, dtype=np.bool_)  # by block
        self._pending: dict[Digest, int] = {}  # → the slot that computes it
        self._stored: list[Digest] = []
        self._removed: list[Digest] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Blocks of the longest known prefix."""
        found = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def is_pending(self, digest: Digest) -> bool:
        """A running sequence will have computed it soon: waiting for it is cheaper than computing it again."""
        return digest in self._pending

    def expect(self, digests: Sequence[Digest], slot: int) -> None:
        """The slot's sequence starts to compute these blocks."""
        for digest in digests:
            self._pending.setdefault(digest, slot)

    def settle(self, digests: Sequence[Digest], slot: int) -> None:
        """The slot's sequence has computed them, or never will."""
        for digest in digests:
            if self._pending.get(digest) == slot:
                del self._pending[digest]

    def put(self, digest: Digest, block: int) -> None:
        """The block holds it, computed. No-op when another block does."""
        if digest not in self._blocks:
            assert self._digests[block] is None, "a block cannot hold two digests"
            self._blocks[digest] = block
            self._digests[block] = digest
            self.indexed[block] = True
            self._stored.append(digest)

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        digest = self._digests[block]
        assert digest is not None
        del self._blocks[digest]
        self._digests[block] = None
        self.indexed[block] = False
        self._removed.append(digest)

    def take_events(self) -> CacheEvents | None:
        """What happened since the last call; None when nothing did."""
        if not self._stored and not self._removed:
            return None
        events = CacheEvents(self._stored, self._removed)
        self._stored, self._removed = [], []
        return events

    def check(self, live_slots: NDArray[np.int32]) -> None:
        for digest, block in self._blocks.items():
            assert self._digests[block] == digest, "index and blocks disagree"
        assert sum(d is not None for d in self._digests) == len(self._blocks) == np.count_nonzero(self.indexed)
        assert set(self._pending.values()) <= set(live_slots.tolist()), "a digest is expected of a slot that is gone"

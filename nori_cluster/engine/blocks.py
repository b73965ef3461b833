"""The pool of KV blocks: which are free, which are cached without a user, and how many tables list the others."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from nori_cluster.engine.prefix import PrefixIndex


class BlockPool:
    """`num_blocks` fixed pages of `block_size` tokens.

    A block is free, cached (in the prefix index, no table lists it; evicted in order of last use) or owned (listed by
    at least one table). keep: whether blocks stay cached when their last user leaves.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keep: bool = True) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(num_blocks)
        self.evictions = 0
        self._keep = keep
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the free ones are _stack[:_top]
        self._top = num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = np.zeros(num_blocks, dtype=np.int32)

    @property
    def free(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return self._top + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def room_beside(self, hits: list[int]) -> int:
        """What can be allocated once these cached or owned blocks are taken."""
        return self.free - sum(block in self._cached for block in hits)

    def allocate(self, count: int) -> NDArray[np.int32]:
        """`count` block ids, each referenced once. The caller has checked `free`."""
        assert 0 <= count <= self.free, "allocation beyond the pool"
        while self._top < count:
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
            self.evictions += 1
            self._stack[self._top] = block
            self._top += 1
        self._top -= count
        ids = self._stack[self._top : self._top + count][::-1].copy()
        self._references[ids] = 1
        return ids

    def acquire(self, ids: list[int]) -> NDArray[np.int32]:
        """One more reference of each; cached ones are owned again."""
        for block in ids:
            self._cached.pop(block, None)
        taken = np.array(ids, dtype=np.int32)
        self._references[taken] += 1
        return taken

    def release(self, ids: NDArray[np.int32]) -> None:
        """Drop one reference of each id of a table; the last of a prefix counts as least recently used."""
        assert (self._references[ids] > 0).all(), "block released twice"
        self._references[ids] -= 1
        gone = ids[self._references[ids] == 0]
        indexed = self.index.indexed[gone]
        for block in gone[indexed][::-1].tolist():
            if self._keep:
                self._cached[block] = None
            else:
                self.index.forget(block)
        freed = gone[~indexed] if self._keep else gone
        self._stack[self._top : self._top + len(freed)] = freed
        self._top += len(freed)

    def empty(self) -> None:
        """Forget all that is cached. No block may be owned."""
        assert not self._references.any(), "a block is in use"
        for block in self._cached:
            self.index.forget(block)
            self._stack[self._top] = block
            self._top += 1
        self._cached.clear()

    def check(self, listed: NDArray[np.int32]) -> None:
        """Invariants: `listed` is every table's blocks, concatenated; each block is free, cached or listed."""
        free = self._stack[: self._top]
        assert len(np.unique(free)) == self._top, "a block is free twice"
        counts = np.bincount(listed, minlength=self.num_blocks)
        assert (counts == self._references).all(), "reference counts differ from the tables"
        assert not self._references[free].any(), "a free block is referenced"
        assert not self.index.indexed[free].any(), "a free block is in the index"
        cached = np.array(list(self._cached), dtype=np.int32)
        assert not self._references[cached].any(), "a cached block is referenced"
        assert self.index.indexed[cached].all(), "a cached block is not in the index"
        assert self._keep or not len(cached)
        assert self._top + len(cached) + np.count_nonzero(counts) == self.num_blocks, "blocks leaked"

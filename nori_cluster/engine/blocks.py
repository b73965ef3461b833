"""The pool of KV blocks: which are free, and how many tables list each of the others."""

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """`num_blocks` fixed pages of `block_size` tokens. A block is free, or referenced by at least one table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the free ones are _stack[:_free]
        self._free = num_blocks
        self._references = np.zeros(num_blocks, dtype=np.int32)

    @property
    def free(self) -> int:
        return self._free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> NDArray[np.int32]:
        """`count` block ids, each referenced once. The caller has checked `free`."""
        assert 0 <= count <= self._free, "allocation beyond the pool"
        self._free -= count
        ids = self._stack[self._free : self._free + count][::-1].copy()
        self._references[ids] = 1
        return ids

    def release(self, ids: NDArray[np.int32]) -> None:
        """Drop one reference of each id; those with none left become free."""
        assert (self._references[ids] > 0).all(), "block released twice"
        self._references[ids] -= 1
        gone = ids[self._references[ids] == 0]
        self._stack[self._free : self._free + len(gone)] = gone
        self._free += len(gone)

    def check(self, listed: NDArray[np.int32]) -> None:
        """Invariants: `listed` is every table's blocks, concatenated; each block is free or listed, never both."""
        free = self._stack[: self._free]
        assert len(np.unique(free)) == self._free, "a block is free twice"
        counts = np.bincount(listed, minlength=self.num_blocks)
        assert (counts == self._references).all(), "reference counts differ from the tables"
        assert not self._references[free].any(), "a free block is referenced"
        assert self._free + np.count_nonzero(counts) == self.num_blocks, "blocks leaked"

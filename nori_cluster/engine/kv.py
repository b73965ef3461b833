"""Block tables per slot and KV group, on top of one pool per group. One group today (all layers keep everything)."""

import numpy as np
from numpy.typing import NDArray

from nori_cluster.engine.blocks import BlockPool


class KVGroup:
    """The block tables of the layers that share one retention rule."""

    def __init__(self, pool: BlockPool, num_slots: int, max_tokens: int) -> None:
        self.pool = pool
        self.tables = np.zeros((num_slots, pool.blocks_for(max_tokens)), dtype=np.int32)
        self.counts = np.zeros(num_slots, dtype=np.int32)

    def missing(self, slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks that each slot lacks to cover so many tokens (≥ 0)."""
        lack: NDArray[np.int32] = -(-tokens // self.pool.block_size) - self.counts[slots]
        return np.maximum(lack, 0)

    def grow(self, slot: int, count: int) -> NDArray[np.int32]:
        """Append `count` new blocks to a slot's table; returns their ids."""
        ids = self.pool.allocate(count)
        have = self.counts[slot]
        self.tables[slot, have : have + count] = ids
        self.counts[slot] = have + count
        return ids

    def adopt(self, slot: int, blocks: list[int]) -> NDArray[np.int32]:
        """Begin a slot's table with blocks that others computed; returns their ids."""
        assert self.counts[slot] == 0
        ids = self.pool.acquire(blocks)
        self.tables[slot, : len(ids)] = ids
        self.counts[slot] = len(ids)
        return ids

    def release(self, slot: int) -> None:
        """Give the slot's blocks back."""
        self.pool.release(self.tables[slot, : self.counts[slot]])
        self.counts[slot] = 0

    def check(self, computed: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        """`held`: slots whose table may list blocks; computed: per slot."""
        idle = np.setdiff1d(np.arange(len(self.counts)), held)
        assert not self.counts[idle].any(), "an idle slot holds blocks"
        assert (self.counts[held] * self.pool.block_size >= computed[held]).all(), "a table does not cover `computed`"
        listed = [self.tables[slot, : self.counts[slot]] for slot in held]
        self.pool.check(np.concatenate(listed) if listed else np.zeros(0, dtype=np.int32))

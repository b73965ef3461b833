"""200 random walks with check() after each step; five planted bugs must each make the walk fail."""

import numpy as np
import pytest
from engine.walk import Walk

from nori_cluster.engine.kv import KVGroup
from nori_cluster.engine.scheduler import Scheduler

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batch", range(10))
def test_random_walks(depth: int, batch: int) -> None:
    for seed in range(batch * 10, batch * 10 + 10):
        Walk(seed, depth).run(60)


class LeakOnAbort(Scheduler):
    def abort(self, key: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None and sequence.slot >= 0:
            slot = sequence.slot
            super().abort(key)
            self.groups[0].tables[slot, 0] = -1
            self.pool._free -= 1


class DoubleFree(Scheduler):
    def _release(self, applied: int) -> None:
        again = list(self._releasing)
        super()._release(applied)
        for slot in again:
            if slot not in self._releasing:
                self.groups[0].counts[slot] = 1
                self.groups[0].release(slot)


class EarlyRelease(Scheduler):
    """Slots and blocks return although a plan in flight still names them."""

    def _release(self, applied: int) -> None:
        super()._release(self._step)


class LostSlot(Scheduler):
    def _leave(self, sequence) -> None:
        super()._leave(sequence)
        if self._free_slots and self._arrivals % 5 == 0:
            self._free_slots.pop()


class ShortTable(Scheduler):
    """A table that covers one block less than what is computed."""

    def __init__(self, config, spec) -> None:
        super().__init__(config, spec)

        class Short(KVGroup):
            def missing(self, slots, tokens):
                return super().missing(slots, np.maximum(tokens - 1, 0))

        self.groups = (Short(self.pool, config.max_num_seqs, spec.max_model_len),)


class StaleStop(Scheduler):
    """The stop ids of the slot's previous sequence stay in force."""

    def _start(self, sequence, now):
        before = list(self._stop._ids), self._stop._has_ids.copy()
        slot = super()._start(sequence, now)
        self._stop._ids[slot], self._stop._has_ids[slot] = before[0][slot], before[1][slot]
        return slot


@pytest.mark.parametrize(
    ("bug", "depth"),
    [(LeakOnAbort, 1), (DoubleFree, 1), (EarlyRelease, 2), (LostSlot, 1), (ShortTable, 1), (StaleStop, 1)],
)
def test_planted_bug_is_caught(bug: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(20):
            Walk(seed, depth, bug).run(60)

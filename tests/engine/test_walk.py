"""200 random walks with check() after each step; each planted bug must make one fail."""

import heapq

import numpy as np
import pytest
from engine.walk import Walk

from nori_cluster.engine.kv import KVGroup
from nori_cluster.engine.outcome import Sampled
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import Sequence
from nori_cluster.hashing import extend
from nori_cluster.types import FinishReason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batch", range(10))
def test_random_walks(depth: int, batch: int) -> None:
    for seed in range(batch * 10, batch * 10 + 10):
        Walk(seed, depth).run(60)


class LeakOnAbort(Scheduler):
    def abort(self, key: int, retryable: bool = False, reason: str = "") -> None:
        sequence = self._sequences.get(key)
        ran = sequence is not None and sequence.slot >= 0
        super().abort(key, retryable, reason)
        if ran:
            self.pool._top -= 1


class EarlyIndex(Scheduler):
    """A prompt's blocks are offered when it starts, before anything was computed into them."""

    def _admit(self, builder, budget, now):
        started = super()._admit(builder, budget, now)
        for slot, _ in started:
            applied, self.columns.computed[slot] = int(self.columns.computed[slot]), self.columns.known[slot]
            self._share(np.array([slot], dtype=np.int32))
            self.columns.computed[slot] = applied
        return started


class StaleDigest(Scheduler):
    """An evicted block keeps its place in the index."""

    def __init__(self, config, spec) -> None:
        super().__init__(config, spec)
        index, forget = self.pool.index, self.pool.index.forget

        def forget_half(block: int) -> None:
            digest = index._digests[block]
            forget(block)
            index._blocks[digest] = block

        index.forget = forget_half


class ForgottenParent(Scheduler):
    """Digests that do not depend on what comes before."""

    def _root(self, request):
        root = super()._root(request)
        return None if root is None else b""

    def submit(self, request, now):
        super().submit(request, now)
        sequence = self._sequences[request.key]
        if sequence.root is not None:
            sequence.__class__ = Unchained


class Unchained(Sequence):
    __slots__ = ()

    def digest_blocks(self, tokens, blocks, block_size):
        for block in range(len(self.digests), blocks):
            self.digests.append(extend(b"", tokens[block * block_size : (block + 1) * block_size].tobytes()))
        return self.digests[:blocks]


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

    def _start(self, sequence, computed, now):
        before = list(self._stop._ids), self._stop._has_ids.copy()
        slot = super()._start(sequence, computed, now)
        self._stop._ids[slot], self._stop._has_ids[slot] = before[0][slot], before[1][slot]
        return slot


class Unfair(Scheduler):
    """Where the first in line does not fit, the next one is tried."""

    def _admit(self, builder, budget, now):
        head = self.waiting.head()
        blocked = head is not None and self.pool.blocks_for(len(head.tokens)) > self.pool.free
        if blocked:
            self.waiting._heap.remove((head.order, head))
            heapq.heapify(self.waiting._heap)
        rows = super()._admit(builder, budget, now)
        if blocked:
            heapq.heappush(self.waiting._heap, (head.order, head))
        return rows


class KeptDrafts(Scheduler):
    """Drafts that were not kept stay planned and expected."""

    def apply(self, result, now):
        record = self._in_flight[0]
        slots = record.slots[self.columns.alive[record.slots]]
        before = self.columns.planned[slots], self.columns.expected[slots]
        deltas = super().apply(result, now)
        self.columns.planned[slots], self.columns.expected[slots] = before
        return deltas


class TwicePrompt(Scheduler):
    """Prompt logprobs from before a preemption are told again after it."""

    def _preempt(self, sequence):
        kept = list(sequence.prompt_logprobs)
        super()._preempt(sequence)
        sequence.prompt_logprobs += kept


class PastTheStop(Scheduler):
    """What a row sampled after its stop token is sent as well."""

    def apply(self, result, now):
        stop = Sampled.stop

        def only_mark(sampled, hits):
            whole = sampled.counts, sampled.ids, sampled.owners, sampled.places
            stop(sampled, hits)
            sampled.counts, sampled.ids, sampled.owners, sampled.places = whole

        Sampled.stop = only_mark
        try:
            return super().apply(result, now)
        finally:
            Sampled.stop = stop


class CachedPrompt(Scheduler):
    """Prompt logprobs are not computed where the cache has the block (F13)."""

    def submit(self, request, now):
        super().submit(request, now)
        self._sequences[request.key].__class__ = ReadsCache


class ReadsCache(Sequence):
    __slots__ = ()
    wants_prompt_logprobs = False


BUGS = {
    LeakOnAbort: 1, DoubleFree: 1, EarlyRelease: 2, LostSlot: 1, ShortTable: 1, StaleStop: 1, EarlyIndex: 1,
    StaleDigest: 1, ForgottenParent: 1, Unfair: 1, KeptDrafts: 1, TwicePrompt: 1, PastTheStop: 1, CachedPrompt: 1,
}  # fmt: skip


@pytest.mark.parametrize(("bug", "depth"), BUGS.items())
def test_planted_bug_is_caught(bug: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(40):
            Walk(seed, depth, bug).run(60)


def test_walks_meet_what_they_are_for() -> None:
    """They would prove little if they never preempted, hit, evicted or waited for a block being computed."""
    preemptions = hits = evictions = kept = failed = 0
    for seed in range(20):
        walk = Walk(seed, 2)
        walk.run(60)
        preemptions += walk.scheduler.preemptions
        hits += walk.scheduler.pool.index.hits
        evictions += walk.scheduler.pool.evictions
        kept += walk.scheduler.accepted_drafts
        failed += list(walk.ended.values()).count(FinishReason.ERROR)
    assert preemptions > 20
    assert hits > 300
    assert kept > 100
    assert failed > 2
    assert evictions > 100

"""The scheduler: which sequences advance by how many tokens in the next step. Pure; owns slots, blocks and tables.

One rule, no phases: each running sequence catches `planned` up to what is known within a token budget. Chunked
prefill, resumption and preemption by recompute follow from it. Results may come several plans later; what they say of
a sequence that meanwhile ended is dropped, and its slot and blocks return when the last plan naming it is applied.
"""

import bisect
from collections import deque
from collections.abc import Sequence as Row

import numpy as np
from numpy.typing import NDArray

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.blocks import BlockPool
from nori_cluster.engine.kv import KVGroup
from nori_cluster.engine.outcome import Sampled, join_rows, split_rows
from nori_cluster.engine.plan import FinishNews, InFlight, PlanBuilder, StartNews, StepDeltas
from nori_cluster.engine.prefix import CacheEvents
from nori_cluster.engine.queue import WaitingQueue
from nori_cluster.engine.sequence import Sequence, SequenceRequest, SlotColumns
from nori_cluster.engine.stop import StopRules
from nori_cluster.errors import CapacityExceeded, ClientError, ContextLengthExceeded
from nori_cluster.hashing import Digest, root
from nori_cluster.types import FinishReason, GroupSpec, SequenceStart, StepPlan, StepResult, pack, unpack

Rows = NDArray[np.int32]
_MAX_DEFERRED = 16  # waiting sequences looked past in one plan
_DEADLINE = "the request's time ran out"


class Scheduler:
    """Verbs: submit, abort, plan, apply. `now` is any monotonic clock in seconds."""

    def __init__(self, config: SchedulerConfig, spec: GroupSpec) -> None:
        self.config = config
        self.spec = spec
        num_slots = config.max_num_seqs
        self.columns = SlotColumns(num_slots, spec.max_model_len)
        self.pool = BlockPool(spec.num_blocks, spec.block_size, keep=config.enable_prefix_caching)
        self.groups = (KVGroup(self.pool, num_slots, spec.max_model_len),)
        self.waiting = WaitingQueue(config.max_waiting_requests)
        self.generated_tokens = 0
        self.preemptions = 0
        self.proposed_drafts = self.accepted_drafts = 0
        self._stop = StopRules(spec.eos_token_ids, num_slots)
        self._sequences: dict[int, Sequence] = {}  # by key: all that have not ended
        self._running: list[Sequence] = []  # by order
        self._slots: Rows = np.zeros(0, dtype=np.int32)  # of _running, same order
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._releasing: list[int] = []  # slots whose sequence ended while a plan in flight names them
        self._drops: list[int] = []  # slots the workers may forget
        self._deadlines: list[tuple[float, int]] = []  # of all that have not ended, sorted
        self._in_flight: deque[InFlight] = deque()
        self._news: list[FinishNews] = []
        self._step = 0
        self._arrivals = 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest, now: float) -> None:
        """Queue a sequence. Refuses what can never run: ContextLengthExceeded, CapacityExceeded, ClientError;
        Overloaded when the queue is full."""
        length = len(request.prompt_token_ids)
        assert request.key not in self._sequences, "key in use"
        if not request.prompt_len or request.max_tokens <= request.resumed_tokens:
            raise ClientError("nothing to generate: empty prompt or no tokens left", param="prompt")
        if length >= self.spec.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.spec.max_model_len} tokens; "
                f"{length} prompt tokens leave no room for output.",
                param="prompt",
            )
        capacity = self.spec.num_blocks * self.spec.block_size
        if length > capacity:
            raise CapacityExceeded(
                f"{length} prompt tokens exceed the KV cache of this server, which holds {capacity} tokens",
                param="prompt",
            )
        # The last token is sampled, never computed: it needs no room in the cache.
        limit = min(request.prompt_len + request.max_tokens, self.spec.max_model_len, capacity + 1)
        sequence = Sequence(request, limit, now, self._arrivals, self._root(request))
        self.waiting.push(sequence)
        self._arrivals += 1
        self._sequences[request.key] = sequence
        if request.deadline is not None:
            bisect.insort(self._deadlines, (request.deadline, request.key))

    def _root(self, request: SequenceRequest) -> Digest | None:
        """Where the sequence's digests start: shared by all of its salt, by its siblings only, or by nobody."""
        if self.config.enable_prefix_caching:
            return root(request.cache_salt)
        return None if request.siblings is None else root(b"siblings %d " % request.siblings + request.cache_salt)

    def abort(self, key: int, retryable: bool = False, reason: str = "") -> None:
        """End a sequence; its finish (CANCELLED) comes with the next deltas. No-op when it has ended."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, FinishNews(key, FinishReason.CANCELLED, error=reason, retryable=retryable))

    def renew(self, spec: GroupSpec) -> StepDeltas | None:
        """The workers hold other weights from here on: nothing that was cached is true of them. Only without work."""
        assert not self.has_work, "the weights cannot change under a sequence"
        self.spec = spec
        self.pool.empty()
        forgotten = self.pool.index.take_events()
        return None if forgotten is None else self._told(cache_events=forgotten)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._news or self._in_flight)

    @property
    def step(self) -> int:
        """Plans made so far."""
        return self._step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # -- plan -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step's orders; None when nothing can advance before a result is applied."""
        self._expire(now)
        builder = PlanBuilder(len(self.groups))
        slots, counts = self._advance(builder)
        started = self._admit(builder, self.config.step_tokens - int(counts.sum()), now)
        if started:
            slots = np.concatenate([slots, np.array([slot for slot, _ in started], dtype=np.int32)])
            counts = np.concatenate([counts, np.array([count for _, count in started], dtype=np.int32)])
        if not len(slots):
            return None
        columns = self.columns
        need = columns.expected[slots] - columns.planned[slots]
        samples, drafts = counts >= need, np.maximum(counts - need, 0)
        columns.planned[slots] += counts
        columns.expected[slots] += samples + drafts
        columns.last_plan[slots] = self._step
        plan = builder.build(self._step, self._drops, slots, counts)
        self._in_flight.append(InFlight(self._step, slots, counts, samples, drafts))
        self._drops = []
        self._step += 1
        return plan

    def _advance(self, builder: PlanBuilder) -> tuple[Rows, Rows]:
        """Rows of the running sequences: those that decode first, with room for drafts, then prefill chunks, within the
        budget. With drafts `planned` and `expected` are upper bounds until the result says how many were kept."""
        columns, running = self.columns, self._slots
        need = columns.expected[running] - columns.planned[running]
        left = columns.limit[running] - columns.expected[running]
        need[left <= 0] = 0  # its last token is being sampled
        order = np.concatenate([np.flatnonzero(need == 1), np.flatnonzero(need > 1)])
        slots, need, left = running[order], need[order], left[order]
        counts = need + np.where(need == 1, np.minimum(left - 1, self.config.draft_tokens), 0)
        before = np.cumsum(counts) - counts
        counts = np.clip(self.config.step_tokens - before, 0, counts)
        for index, group in enumerate(self.groups):
            missing = group.missing(slots, columns.planned[slots] + counts)
            for row in np.flatnonzero(missing * (counts > 0)):
                slot, lack = int(slots[row]), int(missing[row])
                if not columns.alive[slot]:
                    continue  # preempted a moment ago
                if lack > self.pool.free and counts[row] > need[row]:  # nobody is preempted for drafts
                    counts[row] = need[row]
                    lack = int(group.missing(slots[row : row + 1], columns.planned[slot] + need[row])[0])
                if not lack or self._make_room(lack, slot, builder):
                    builder.give(index, slot, group.grow(slot, lack))
                else:
                    counts[row] = 0
        keep = (counts > 0) & columns.alive[slots]
        return slots[keep], counts[keep]

    def _make_room(self, lack: int, for_slot: int, builder: PlanBuilder) -> bool:
        """Preempt the latest sequences until `lack` blocks are free; never one that comes before `for_slot`'s."""
        pending = sum(int(group.counts[slot]) for group in self.groups for slot in self._releasing)
        while self.pool.free < lack:
            victim = self._running[-1]
            if self.pool.free + pending >= lack or victim.slot == for_slot:
                return False
            builder.withdraw(victim.slot)
            free = self.pool.free
            held = sum(int(group.counts[victim.slot]) for group in self.groups)
            self._preempt(victim)
            pending += held - (self.pool.free - free)
        return True

    def _admit(self, builder: PlanBuilder, budget: int, now: float) -> list[tuple[int, int]]:
        """Start waiting sequences, in order, while a slot, blocks for all they know, and budget are left.

        One whose next block a running sequence is computing is looked past: it will find it in the cache.
        """
        rows: list[tuple[int, int]] = []
        while budget > 0 and self._free_slots and self.waiting.num_deferred < _MAX_DEFERRED:
            sequence = self.waiting.head()
            if sequence is None or sequence.tokens is None:
                break
            length, size = len(sequence.tokens), self.pool.block_size
            digests = sequence.digest_blocks(sequence.tokens, (length - 1) // size, size)
            reads_cache = not sequence.wants_prompt_logprobs
            hits = self.pool.index.match(digests) if reads_cache else []
            if reads_cache and len(hits) < len(digests) and self.pool.index.is_pending(digests[len(hits)]):
                self.waiting.defer_head()
                continue
            lack = self.pool.blocks_for(length) - len(hits)
            if lack > self.pool.room_beside(hits):
                break
            computed = len(hits) * size
            tokens = pack(sequence.tokens)
            slot = self._start(sequence, computed, now)
            for index, group in enumerate(self.groups):
                builder.give(index, slot, group.adopt(slot, hits))
                builder.give(index, slot, group.grow(slot, lack))
            request = sequence.request
            builder.start(SequenceStart(slot, tokens, request.prompt_len, computed, request.sampling))
            count = min(length - computed, budget)
            rows.append((slot, count))
            budget -= count
        self.waiting.end_deferral()
        return rows

    def _start(self, sequence: Sequence, computed: int, now: float) -> int:
        """Into a slot; `computed` leading tokens are in the cache."""
        assert sequence.tokens is not None
        self.waiting.remove(sequence)
        slot = sequence.slot = self._free_slots.pop()
        length, size, index = len(sequence.tokens), self.pool.block_size, self.pool.index
        index.expect(sequence.digest_blocks(sequence.tokens, length // size, size)[computed // size :], slot)
        self.columns.start(sequence, computed)
        self.columns.shared[slot] = computed // size
        self._stop.start(slot, sequence.request)
        if sequence.started is None:
            sequence.started = now
            sequence.cached_tokens = computed
            index.queries += length
            index.hits += computed
        bisect.insort(self._running, sequence, key=lambda s: s.order)
        self._index()
        return slot

    def _preempt(self, sequence: Sequence) -> None:
        """Give up its slot and blocks; it waits again with all its tokens and recomputes them."""
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.prompt_logprobs.clear()
        sequence.tokens = self.columns.stop(sequence)
        self._leave(sequence)
        self.waiting.restore(sequence)

    # -- apply ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> StepDeltas:
        """Take in the oldest plan's result: tokens become known, ended sequences leave."""
        record = self._in_flight.popleft()
        assert result.step == record.step, "results out of order"
        columns = self.columns
        emitted = unpack(result.counts)
        unused = record.samples + record.drafts - emitted  # room for drafts that came to nothing
        assert ((unused >= 0) & (unused <= record.drafts)).all(), "a row sampled that should not, or the reverse"
        alive = columns.alive[record.slots]
        live, slack = record.slots[alive], unused[alive]
        columns.computed[live] += record.counts[alive] - slack
        columns.planned[live] -= slack
        columns.expected[live] -= slack
        self._share(live)
        self._note(record, result)
        alive = columns.alive[record.slots]  # a failed one has ended
        rows = np.flatnonzero(alive & record.samples).astype(np.int32)
        slots = record.slots[rows]
        sampled = Sampled.of(unpack(result.ids), emitted, rows)
        sampled.stop(self._stop.stopped(slots[sampled.owners], sampled.ids))
        columns.tokens[slots[sampled.owners], columns.known[slots[sampled.owners]] + sampled.places] = sampled.ids
        before = columns.known[slots]
        columns.known[slots] += sampled.counts
        self.generated_tokens += len(sampled.ids)
        deltas = StepDeltas(
            step=result.step,
            keys=columns.keys[slots],
            counts=sampled.counts,
            ids=sampled.ids,
            rows=rows,
            starts=self._first_tokens(slots, before),
            logprobs=result.logprobs,
        )
        for i in np.flatnonzero(sampled.stopped | (columns.known[slots] >= columns.limit[slots])):
            slot, key = int(slots[i]), int(deltas.keys[i])
            reason, matched = self._stop.reason(slot, sampled.last(int(i)), bool(sampled.stopped[i]))
            self._end(self._sequences[key], FinishNews(key, reason, matched))
        self._release(record.step)
        deltas.finishes, self._news = self._news, []
        deltas.cache_events = self.pool.index.take_events()
        return deltas

    def _share(self, slots: Rows) -> None:
        """Offer the blocks that these slots have filled, now that the step that filled them is applied."""
        columns, size = self.columns, self.pool.block_size
        filled = columns.computed[slots] // size
        grown = columns.shares[slots] & (filled > columns.shared[slots])
        for slot, full in zip(slots[grown].tolist(), filled[grown].tolist(), strict=True):
            sequence, first = self._sequences[int(columns.keys[slot])], int(columns.shared[slot])
            digests = sequence.digest_blocks(columns.tokens[slot], full, size)[first:]
            for digest, block in zip(digests, self.groups[0].tables[slot, first:full].tolist(), strict=True):
                self.pool.index.put(digest, block)
            self.pool.index.settle(digests, slot)
            columns.shared[slot] = full

    def take_news(self) -> StepDeltas | None:
        """Finishes (aborts, deadlines) that need no step; None when there are none."""
        if not self._news:
            return None
        news, self._news = self._news, []
        return self._told(finishes=news)

    def _told(self, finishes: Row[FinishNews] = (), cache_events: CacheEvents | None = None) -> StepDeltas:
        """News without tokens."""
        empty = np.zeros(0, dtype=np.int32)
        return StepDeltas(
            self._step, np.zeros(0, dtype=np.int64), empty, empty, empty, finishes=finishes, cache_events=cache_events
        )

    def _note(self, record: InFlight, result: StepResult) -> None:
        """What a result says of single rows: prompt logprobs, drafts, sequences that cannot go on."""

        def sequence_of(row: int) -> Sequence | None:
            slot = int(record.slots[row])
            return self._sequences[int(self.columns.keys[slot])] if self.columns.alive[slot] else None

        if result.prompt_logprobs is not None:
            for row, part in split_rows(result.prompt_logprobs):
                if (sequence := sequence_of(row)) is not None:
                    sequence.prompt_logprobs.append(part)
        proposed = unpack(result.proposed)
        kept = np.clip(unpack(result.counts) - 1, 0, proposed) if len(proposed) else proposed
        for row in np.flatnonzero(proposed).tolist():
            if (sequence := sequence_of(row)) is not None:
                sequence.proposed += int(proposed[row])
                sequence.accepted += int(kept[row])
        self.proposed_drafts += int(proposed.sum())
        self.accepted_drafts += int(kept.sum())
        for row, why in result.failures:
            if (sequence := sequence_of(row)) is not None:
                self._end(sequence, FinishNews(sequence.request.key, FinishReason.ERROR, error=why))

    def _first_tokens(self, slots: Rows, before: Rows) -> list[StartNews]:
        """Those that got their first token just now; before: what they knew."""
        columns = self.columns
        starts = []
        first = columns.first_known[slots]
        for slot in slots[(before < first) & (columns.known[slots] >= first)]:
            sequence = self._sequences[int(columns.keys[slot])]
            assert sequence.started is not None
            waited = sequence.started - sequence.arrival
            logprobs = join_rows(sequence.prompt_logprobs) if sequence.prompt_logprobs else None
            sequence.prompt_logprobs = []
            starts.append(StartNews(sequence.request.key, sequence.cached_tokens, waited, logprobs))
        return starts

    # -- leaving ----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, news: FinishNews) -> None:
        """The sequence is over: exactly one FinishNews, wherever it was."""
        request = sequence.request
        del self._sequences[request.key]
        if request.deadline is not None:
            self._deadlines.remove((request.deadline, request.key))
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.columns.stop(sequence)
            self._leave(sequence)
        self._news.append(news._replace(accepted_drafts=sequence.accepted, proposed_drafts=sequence.proposed))

    def _leave(self, sequence: Sequence) -> None:
        """Out of the running; slot and blocks return now, or when the last plan naming the slot is applied."""
        self._running.remove(sequence)
        self._index()
        slot, sequence.slot = sequence.slot, -1
        self.pool.index.settle(sequence.digests[int(self.columns.shared[slot]) :], slot)
        self._releasing.append(slot)
        self._release(self._in_flight[0].step - 1 if self._in_flight else self._step)

    def _release(self, applied: int) -> None:
        """Return what no plan after step `applied` names."""
        if not self._releasing:
            return
        held = []
        for slot in self._releasing:
            if self.columns.last_plan[slot] > applied:
                held.append(slot)
                continue
            for group in self.groups:
                group.release(slot)
            self._free_slots.append(slot)
            self._drops.append(slot)
        self._releasing = held

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            key = self._deadlines[0][1]
            self._end(self._sequences[key], FinishNews(key, FinishReason.CANCELLED, error=_DEADLINE))

    def _index(self) -> None:
        self._slots = np.array([s.slot for s in self._running], dtype=np.int32)

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold between steps; used by tests after each one."""
        columns = self.columns
        running = [s.slot for s in self._running]
        orders = [s.order for s in self._running]
        assert running == self._slots.tolist() and orders == sorted(orders)
        everywhere = sorted([*running, *self._releasing, *self._free_slots])
        assert everywhere == list(range(self.config.max_num_seqs)), "slots are not bijective"
        assert np.flatnonzero(columns.alive).tolist() == sorted(running)
        assert len(self._sequences) == len(running) + len(self.waiting)
        assert {key for _, key in self._deadlines} <= self._sequences.keys()
        for sequence in self._running:
            assert columns.keys[sequence.slot] == sequence.request.key and sequence.tokens is None
        live = self._slots
        assert (columns.computed[live] <= columns.planned[live]).all()
        assert (columns.planned[live] <= columns.expected[live]).all()
        assert (columns.known[live] <= columns.expected[live]).all()
        assert (columns.known[live] < columns.limit[live]).all()
        held = np.array(sorted([*running, *self._releasing]), dtype=np.int32)
        for group in self.groups:
            group.check(columns.planned * columns.alive, held)
        self.pool.index.check(live)
        self.waiting.check()

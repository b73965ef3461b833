"""The worker's memory of every running sequence: one row per slot, in numpy columns, changed only by plans and samples.

All that depends on token values lives here, so that a plan can be made before the last one's samples are known.
Every rank holds the same table and applies the same plans in the same order.
"""

import numpy as np
from numpy.typing import NDArray

from nori_cluster.types import PLAIN, NewBlocks, RowSampling, SequenceStart, unpack
from nori_cluster.worker.edits import SlotEdits

Int32Array = NDArray[np.int32]


class SamplingColumns:
    """RowSampling of each slot, one array per field. edits: of the few slots that change single scores."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.repetition = np.ones(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.penalized = np.zeros(num_slots, np.bool_)
        self.seed = np.zeros(num_slots, np.uint64)
        self.candidate = np.zeros(num_slots, np.uint32)
        self.logprobs = np.full(num_slots, -1, np.int32)
        self.prompt_logprobs = np.full(num_slots, -1, np.int32)
        self.edits: dict[int, SlotEdits] = {}

    def set(self, slot: int, sampling: RowSampling) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = max(sampling.top_k, 0)
        self.seed[slot] = sampling.seed
        self.candidate[slot] = sampling.candidate
        self.logprobs[slot] = sampling.logprobs
        controls = sampling.controls or PLAIN
        self.min_p[slot] = controls.min_p
        self.repetition[slot] = controls.repetition_penalty
        self.presence[slot] = controls.presence_penalty
        self.frequency[slot] = controls.frequency_penalty
        penalties = (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty)
        self.penalized[slot] = penalties != (1.0, 0.0, 0.0)
        self.prompt_logprobs[slot] = controls.prompt_logprobs
        self.edits.pop(slot, None)
        if (edits := SlotEdits.of(controls)) is not None:
            self.edits[slot] = edits


class SlotTable:
    """known: tokens in the row. computed: leading tokens with KV. blocks: table per KV group (one today).

    drafts: proposed next tokens of each slot, num_drafts of them; while a step verifies them they stand in `tokens`
    behind the known ones.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, max_drafts: int = 0) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_slots, max_tokens + max_drafts), np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.blocks = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.drafts = np.zeros((num_slots, max_drafts), np.int32)
        self.num_drafts = np.zeros(num_slots, np.int32)
        self.sampling = SamplingColumns(num_slots)

    def start(self, start: SequenceStart) -> None:
        """A sequence takes the slot; whatever was there is gone."""
        tokens, slot = unpack(start.tokens), start.slot
        assert 0 <= start.computed < len(tokens) <= self.tokens.shape[1]
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = len(tokens)
        self.computed[slot] = start.computed
        self.prompt_len[slot] = start.prompt_len
        self.num_blocks[slot] = self.num_drafts[slot] = 0
        self.sampling.set(slot, start.sampling)

    def drop(self, slots: Int32Array) -> None:
        """The sequences of these slots are over."""
        self.known[slots] = 0
        self.computed[slots] = 0
        self.num_blocks[slots] = 0
        self.num_drafts[slots] = 0
        for slot in slots.tolist():
            self.sampling.edits.pop(slot, None)

    def append_blocks(self, slots: Int32Array, new: NewBlocks) -> Int32Array:
        """Append to the rows' tables; returns the blocks that hold no computed token (prefix hits do)."""
        counts, ids = unpack(new.counts), unpack(new.ids)
        if not len(ids):
            return ids
        owners = np.repeat(slots, counts)
        ends = np.cumsum(counts, dtype=np.int32)
        places = np.arange(len(ids), dtype=np.int32) - np.repeat(ends - counts, counts) + self.num_blocks[owners]
        self.blocks[owners, places] = ids
        self.num_blocks[slots] += counts
        fresh: Int32Array = ids[places * self.block_size >= self.computed[owners]]
        return fresh

    def place_drafts(self, slots: Int32Array, room: Int32Array) -> Int32Array:
        """Write at most room[r] drafts of each slot behind its known tokens; returns how many."""
        counts: Int32Array = np.minimum(self.num_drafts[slots], room)
        if counts.any():
            owners, places = spread(counts)
            rows = slots[owners]
            self.tokens[rows, self.known[rows] + places] = self.drafts[rows, places]
        return counts

    def advance(self, slots: Int32Array, counts: Int32Array) -> None:
        """The step computed these many more tokens."""
        self.computed[slots] += counts

    def append_tokens(self, slots: Int32Array, ids: Int32Array, counts: Int32Array | None = None) -> None:
        """counts[r] sampled tokens per slot (None: one each), ids concatenated."""
        if counts is None:
            self.tokens[slots, self.known[slots]] = ids
            self.known[slots] += 1
            return
        owners, places = spread(counts)
        rows = slots[owners]
        self.tokens[rows, self.known[rows] + places] = ids
        self.known[slots] += counts

    def output_index(self, slots: Int32Array) -> Int32Array:
        """Index in the output of the token that is sampled next."""
        index: Int32Array = self.known[slots] - self.prompt_len[slots]
        return index


def spread(counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Owner and place of each of counts[r] things per row: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - starts[owners]

"""The worker's memory of every running sequence: one row per slot, in numpy columns, changed only by plans and samples.

All that depends on token values lives here, so that a plan can be made before the last one's samples are known.
Every rank holds the same table and applies the same plans in the same order.
"""

import numpy as np
from numpy.typing import NDArray

from nori_cluster.types import NewBlocks, RowSampling, SequenceStart, unpack

Int32Array = NDArray[np.int32]


class SamplingColumns:
    """RowSampling of each slot, one array per field. biases: slot → ids, values of the few rows that have any."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.candidate = np.zeros(num_slots, np.uint32)
        self.logprobs = np.full(num_slots, -1, np.int32)
        self.biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def set(self, slot: int, sampling: RowSampling) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = max(sampling.top_k, 0)
        self.seed[slot] = sampling.seed
        self.candidate[slot] = sampling.candidate
        self.logprobs[slot] = sampling.logprobs
        self.biases.pop(slot, None)
        controls = sampling.controls
        if controls is not None and controls.bias_ids:
            self.biases[slot] = (np.array(controls.bias_ids, np.int64), np.array(controls.bias_values, np.float32))


class SlotTable:
    """known: tokens in the row. computed: leading tokens with KV. blocks: table per KV group (one today)."""

    def __init__(self, num_slots: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.blocks = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int32)
        self.sampling = SamplingColumns(num_slots)

    def start(self, start: SequenceStart) -> None:
        """A sequence takes the slot; whatever was there is gone."""
        tokens, slot = unpack(start.tokens), start.slot
        assert 0 <= start.computed < len(tokens) <= self.tokens.shape[1]
        self.tokens[slot, : len(tokens)] = tokens
        self.known[slot] = len(tokens)
        self.computed[slot] = start.computed
        self.prompt_len[slot] = start.prompt_len
        self.num_blocks[slot] = 0
        self.sampling.set(slot, start.sampling)

    def drop(self, slots: Int32Array) -> None:
        """The sequences of these slots are over."""
        self.known[slots] = 0
        self.computed[slots] = 0
        self.num_blocks[slots] = 0
        for slot in slots.tolist():
            self.sampling.biases.pop(slot, None)

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

    def advance(self, slots: Int32Array, counts: Int32Array) -> None:
        """The step computed these many more tokens."""
        self.computed[slots] += counts

    def append_tokens(self, slots: Int32Array, ids: Int32Array) -> None:
        """One sampled token per slot."""
        self.tokens[slots, self.known[slots]] = ids
        self.known[slots] += 1

    def output_index(self, slots: Int32Array) -> Int32Array:
        """Index in the output of the token that is sampled next."""
        index: Int32Array = self.known[slots] - self.prompt_len[slots]
        return index

"""Draft proposers: what a sequence may say next, guessed cheaply, to be verified by the model in one step.

A proposer runs on rank 0 after sampling; the drafts travel to all ranks with the sampled ids. A draft is kept only if
the sampler draws the same id there, so no proposer can change an output.
"""

from typing import Protocol

import numpy as np
import torch

from nori_cluster.config import SpeculativeConfig
from nori_cluster.worker.slots import Int32Array, SlotTable


class Proposer(Protocol):
    """max_drafts: most drafts per slot."""

    max_drafts: int

    def propose(self, table: SlotTable, slots: Int32Array, hidden: torch.Tensor) -> tuple[Int32Array, Int32Array]:
        """Drafts [n, max_drafts] for the slots that just sampled, and how many of each row count.

        hidden [n, hidden]: the model's state at each slot's newest computed token. The table is only read.
        """


class NgramProposer:
    """Prompt lookup: the longest suffix (of max to min tokens) that occurred before goes on as it last did there.

    Where that catches up with the end, it goes round and round.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._sizes = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, table: SlotTable, slots: Int32Array, hidden: torch.Tensor) -> tuple[Int32Array, Int32Array]:
        known = table.known[slots]
        longest = int(known.max())
        tokens = table.tokens[slots, :longest]
        ends = self._latest_match(tokens, known)
        period = known - 1 - ends  # past the newest token what followed repeats itself
        places = ends[:, None] + 1 + np.arange(self.max_drafts) % period[:, None]
        drafts: Int32Array = np.take_along_axis(tokens, np.minimum(places, longest - 1), axis=1)
        return drafts, np.where(ends >= 0, self.max_drafts, 0).astype(np.int32)

    def _latest_match(self, tokens: Int32Array, known: Int32Array) -> Int32Array:
        """Last position of the latest earlier occurrence of the longest suffix that has one; -1 where none has."""
        rows, longest = tokens.shape
        match = np.arange(longest) < known[:, None] - 1
        best = np.full(rows, -1, np.int32)
        smallest, largest = self._sizes
        for size in range(1, min(largest, longest - 1) + 1):
            suffix = np.where(known > size, tokens[np.arange(rows), known - size], -1)
            match[:, size - 1 :] &= tokens[:, : longest - size + 1] == suffix[:, None]
            match[:, : size - 1] = False
            if size >= smallest:
                found = match.any(axis=1)
                best[found] = longest - 1 - match[found, ::-1].argmax(axis=1)
        return best

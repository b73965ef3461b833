"""Repetition, presence and frequency penalties: which ids each slot has seen, counted on the model's device.

Definitions as vLLM and the reference library have them: repetition divides positive and multiplies negative scores of
ids in prompt or output; presence and frequency are subtracted, once and per occurrence, for ids in the output.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.worker.slots import Int32Array, SamplingColumns, SlotTable, spread


class TokenCounts:
    """Only slots whose sampling is penalized have a row; rows are made as needed and used again."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # occurrences in the output
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def start(self, slot: int, tokens: Int32Array, prompt_len: int) -> None:
        """Count a new sequence's tokens: the prompt, then what was generated before."""
        self.drop(slot)
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        self._output[row] = torch.from_numpy(_counts(tokens[prompt_len:], self._vocab)).to(self._device)
        self._prompt[row] = torch.from_numpy(_counts(tokens[:prompt_len], self._vocab) > 0).to(self._device)

    def drop(self, slot: int) -> None:
        if (row := self._rows.pop(slot, None)) is not None:
            self._free.append(row)

    def _grow(self) -> None:
        have, more = len(self._output), max(4, len(self._output))
        self._output = torch.cat([self._output, self._output.new_zeros(more, self._vocab)])
        self._prompt = torch.cat([self._prompt, self._prompt.new_zeros(more, self._vocab)])
        self._free += range(have, have + more)

    def add(self, slots: Int32Array, ids: Int32Array) -> None:
        """One more output token each; a slot may stand several times."""
        if not self._rows:
            return
        held = [
            (self._rows[slot], id_)
            for slot, id_ in zip(slots.tolist(), ids.tolist(), strict=True)
            if slot in self._rows
        ]
        if held:
            rows, values = torch.tensor(held, device=self._device).T
            self._output.index_put_((rows, values), torch.ones_like(values, dtype=torch.int32), accumulate=True)

    def gather(self, table: SlotTable, slots: Int32Array, places: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Per position: output counts int32 [n, vocab] with the drafts before it, and bool [n, vocab] of the prompt."""
        rows = torch.tensor([self._rows[slot] for slot in slots.tolist()], device=self._device)
        output = self._output[rows]
        if places.any():
            owners, before = spread(places)
            drafts = table.tokens[slots[owners], table.known[slots[owners]] + before].astype(np.int64)
            where = (torch.from_numpy(owners.astype(np.int64)), torch.from_numpy(drafts))
            index = tuple(part.to(self._device) for part in where)
            output.index_put_(index, torch.ones(len(drafts), dtype=torch.int32, device=self._device), accumulate=True)
        return output, self._prompt[rows]


def penalize(
    scores: torch.Tensor, columns: SamplingColumns, slots: Int32Array, output: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    """scores float32 [n, vocab] of these slots → penalized ones."""

    def column(values: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values[slots]).to(scores.device)[:, None]

    repetition = column(columns.repetition)
    seen = output > 0
    scaled = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen | prompt, scaled, scores)
    return scores - column(columns.frequency) * output - column(columns.presence) * seen


def _counts(tokens: Int32Array, vocab: int) -> NDArray[np.int32]:
    return np.bincount(tokens, minlength=vocab).astype(np.int32)

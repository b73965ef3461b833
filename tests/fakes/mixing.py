"""Runs one sequence through a loaded worker's model in every way a scheduler may choose, beside wild neighbours.

`differences` names the ways that gave other bits than the whole prompt alone; it works on every rank of a group alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nori_cluster.device.forward import ForwardBatch
from nori_cluster.worker.worker import Worker

Cut = Sequence[int]  # tokens of each step


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Mixer:
    """Owns the worker's blocks and hands them out shuffled. Everything follows from the seed."""

    def __init__(self, worker: Worker, seed: int = 0) -> None:
        self.worker = worker
        self.rng = np.random.default_rng(seed)
        self._free = self.rng.permutation(worker.cache.num_blocks).tolist()
        self._wild: list[Row] = []

    def release(self, rows: Iterable[Row]) -> None:
        self._free += {block for row in rows for block in row.blocks}

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[Row, int]]) -> list[torch.Tensor | None]:
        """Advance each row by its count; float32 logits [count, vocab] per row, None on ranks other than 0."""
        worker, size = self.worker, self.worker.cache.block_size
        for row, count in rows:
            new = [self._free.pop() for _ in range(-(-(row.computed + count) // size) - len(row.blocks))]
            worker.cache.clear(new)
            row.blocks += new
        counts = [count for _, count in rows]
        positions = [np.arange(row.computed, row.computed + count) for row, count in rows]
        slots = [
            np.array(row.blocks)[at // size] * size + at % size for (row, _), at in zip(rows, positions, strict=True)
        ]
        tables = np.zeros((len(rows), max(len(row.blocks) for row, _ in rows)), np.int32)
        for place, (row, _) in enumerate(rows):
            tables[place, : len(row.blocks)] = row.blocks
        tokens = [np.array(row.tokens)[at] for (row, _), at in zip(rows, positions, strict=True)]
        batch = ForwardBatch(
            token_ids=torch.from_numpy(np.concatenate(tokens)),
            positions=torch.from_numpy(np.concatenate(positions)),
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([row.computed + count for row, count in rows], np.int32),
            block_tables=tables,
            sample_rows=np.arange(0),
            sample_places=np.arange(0),
            sample_tokens=torch.zeros(0, dtype=torch.int64),
        )
        hidden = worker.model(batch, worker.backend)
        for row, count in rows:
            row.computed += count
        return [worker.model.logits(part) for part in hidden.split(counts)]

    def neighbours(self, count: int) -> list[tuple[Row, int]]:
        """`count` other rows: decoding ones, chunks, some at a long context."""
        vocab = self.worker.model.spec.vocab_size
        while len(self._wild) < count:
            self._wild.append(Row(self.rng.integers(0, vocab, int(self.rng.integers(20, 400))).tolist()))
        rows = []
        for row in self._wild[:count]:
            left = len(row.tokens) - row.computed
            rows.append((row, 1 if self.rng.random() < 0.5 else int(self.rng.integers(1, min(left, 40) + 1))))
        return rows

    def sequence(self, tokens: list[int], cut: Cut, beside: int, row: Row | None = None) -> list[torch.Tensor | None]:
        """Logits of the cut's steps, each step with up to `beside` neighbours in a random order."""
        mine = row or Row(tokens)
        found = []
        for count in cut:
            rows = [*self.neighbours(int(self.rng.integers(0, beside + 1))), (mine, count)]
            order = self.rng.permutation(len(rows))
            results = self.step([rows[place] for place in order])
            found.append(results[int(np.flatnonzero(order == len(rows) - 1)[0])])
            over = [wild for wild in self._wild if wild.computed == len(wild.tokens)]
            self._wild = [wild for wild in self._wild if wild.computed < len(wild.tokens)]
            self.release(over)
        if row is None:
            self.release([mine])
        return found


def one_by_one(first: int, length: int) -> Cut:
    """`first` tokens, then single ones up to length."""
    return (*((first,) if first else ()), *(1,) * (length - first))


def cuts(length: int, singles: int, every: int, rng: np.random.Generator) -> Iterator[tuple[str, Cut]]:
    """Ways to cut a prompt: pairs of parts (each n-th), the last tokens one by one, and random ones."""
    for first in range(1, length, every):
        yield f"cut at {first}", (first, length - first)
    yield "token by token", one_by_one(length - singles, length)
    for number in range(10):
        places = np.unique(rng.integers(1, length, int(rng.integers(2, 12))))
        yield f"random cut {number}", tuple(np.diff([0, *places, length]).tolist())


def differences(
    worker: Worker, length: int = 150, *, every: int = 1, singles: int | None = None, seed: int = 0
) -> dict[str, list[str]]:
    """Kind → the ways that gave other bits. every: try each n-th cut at one place only. singles: most tokens that one
    way computes one by one; None = all.

    Kinds: batch (the last token in 1 … 33 rows), cut, mixed (cuts beside others), cached, resumed.
    """
    mixer = Mixer(worker, seed)
    rng = np.random.default_rng(seed + 1)
    tokens = rng.integers(0, worker.model.spec.vocab_size, length).tolist()
    (whole,) = mixer.sequence(tokens, (length,), 0)
    found: dict[str, list[str]] = {kind: [] for kind in ("batch", "cut", "mixed", "cached", "resumed")}

    def compare(kind: str, way: str, parts: list[torch.Tensor | None], first: int = 0) -> None:
        logits = [part for part in parts if part is not None]
        if whole is not None and not torch.equal(torch.cat(logits), whole[first:]):
            found[kind].append(way)

    size, singles = worker.cache.block_size, length if singles is None else singles
    hits, owner = (length - 1) // size, Row(tokens)
    mixer.step([(owner, length)])
    for rows in (*range(1, 18), 24, 33):  # the same sequence in many rows
        copies = [Row(tokens, owner.blocks[:hits], hits * size) for _ in range(rows)]
        if length - 1 > hits * size:
            mixer.step([(copy, length - 1 - hits * size) for copy in copies])
        for place, part in enumerate(mixer.step([(copy, 1) for copy in copies])):
            compare("batch", f"row {place} of {rows}", [part], length - 1)
        mixer.release(Row(tokens, copy.blocks[hits:]) for copy in copies)
    mixer.release([owner])
    for way, cut in cuts(length, singles, every, rng):
        compare("cut", way, mixer.sequence(tokens, cut, 0))
        compare("mixed", way, mixer.sequence(tokens, cut, 9))
    for blocks in range(1, (length - 1) // size + 1):
        owner = Row(tokens)
        mixer.sequence(tokens, (blocks * size + 3,) if blocks % 2 else (5, blocks * size - 2), 5, owner)
        hit = Row(tokens, owner.blocks[:blocks], blocks * size)
        parts = mixer.sequence(tokens, (length - blocks * size,), 5, hit)
        compare("cached", f"{blocks} blocks", parts, blocks * size)
        mixer.release([owner, hit])
    for cut_at in range(length - singles + 1, length, 7 * every):  # up to here as a prompt, then one by one
        compare("resumed", f"at {cut_at}", mixer.sequence(tokens, one_by_one(cut_at, length), 3))
    return found

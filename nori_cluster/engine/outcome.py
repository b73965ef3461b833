"""Reading a StepResult: the tokens of the rows that still count, and logprobs by row."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nori_cluster.types import StepLogprobs, pack, unpack

Rows = NDArray[np.int32]


class Sampled:
    """The tokens of some rows, concatenated. Token t belongs to the owners[t]-th of them, as its places[t]-th."""

    __slots__ = ("counts", "ids", "owners", "places", "stopped")

    def __init__(self, ids: Rows, counts: Rows) -> None:
        self.ids = ids
        self.counts = counts
        self.stopped = np.zeros(len(counts), dtype=np.bool_)
        self.owners = np.arange(len(counts), dtype=np.int32)
        self.places = np.zeros(len(ids), dtype=np.int32)
        if len(ids) != len(counts):
            self.owners = np.repeat(self.owners, counts)
            self.places = np.arange(len(ids), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)

    @staticmethod
    def of(ids: Rows, emitted: Rows, rows: Rows) -> "Sampled":
        """ids: those of all rows of a plan, emitted[r] of row r. rows: the ones of interest; each emitted some."""
        starts = (np.cumsum(emitted) - emitted)[rows]
        counts = emitted[rows]
        if len(ids) == np.count_nonzero(emitted):  # one each
            return Sampled(ids[starts], counts)
        part = Sampled(np.zeros(int(counts.sum()), dtype=np.int32), counts)
        part.ids = ids[starts[part.owners] + part.places]
        return part

    def stop(self, hits: NDArray[np.bool_]) -> None:
        """hits: per token, whether its row ends there. What a row sampled after its first hit is dropped."""
        if len(self.ids) == len(self.counts):
            self.stopped = hits
            return
        last = self.counts - 1
        tokens = np.flatnonzero(hits)[::-1]  # the first hit of a row is written last
        last[self.owners[tokens]] = self.places[tokens]
        self.stopped[self.owners[tokens]] = True
        kept = self.places <= last[self.owners]
        self.ids, self.owners, self.places = self.ids[kept], self.owners[kept], self.places[kept]
        self.counts = last + 1

    def last(self, row: int) -> int:
        """The newest token of one of the rows."""
        return int(self.ids[int(self.counts[: row + 1].sum()) - 1])


def split_rows(logprobs: StepLogprobs) -> Iterator[tuple[int, StepLogprobs]]:
    """(row, its entries) for each row; the entries of a row stand together."""
    rows, counts = unpack(logprobs.rows), unpack(logprobs.top_counts)
    ends = np.cumsum(counts)
    borders = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    for first, last in pairwise(borders):
        if first < last:
            tops = slice(4 * int(ends[first] - counts[first]), 4 * int(ends[last - 1]))
            entries = slice(4 * first, 4 * last)
            yield (
                int(rows[first]),
                StepLogprobs(
                    rows=logprobs.rows[entries],
                    chosen=logprobs.chosen[entries],
                    top_counts=logprobs.top_counts[entries],
                    top_ids=logprobs.top_ids[tops],
                    top_values=logprobs.top_values[tops],
                ),
            )


def join_rows(parts: Sequence[StepLogprobs]) -> StepLogprobs:
    """The parts of one row in order; `rows` numbers the entries."""

    def joined(pieces: Iterable[bytes]) -> bytes:
        return b"".join(pieces)

    chosen = joined(part.chosen for part in parts)
    return StepLogprobs(
        rows=pack(np.arange(len(chosen) // 4)),
        chosen=chosen,
        top_counts=joined(part.top_counts for part in parts),
        top_ids=joined(part.top_ids for part in parts),
        top_values=joined(part.top_values for part in parts),
    )

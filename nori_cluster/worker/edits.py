"""Changes to single scores: bias, allowed ids, bad words, ids that come only after min_tokens.

Per slot (SlotEdits, fixed for its life) and gathered for the positions of a step (StepEdits): pairs of row and id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nori_cluster.types import RowControls

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotEdits:
    """allowed: empty = every id. late: not sampled before `min_tokens` tokens of output."""

    bias_ids: Int64Array
    bias_values: NDArray[np.float32]
    allowed: Int64Array
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    late: Int64Array

    @staticmethod
    def of(controls: RowControls) -> "SlotEdits | None":
        """None when the controls change no single score."""
        late = controls.late_ids if controls.min_tokens else ()
        if not (controls.bias_ids or controls.allowed_ids or controls.bad_words or late):
            return None
        return SlotEdits(
            np.array(controls.bias_ids, np.int64),
            np.array(controls.bias_values, np.float32),
            np.array(controls.allowed_ids, np.int64),
            controls.bad_words,
            controls.min_tokens,
            np.array(late, np.int64),
        )

    def banned_after(self, output: Int32Array) -> list[int]:
        """Ids that would complete a bad word behind these tokens."""
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or (len(output) >= len(word) - 1 and output[1 - len(word) :].tolist() == list(word[:-1]))
        ]


class Pairs:
    """(row, id) pairs, collected row by row, and a value for each where they carry one."""

    def __init__(self) -> None:
        self._rows: list[Int64Array] = []
        self._ids: list[Int64Array] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: Int64Array | Sequence[int], values: NDArray[np.float32] | None = None) -> None:
        if len(ids):
            self._rows.append(np.full(len(ids), row, np.int64))
            self._ids.append(np.asarray(ids, np.int64))
            if values is not None:
                self._values.append(values)

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> Int64Array:
        return np.concatenate(self._rows)

    @property
    def ids(self) -> Int64Array:
        return np.concatenate(self._ids)

    @property
    def values(self) -> NDArray[np.float32]:
        return np.concatenate(self._values)


@dataclass(frozen=True, slots=True)
class StepEdits:
    """The edits of a step's positions. allowed_rows: the rows that may only use the ids of `allowed`."""

    bias: Pairs
    banned: Pairs
    late: Pairs
    allowed: Pairs
    allowed_rows: list[int]

    @staticmethod
    def gather(
        edits: Mapping[int, SlotEdits],
        slots: Int32Array,
        tokens: NDArray[np.int32],
        starts: Int32Array,
        ends: Int32Array,
    ) -> "StepEdits | None":
        """slots [P] of the positions; output of position p so far: tokens[slots[p], starts[p]:ends[p]]."""
        if not edits:
            return None
        step = StepEdits(Pairs(), Pairs(), Pairs(), Pairs(), [])
        for row, slot in enumerate(slots.tolist()):
            if (own := edits.get(slot)) is None:
                continue
            step.bias.add(row, own.bias_ids, own.bias_values)
            if len(own.allowed):
                step.allowed_rows.append(row)
                step.allowed.add(row, own.allowed)
            if own.bad_words:
                step.banned.add(row, own.banned_after(tokens[slot, starts[row] : ends[row]]))
            if ends[row] - starts[row] < own.min_tokens:
                step.late.add(row, own.late)
        return step

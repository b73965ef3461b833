"""The tensors of one step. worker/batch.py fills all of it from a StepPlan and the SlotTable; the model only reads it.

T tokens of R rows lie concatenated in plan order. Host arrays are numpy, so that planning attention costs no transfer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input. `device` tensors are int64 and live where the model does."""

    token_ids: torch.Tensor  # [T] device
    positions: torch.Tensor  # [T] device; index of the token in its sequence
    slot_mapping: torch.Tensor  # [T] device; block * block_size + offset where the token's KV goes
    query_starts: Int32Array  # [R + 1] host; row r owns tokens query_starts[r] : query_starts[r + 1]
    context_lens: Int32Array  # [R] host; tokens of the row that have KV after this step
    block_tables: Int32Array  # [R, blocks of the longest row] host; entries past the row's own blocks mean nothing
    sample_rows: Int64Array  # [P] host; the row of each position that samples, ascending; a row with d drafts has 1 + d
    sample_places: Int64Array  # [P] host; 0 … d: how many drafts stand before what is sampled
    sample_tokens: torch.Tensor  # [P] device; index into T of each position

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts[-1])

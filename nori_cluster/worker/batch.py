"""StepPlan + SlotTable → ForwardBatch: a handful of array operations, whatever the number of rows."""

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.device.forward import ForwardBatch
from nori_cluster.worker.slots import Int32Array, SlotTable, spread


def row_lengths(table: SlotTable, slots: Int32Array, counts: Int32Array) -> Int32Array:
    """Tokens each row computes: the plan's upper bounds cut at the rows' true lengths; a row that gets there goes on
    with its drafts, which are put in place, as far as its bound reaches."""
    left = table.known[slots] - table.computed[slots]
    lengths: Int32Array = np.minimum(counts, left)
    assert (lengths > 0).all(), "a planned row has nothing to compute"
    if table.drafts.shape[1]:
        lengths += table.place_drafts(slots, np.where(lengths == left, counts - lengths, 0))
    return lengths


def build_batch(table: SlotTable, slots: Int32Array, lengths: Int32Array, device: torch.device) -> ForwardBatch:
    """slots, lengths: [R] rows in plan order. The table is only read."""
    starts = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    computed = table.computed[slots]
    context = computed + lengths
    if starts[-1] == len(slots):  # steady decode: one token each
        owners, positions = slots, computed.astype(np.int64)
    else:
        owners = np.repeat(slots, lengths)
        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(computed - starts[:-1], lengths)
    size = table.block_size
    mapping = table.blocks[owners, positions // size].astype(np.int64) * size + positions % size
    blocks = -(-int(context.max()) // size)
    drafts = context - table.known[slots]
    sample_rows = np.flatnonzero(drafts >= 0)
    places = np.zeros(len(sample_rows), np.int64)
    ends = starts[1:][sample_rows].astype(np.int64)
    if (drafts > 0).any():
        of_row, place = spread(drafts[sample_rows] + 1)
        sample_rows, places = sample_rows[of_row], place.astype(np.int64)
        ends = starts[1:][sample_rows] - drafts[sample_rows] + places

    def put(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        token_ids=put(table.tokens[owners, positions].astype(np.int64)),
        positions=put(positions),
        slot_mapping=put(mapping),
        query_starts=starts,
        context_lens=context,
        block_tables=table.blocks[slots, :blocks],
        sample_rows=sample_rows,
        sample_places=places,
        sample_tokens=put(ends - 1),
    )

"""Which sampled tokens of a step count: a draft is kept exactly if the sampler drew the same id in its place."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nori_cluster.device.forward import ForwardBatch
from nori_cluster.worker.slots import Int32Array, SlotTable


class Kept(NamedTuple):
    """rows [S]: plan rows that sample. counts [S]: tokens each got, 1 + its kept drafts. drafts [S]: how many it tried.

    positions: the kept ones of the P positions, ascending.
    """

    rows: NDArray[np.int64]
    counts: Int32Array
    drafts: Int32Array
    positions: NDArray[np.int64]


def verify(table: SlotTable, slots: Int32Array, batch: ForwardBatch, ids: Int32Array) -> Kept:
    """slots [R] of the plan; ids [P] as sampled at the batch's positions. The drafts still stand in the table."""
    places, count = batch.sample_places, len(ids)
    firsts = np.flatnonzero(places == 0)
    rows = batch.sample_rows[firsts]
    if len(firsts) == count:
        return Kept(rows, np.ones(count, np.int32), np.zeros(count, np.int32), np.arange(count))
    owners = slots[batch.sample_rows]
    missed = ids != table.tokens[owners, table.known[owners] + places]
    lasts = np.append(firsts[1:], count) - 1
    missed[lasts] = True  # no draft stands behind the last position
    drafts = places[lasts]
    agreed = np.minimum.reduceat(np.where(missed, places, count), firsts)
    positions = np.flatnonzero(places <= np.repeat(agreed, drafts + 1))
    return Kept(rows, (agreed + 1).astype(np.int32), drafts.astype(np.int32), positions)

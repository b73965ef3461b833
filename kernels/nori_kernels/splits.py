"""How decode cuts the keys of a batch into programs of like length, on the host, before any launch."""

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


def plan_splits(
    context_lens: Int32Array, programs: int, tile: int, window: int = 0, fixed: int | None = None
) -> tuple[Int32Array, Int32Array]:
    """(items [S, 3] of row, first key, end of keys; starts [R + 1]): row r owns items starts[r] : starts[r + 1].

    About `programs` items share the tokens evenly, whole tiles each, so one long row is cut and short rows are not.
    fixed: splits begin at its multiples instead, whatever stands beside the row. window: as in AttentionPattern.
    """
    lengths = context_lens.astype(np.int64)
    low = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    if fixed is None:
        share = -(-int((lengths - low).sum()) // max(1, programs))
        size = max(tile, -(-share // tile) * tile)
        begin = low
    else:
        size = fixed
        begin = low // size * size
    counts = -(-(lengths - begin) // size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(lengths)), counts)
    place = np.arange(starts[-1]) - starts[rows]
    first = begin[rows] + place * size
    items = np.stack([rows, first, np.minimum(first + size, lengths[rows])], axis=1)
    return items.astype(np.int32), starts.astype(np.int32)


def plan_tiles(query_lens: Int32Array, tokens: int) -> Int32Array:
    """[n, 2] of row and first new token: every row's new tokens, `tokens` at a time, the longest rows first."""
    counts = -(-query_lens.astype(np.int64) // tokens)
    order = np.argsort(-counts, kind="stable")
    rows = np.repeat(order, counts[order])
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
    return np.stack([rows, place * tokens], axis=1).astype(np.int32)

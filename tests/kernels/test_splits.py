"""How decode is cut: nothing twice, nothing left out, no long item; fixed splits depend on the row alone."""

import numpy as np
import pytest

from nori_kernels.splits import plan_splits, plan_tiles

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", range(40))
def test_items_cover_each_row_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 3000, rng.integers(1, 40)).astype(np.int32) * (rng.random() < 0.9)
    lengths = lengths.astype(np.int32)
    programs, window = int(rng.integers(1, 300)), int(rng.choice([0, 0, 1, 500]))
    fixed = int(rng.choice([128, 256])) if seed % 2 else None
    items, starts = plan_splits(lengths, programs, 64, window, fixed)
    low = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    for row, length in enumerate(lengths):
        own = items[starts[row] : starts[row + 1]]
        assert (own[:, 0] == row).all()
        if length == 0:
            assert len(own) == 0
            continue
        assert own[0, 1] == (low[row] if fixed is None else low[row] // fixed * fixed)
        assert own[-1, 2] == length
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 2] > own[:, 1]).all()
    if fixed is None:
        assert len(items) <= programs + len(lengths)
        share = -(-int((lengths - low).sum()) // programs)
        assert (items[:, 2] - items[:, 1]).max(initial=0) <= max(64, share + 63)


def test_one_long_row_is_cut_and_short_rows_are_not() -> None:
    lengths = np.array([100_000] + [40] * 31, np.int32)
    _, starts = plan_splits(lengths, 264, 64)
    assert np.diff(starts).tolist()[1:] == [1] * 31
    assert 200 <= starts[1] <= 264


def test_fixed_splits_do_not_depend_on_neighbours() -> None:
    alone, _ = plan_splits(np.array([1000], np.int32), 264, 64, fixed=256)
    beside, starts = plan_splits(np.array([70_000, 1000, 3], np.int32), 264, 64, fixed=256)
    assert (beside[starts[1] : starts[2], 1:] == alone[:, 1:]).all()


def test_tiles_cover_new_tokens_the_longest_row_first() -> None:
    tiles = plan_tiles(np.array([3, 0, 40, 16], np.int32), 16)
    assert tiles.tolist() == [[2, 0], [2, 16], [2, 32], [0, 0], [3, 0]]

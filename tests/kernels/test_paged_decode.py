"""paged_decode against float64 on awkward lengths, groups, widths and dtypes; NaN in all that must not be read."""

import dataclasses

import numpy as np
import pytest
import torch
from kernels.paging import Paged

from nori_kernels.attend import Scoring
from nori_kernels.paged_decode import paged_decode, paged_decode_reference
from nori_kernels.splits import plan_splits
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
EDGES = [0, 1, 15, 16, 17]


def check(paged: Paged, q: torch.Tensor, scoring: Scoring, bound: float, fixed: int | None = None) -> torch.Tensor:
    rows = paged.decode_rows(window=scoring.window, fixed=fixed)
    out = poisoned(*q.shape, dtype=q.dtype)
    paged_decode(q, paged.kv, rows, scoring, out)
    paged.inputs.close(out[rows.rows.long()], paged_decode_reference(q, paged.kv, rows, scoring), bound)
    return out


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_groups_and_lengths(group: int) -> None:
    inputs = Inputs()
    paged = Paged(inputs, EDGES, 1, 64, torch.float32)
    check(paged, inputs.normal(len(EDGES), group, 64), Scoring(0.125), 2e-6)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_widths_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    inputs = Inputs()
    paged = Paged(inputs, [17, 40], 2, dim, dtype)
    check(paged, inputs.normal(2, 6, dim, dtype=dtype), Scoring(dim**-0.5), 2e-6 + ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_cache_with_scales_of_each_head(dtype: torch.dtype) -> None:
    inputs = Inputs()
    paged = Paged(inputs, [1, 33], 2, 64, torch.float8_e4m3fn)
    check(paged, inputs.normal(2, 8, 64, dtype=dtype), Scoring(0.125), 2e-6 + ROUNDING[dtype])


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_soft_caps_and_sinks(window: int, softcap: float, with_sinks: bool) -> None:
    inputs = Inputs()
    paged = Paged(inputs, [3, 50], 1, 64, torch.float32)
    sinks = inputs.normal(3) if with_sinks else None
    check(paged, inputs.normal(2, 3, 64), Scoring(0.3, window, softcap, sinks), 2e-6)


def test_blocks_before_the_window_are_not_read() -> None:
    inputs = Inputs()
    paged = Paged(inputs, [70], 1, 64, torch.float32)
    paged.tables[0, :3] = 2**30  # given back: an address there ends the process
    rows = paged.decode_rows(window=20)
    out = poisoned(1, 2, 64)
    q = inputs.normal(1, 2, 64)
    for fixed in (None, 64):
        rows = paged.decode_rows(window=20, fixed=fixed)
        paged_decode(q, paged.kv, rows, Scoring(0.3, 20), out)
        assert out.isfinite().all()


@pytest.mark.parametrize("block", [16, 32])
def test_one_long_beside_many_short(block: int) -> None:
    inputs = Inputs()
    paged = Paged(inputs, [400, 2, 9, 1, 30], 1, 64, torch.float32, block)
    rows = paged.decode_rows()
    assert len(rows.items) > len(paged.lengths)
    check(paged, inputs.normal(5, 4, 64), Scoring(0.125), 3e-6)


@pytest.mark.parametrize("batch", [1, 2, 33])
def test_batches(batch: int) -> None:
    inputs = Inputs()
    lengths = inputs.integers(0, 20, batch).tolist()
    paged = Paged(inputs, lengths, 1, 64, torch.float32)
    check(paged, inputs.normal(batch, 4, 64), Scoring(0.125), 2e-6)


def test_where_blocks_lie_changes_nothing() -> None:
    inputs = Inputs()
    paged = Paged(inputs, [5, 70], 2, 64, torch.float32)
    q, rows, scoring = inputs.normal(2, 6, 64), paged.decode_rows(), Scoring(0.2, softcap=3.0)
    first, second = poisoned(*q.shape), poisoned(*q.shape)
    paged_decode(q, paged.kv, rows, scoring, first)
    kv, tables = paged.moved()
    paged_decode(q, kv, dataclasses.replace(rows, tables=tables), scoring, second)
    assert torch.equal(first, second), inputs.seed


def test_fixed_splits_give_a_row_its_own_bits() -> None:
    """Beside others and alone, the row's splits are the same; balanced splits differ."""
    inputs = Inputs()
    paged = Paged(inputs, [150, 3, 130], 1, 64, torch.float32)
    q = inputs.normal(3, 3, 64)
    together = check(paged, q, Scoring(0.125), 3e-6, fixed=64)
    rows = paged.decode_rows(fixed=64)
    items, starts = plan_splits(np.array([150], np.int32), 1, 64, fixed=64)
    alone = dataclasses.replace(
        rows, items=torch.from_numpy(items), starts=torch.from_numpy(starts), rows=rows.rows[:1]
    )
    out = poisoned(*q.shape)
    paged_decode(q, paged.kv, alone, Scoring(0.125), out)
    assert torch.equal(out[2], together[2]), inputs.seed


def test_refuses_what_it_does_not_take() -> None:
    inputs = Inputs()
    paged = Paged(inputs, [5], 2, 64, torch.float32)
    rows, out = paged.decode_rows(), poisoned(1, 4, 64)
    for q, reason in (
        (inputs.normal(1, 3, 64), "no multiple"),
        (inputs.normal(1, 4, 80), "head_dim 80"),
        (inputs.normal(1, 4, 64).bfloat16(), "KV of"),
        (inputs.normal(1, 4, 64).double(), "not taken"),
    ):
        with pytest.raises(ValueError, match=reason):
            paged_decode(q, paged.kv, rows, Scoring(1.0), out)
    with pytest.raises(ValueError, match="out is"):
        paged_decode(inputs.normal(1, 4, 64), paged.kv, rows, Scoring(1.0), out[:, :3])
    with pytest.raises(ValueError, match="has scales"):
        paged_decode(inputs.normal(1, 4, 64), paged.kv._replace(scales=torch.ones(2, 2)), rows, Scoring(1.0), out)

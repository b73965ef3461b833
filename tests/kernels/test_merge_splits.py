"""merge_splits against float64: rows with no split, one, many; splits that saw nothing; sinks."""

import pytest
import torch

from nori_kernels.merge_splits import merge_splits, merge_splits_reference
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merges_by_log_sum_exp(dtype: torch.dtype, with_sinks: bool) -> None:
    inputs = Inputs()
    counts, heads, dim = torch.tensor([1, 0, 3, 5]), 2, 80
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    total = int(starts[-1])
    parts, lse = inputs.normal(total, heads, dim), inputs.normal(total, heads, scale=8.0)
    parts[2], lse[2] = 0.0, -float("inf")
    sinks = inputs.normal(heads) if with_sinks else None
    rows = inputs.permutation(5)[:4].int()
    out = poisoned(5, heads, dim, dtype=dtype)
    merge_splits(parts, lse, starts, rows, out, sinks)
    exact = merge_splits_reference(parts, lse, starts, sinks)
    inputs.close(out[rows.long()], exact, 2e-6 + ROUNDING[dtype])
    (left,) = set(range(5)) - set(rows.tolist())
    assert out[left].isnan().all()

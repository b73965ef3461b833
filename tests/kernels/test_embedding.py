"""Embedding of a share of the vocabulary: equal to the reference, zeros for ids of other ranks."""

import pytest
import torch

from nori_kernels.embedding import embed, embed_reference
from nori_kernels.testing import Inputs, poisoned

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows", "hidden", "first"), [(1, 7, 1, 0), (33, 11, 96, 22), (5, 3, 1030, 3)])
def test_embed(tokens: int, rows: int, hidden: int, first: int, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    inputs = Inputs()
    weight = inputs.normal(rows, hidden, dtype=dtype)
    ids = inputs.integers(0, 3 * rows, tokens, dtype=ids_dtype)
    ids[0] = first + rows  # the first foreign one
    out = embed(ids, weight, first, out=poisoned(tokens, hidden, dtype=dtype))
    assert torch.equal(out, embed_reference(ids, weight, first))
    assert not out[0].any()

"""Gated activations against float64, over one and several blocks of columns."""

import pytest
import torch
from kernels.rows import assert_quantized

from nori_kernels import activation
from nori_kernels.activation import KINDS, gated, gated_quantized, gated_quantized_reference, gated_reference
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
SHAPES = [(1, 1), (2, 1024), (3, 1025), (33, 17)]


def rows_of(inputs: Inputs, rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return inputs.normal(rows, 2 * inner + 3, dtype=dtype, scale=4.0)[:, : 2 * inner]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_gated(rows: int, inner: int, kind: str, dtype: torch.dtype) -> None:
    inputs = Inputs()
    x = rows_of(inputs, rows, inner, dtype)
    out = gated(x, kind, out=poisoned(rows, inner, dtype=dtype))
    inputs.close(out, gated_reference(x, kind), 1e-6 + ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_gated_quantized(rows: int, inner: int, kind: str, dtype: torch.dtype) -> None:
    x = rows_of(Inputs(), rows, inner, torch.float16)
    x[0] = 0
    out = gated_quantized(x, kind, dtype, out=(poisoned(rows, inner, dtype=dtype), poisoned(rows)))
    assert_quantized(out, gated_quantized_reference(x, kind, dtype))


def test_extreme_gates_stay_finite() -> None:
    gate = torch.tensor([[-1e4, -90.0, 90.0, 1e4]])
    for kind in KINDS:
        out = gated(torch.cat([gate, torch.ones_like(gate)], dim=1), kind)
        assert torch.allclose(out, torch.tensor([[0.0, 0.0, 90.0, 1e4]]), rtol=0, atol=1e-30), kind


def test_refuses_strided_rows() -> None:
    assert activation.BLOCK == 1024, "SHAPES cover its edges"
    with pytest.raises(ValueError, match="contiguous"):
        gated(torch.zeros(8, 4).T, "silu")

"""Dynamic quantization and products of quantized operands against float64, on shapes that fill no tile."""

import pytest
import torch
from kernels.rows import assert_quantized

from nori_kernels.quant.dynamic import (
    quantize_rows,
    quantize_rows_reference,
    quantize_static,
    quantize_static_reference,
)
from nori_kernels.quant.scaled import scaled_gemm, scaled_gemm_reference
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
KINDS = [torch.int8, torch.float8_e4m3fn]


def operands(inputs: Inputs, rows: int, inner: int, kind: torch.dtype) -> torch.Tensor:
    if kind == torch.int8:
        return inputs.integers(-127, 128, rows, inner, dtype=torch.int8)
    return inputs.normal(rows, inner, scale=20.0).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width", "group"), [(1, 1, None), (33, 65, None), (2, 1030, None), (3, 384, 128)])
def test_quantize_rows(rows: int, width: int, group: int | None, kind: torch.dtype) -> None:
    x = Inputs().normal(rows, width + 3, dtype=torch.bfloat16, scale=5.0)[:, :width]
    x[-1] = 0
    assert_quantized(quantize_rows(x, kind, group), quantize_rows_reference(x, kind, group))


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_static_saturates(kind: torch.dtype) -> None:
    x, scale = Inputs().normal(3, 1030, scale=100.0), torch.tensor([0.1])
    out, exact = quantize_static(x, scale, kind), quantize_static_reference(x, scale, kind)
    one = torch.ones(3)
    assert_quantized((out, one), (exact, one.double()))
    assert out.double().abs().max() == (127 if kind == torch.int8 else 448)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 70, 48), (33, 64, 144), (17, 1, 129), (130, 5, 70)])
@pytest.mark.parametrize("per_row", [False, True])
def test_scaled_gemm(rows: int, columns: int, inner: int, kind: torch.dtype, per_row: bool) -> None:
    inputs = Inputs()
    a, w = operands(inputs, rows, inner, kind), operands(inputs, columns, inner, kind)
    a_scale = inputs.uniform(rows if per_row else 1, low=0.5, high=2.0) / 100
    w_scale = inputs.uniform(columns if per_row else 1, low=0.5, high=2.0) / 100
    bias = inputs.normal(columns) if per_row else None
    dtype = torch.bfloat16 if per_row else torch.float32
    out = scaled_gemm(a, a_scale, w, w_scale, poisoned(rows, columns, dtype=dtype), bias)
    inputs.close(out, scaled_gemm_reference(a, a_scale, w, w_scale, bias), 3e-6 + ROUNDING[dtype])


@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 130, 129), (33, 7, 256)])
def test_scaled_gemm_by_blocks(rows: int, columns: int, inner: int) -> None:
    inputs = Inputs()
    a, w = (operands(inputs, n, inner, torch.float8_e4m3fn) for n in (rows, columns))
    groups = -(-inner // 128)
    scales = [inputs.uniform(n, groups, low=0.1, high=4.0) / 100 for n in (rows, -(-columns // 128))]
    out = scaled_gemm(a, scales[0], w, scales[1], poisoned(rows, columns))
    inputs.close(out, scaled_gemm_reference(a, scales[0], w, scales[1]), 3e-6)


def test_refuses_what_is_no_product() -> None:
    a, one = torch.zeros(2, 32, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match="no scaled product"):
        scaled_gemm(a, torch.ones(3), a, one, torch.empty(2, 2))
    with pytest.raises(ValueError, match="no scaled product"):
        scaled_gemm(a, one, a.to(torch.float8_e4m3fn), one, torch.empty(2, 2))
    with pytest.raises(ValueError, match="whole groups"):
        quantize_rows(torch.zeros(2, 100), torch.int8, 128)

"""RMSNorm kernels against float64, on odd widths and 1 to 33 rows."""

import pytest
import torch
from kernels.rows import assert_quantized

from nori_kernels.norm import rms_norm, rms_norm_quantized, rms_norm_quantized_reference, rms_norm_reference
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
SHAPES = [(1, 1), (1, 576), (2, 96), (3, 33), (7, 127), (16, 130), (33, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(inputs: Inputs, rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, residual = (inputs.normal(rows, hidden + 5, dtype=dtype, scale=3.0)[:, :hidden] for _ in range(2))
    return x, inputs.normal(hidden, dtype=dtype), residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    inputs = Inputs()
    x, weight, residual = tensors(inputs, rows, hidden, dtype)
    bound = 1e-6 + ROUNDING[dtype]
    out = rms_norm(x, weight, 1e-5, out=poisoned(rows, hidden, dtype=dtype))
    inputs.close(out, rms_norm_reference(x, weight, 1e-5)[0], bound)
    expected, total = rms_norm_reference(x, weight, 1e-5, residual)
    out = rms_norm(x, weight, 1e-5, residual, out=poisoned(rows, hidden, dtype=dtype))
    inputs.close(residual, total, bound)
    inputs.close(out, expected, bound + ROUNDING[dtype])  # a tie of the sum may round to the other side


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_norm_quantized(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight, residual = tensors(Inputs(), rows, hidden, torch.float16)
    x[rows // 2] = 0
    out = rms_norm_quantized(x, weight, 1e-5, dtype, out=(poisoned(rows, hidden, dtype=dtype), poisoned(rows)))
    assert_quantized(out, rms_norm_quantized_reference(x, weight, 1e-5, dtype))
    expected = rms_norm_quantized_reference(x, weight, 1e-5, dtype, residual)
    assert_quantized(rms_norm_quantized(x, weight, 1e-5, dtype, residual), expected)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x, weight, _ = tensors(Inputs(), 33, 130, torch.float32)
    assert torch.equal(rms_norm(x, weight, 1e-6)[7:9], rms_norm(x[7:9], weight, 1e-6))


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        rms_norm(torch.zeros(1, 20000), torch.zeros(20000), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(8, 4).T, torch.zeros(8), 1e-5)

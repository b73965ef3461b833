"""Packed weights: every checkpoint format means the same weights in our layout, and products of them meet float64."""

import pytest
import torch

from nori_kernels.quant.layouts import AWQ_ORDER, PackedWeight, from_awq, from_gptq, pack, round_to_nearest, unpack
from nori_kernels.quant.weight_only import weight_gemm, weight_gemm_reference
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] → int32 [n, m · bits / 32], lowest bits first."""
    parts = values.long().unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 64, 65, 200])
def test_pack_and_back(bits: int, columns: int) -> None:
    values = Inputs().integers(0, 2**bits, 3, columns)
    assert torch.equal(unpack(pack(values, bits), bits)[:, :columns].long(), values)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_round_to_nearest_is_within_half_a_step(bits: int, symmetric: bool) -> None:
    inputs = Inputs()
    w = inputs.normal(5, 200) + (0 if symmetric else 1)
    packed = round_to_nearest(w, bits, 64, symmetric)
    step = packed.scale.double()[:, torch.arange(200) // 64]
    assert ((packed.dense() - w.double()).abs() <= step * 0.5 * (1 + 1e-5) + 1e-7).all(), f"seed {inputs.seed}"


def test_awq() -> None:
    inputs = Inputs()
    q, zero, scale = inputs.integers(0, 16, 128, 24), inputs.integers(0, 16, 2, 24), inputs.normal(2, 24)
    shuffled = [words(t.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1), 4) for t in (q, zero)]
    groups = torch.arange(128) // 64
    exact = (q.double() - zero.double()[groups]) * scale.double()[groups]
    assert torch.equal(from_awq(*shuffled, scale, 64).dense(), exact.T), f"seed {inputs.seed}"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("plus_one", [False, True])
def test_gptq(bits: int, act_order: bool, plus_one: bool) -> None:
    inputs = Inputs()
    q, zero = inputs.integers(0, 2**bits, 128, 24), inputs.integers(0, 2**bits - 1, 4, 24)
    scale = inputs.normal(4, 24)
    g_idx = torch.arange(128) // 32
    if act_order:
        g_idx = g_idx[inputs.permutation(128)]
    exact = (q - zero[g_idx] - int(plus_one)).double() * scale.double()[g_idx]
    packed = from_gptq(words(q.T, bits).T, words(zero, bits), scale, bits, 32, g_idx, plus_one)
    assert (packed.order is not None) == act_order
    assert torch.equal(packed.dense(), exact.T), f"seed {inputs.seed}"
    x = inputs.normal(3, 128, dtype=torch.bfloat16)
    out = weight_gemm(x, packed, poisoned(3, 24))
    inputs.close(out, weight_gemm_reference(x, packed), 3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "inner", "group"), [(1, 70, 64, 32), (33, 5, 100, 64), (17, 64, 33, 128)])
def test_weight_gemm(rows: int, columns: int, inner: int, group: int, bits: int, dtype: torch.dtype) -> None:
    inputs = Inputs()
    packed = round_to_nearest(inputs.normal(columns, inner) + 0.5, bits, group)
    x, bias = inputs.normal(rows, inner, dtype=dtype), inputs.normal(columns, dtype=dtype)
    out = weight_gemm(x, packed, poisoned(rows, columns, dtype=dtype), bias)
    inputs.close(out, weight_gemm_reference(x, packed, bias), 3e-6 + ROUNDING[dtype])


def test_refusals() -> None:
    packed = round_to_nearest(torch.ones(2, 64), 4, 64)
    assert isinstance(packed, PackedWeight)
    with pytest.raises(ValueError, match="bf16 or fp16"):
        weight_gemm(torch.zeros(1, 64), packed)
    with pytest.raises(ValueError, match="multiple of 32"):
        round_to_nearest(torch.ones(2, 64), 4, 48)
    zeros, scale = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 24)
    with pytest.raises(ValueError, match="does not give every group"):
        from_gptq(torch.zeros(8, 24, dtype=torch.int32), zeros, scale, 4, 32, torch.zeros(64, dtype=torch.int32))

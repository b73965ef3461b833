"""The activations of batch-invariant mode."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from nori_cluster.layers.mlp import ACTIVATIONS, even_gelu_tanh, even_silu

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_silu_is_silu(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(1000) * 5, torch.tensor([0.0, -100.0, 100.0, -1e30, 1e30])]).to(dtype)
    error = (even_silu(x).double() - silu(x.double())).abs()
    assert (error <= 4 * torch.finfo(dtype).eps * silu(x.double()).abs() + 1e-30).all()
    assert even_silu(x).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_gelu_is_gelu(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(1000) * 5, torch.tensor([0.0, -100.0, 100.0, -1e10, 1e10])]).to(dtype)
    exact = gelu(x.double(), approximate="tanh")
    error = (even_gelu_tanh(x).double() - exact).abs()
    assert (error <= 4 * torch.finfo(dtype).eps * torch.maximum(exact.abs(), x.double().abs().clamp_max(1))).all()
    assert even_gelu_tanh(x).dtype == dtype


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_has_its_own_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(500, 2 * 250, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    even = ACTIVATIONS[name][1]
    whole = even(gate_up.chunk(2, dim=-1)[0])
    for count in (1, 2, 3, 7, 31, 100, 263):
        for first in (0, 1, 17):
            part = gate_up[first : first + count].clone().chunk(2, dim=-1)[0]
            assert torch.equal(even(part), whole[first : first + count])

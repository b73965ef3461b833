"""product: every form it may take computes the same thing."""

import pytest
import torch
from torch import nn

from nori_cluster.quant import QUANT
from nori_cluster.quant.none import product

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 15, 16, 17, 255, 256, 300])
@pytest.mark.parametrize("turned", [False, True])
def test_forms_agree(dtype: torch.dtype, count: int, turned: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 70, generator=generator).to(dtype)
    weight = torch.randn(33, 70, generator=generator).to(dtype)
    found = product(x.t().contiguous().t() if turned else x, weight)
    assert found.shape == (count, 33)
    expected = x.double() @ weight.double().t()
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-13}.get(dtype, 1e-2)


@pytest.mark.parametrize("name", sorted(QUANT))
def test_methods_fill_a_layer(name: str) -> None:
    """create_weights, fill, after_load, apply: within the method's own error of the exact product."""
    layer, method = nn.Module(), QUANT[name]()
    method.create_weights(layer, 24, 40, torch.float32, torch.device("cpu"))
    weight = torch.randn(24, 40)
    layer.get_parameter("weight").data.copy_(weight)
    method.after_load(layer)
    x = torch.randn(5, 40)
    torch.testing.assert_close(method.apply(layer, x), x @ weight.t(), rtol=1e-5, atol=1e-5)

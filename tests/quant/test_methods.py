"""Every quantization method: a layer created, filled, prepared and applied, within the method's own error."""

import pytest
import torch
from torch import nn

from nori_cluster.quant import QUANT
from nori_cluster.quant.none import Unquantized
from nori_cluster.quant.row_tiles import RowTiles

pytestmark = pytest.mark.contract
ERRORS = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def filled(name: str, weight: torch.Tensor) -> tuple[nn.Module, Unquantized]:
    layer, method = nn.Module(), QUANT[name]()
    method.create_weights(layer, *weight.shape, weight.dtype, torch.device("cpu"))
    layer.get_parameter("weight").data.copy_(weight)
    method.after_load(layer)
    return layer, method


@pytest.mark.parametrize("name", sorted(QUANT))
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 17, 64, 300])
def test_equals_the_exact_product(name: str, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 70, generator=generator).to(dtype)
    weight = torch.randn(33, 70, generator=generator).to(dtype)
    layer, method = filled(name, weight)
    expected = x.double() @ weight.double().t()
    for form in (x, x.t().contiguous().t()):
        found = method.apply(layer, form)
        assert (found.shape, found.dtype) == ((count, 33), dtype)
        assert (found.double() - expected).abs().max() / expected.abs().max() < ERRORS[dtype]


@pytest.mark.parametrize("name", sorted(QUANT))
def test_rows_do_not_feel_each_other(name: str) -> None:
    layer, method = filled(name, torch.randn(33, 70))
    x = torch.randn(9, 70)
    expected = method.apply(layer, x)[:8].clone()
    for loud in (1e6, float("inf"), float("nan")):
        x[8] = loud
        assert torch.equal(method.apply(layer, x)[:8], expected)


@pytest.mark.parametrize("name", sorted(QUANT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 70), (576, 1536), (960, 576)])
@pytest.mark.parametrize("threads", [1, 2])
def test_in_whole_tiles_a_row_has_its_own_bits(
    name: str, dtype: torch.dtype, shape: tuple[int, int], threads: int
) -> None:
    if not QUANT[name].batch_invariant(dtype, torch.device("cpu")):
        pytest.skip(f"{name} has no batch-invariant mode in {dtype} here")
    generator = torch.Generator().manual_seed(0)
    layer, method = filled(name, torch.randn(shape, generator=generator).to(dtype))
    tiles = RowTiles(method)
    x = torch.randn(1100, shape[1], generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = tiles.apply(layer, x)
        for count in (*range(1, 70), 127, 128, 129, 255, 256, 257, 511, 777, 1024):
            assert torch.equal(tiles.apply(layer, x[:count]), whole[:count]), count
            assert torch.equal(tiles.apply(layer, x[-count:]), whole[-count:]), count
    finally:
        torch.set_num_threads(before)


def test_a_packed_weight_is_kept_once() -> None:
    layer, method = filled("none", torch.randn(16, 16))
    if method._packed is not None:
        assert not list(layer.parameters())


def test_without_the_packing_operators_the_plain_weight_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nori_cluster.quant.none._CAN_PACK", False)
    weight, x = torch.randn(16, 24), torch.randn(3, 24)
    layer, method = filled("none", weight)
    torch.testing.assert_close(method.apply(layer, x), x @ weight.t())

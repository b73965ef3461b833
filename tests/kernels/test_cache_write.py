"""cache_write against float64, rotated or not, FP8 or not; what no slot names keeps its NaN."""

import pytest
import torch

from nori_kernels.cache_write import Angles, cache_write, cache_write_reference, rotate_reference
from nori_kernels.layout import layer_view
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
BLOCK = 16


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("rotate", [False, True])
def test_writes_and_rotates(dim: int, dtype: torch.dtype, stored: torch.dtype, rotate: bool) -> None:
    inputs, count, kv_heads, group = Inputs(), 5, 2, 3
    cache = torch.full((4, 2, 2, kv_heads, BLOCK, dim), float("nan")).to(stored)
    fp8 = stored == torch.float8_e4m3fn
    kv = layer_view(cache, 1, inputs.uniform(2, kv_heads, low=0.01, high=2.0) if fp8 else None)
    mixed = inputs.normal(count, kv_heads * (group + 2), dim, dtype=dtype)  # as a projection of q, k and v gives them
    q, k, v = mixed.split([kv_heads * group, kv_heads, kv_heads], dim=1)
    angle = inputs.uniform(count, dim // 2, high=6.0)
    angles = Angles(angle.cos().to(dtype), angle.sin().to(dtype)) if rotate else None
    q_out = poisoned(*q.shape, dtype=dtype) if rotate else None
    slots = inputs.permutation(4 * BLOCK)[:count]
    slots[3] = -1
    cache_write(k, v, slots, kv, q if rotate else None, angles, q_out)
    expected = cache_write_reference(k, v, kv, angles)
    kept = [0, 1, 2, 4]
    blocks, places = slots[kept] // BLOCK, slots[kept] % BLOCK
    for pages, exact in zip((kv.keys, kv.values), expected, strict=True):
        found = pages[blocks, :, places].double()
        bound = 3e-7 * float(exact.abs().max()) + ROUNDING[stored] * exact[kept].abs()
        bound += 2.0**-10 if fp8 else 0.0  # half of E4M3's least step
        assert ((found - exact[kept]).abs() <= bound).all(), inputs.seed
    assert int(cache.float().isfinite().sum()) == 2 * len(kept) * kv_heads * dim
    if rotate:
        inputs.close(q_out, rotate_reference(q, angles), 3e-7 + ROUNDING[dtype])
        turned = q.clone()
        cache_write(k, v, slots, kv, turned, angles, turned)
        assert torch.equal(turned, q_out)


def test_fp8_is_rounded_to_nearest_and_saturates() -> None:
    """Bit for bit what torch rounds to: every E4M3 step is met, halves of the least one too."""
    values = torch.cat([torch.linspace(-470, 470, 1024), torch.linspace(-0.05, 0.05, 1024)]).view(16, 2, 64)
    cache = torch.zeros(1, 1, 2, 2, BLOCK, 64, dtype=torch.float8_e4m3fn)
    kv = layer_view(cache, 0, torch.ones(2, 2))
    cache_write(values, -values, torch.arange(16), kv)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(kv.keys[0].transpose(0, 1).float(), expected.float())
    assert torch.equal(kv.values[0].transpose(0, 1).float(), -expected.float())


def test_refuses_what_it_does_not_take() -> None:
    kv = layer_view(torch.zeros(1, 1, 2, 2, BLOCK, 64), 0)
    k, slots, half = torch.zeros(3, 2, 64), torch.arange(3), torch.zeros(3, 32)
    angles = Angles(half, half)
    for arguments, reason in (
        ((k, k, slots, kv, k), "come together"),
        ((k, k[:2], slots, kv), "v \\(2, 2, 64\\)"),
        ((k, k, slots[:1], kv), "slots"),
        ((k[:, :1], k[:, :1], slots, kv), "into a cache of 2"),
        ((k, k, slots, kv, k[:2], angles, k[:2]), "q \\(2, 2, 64\\)"),
        ((k, k, slots, kv, k, angles, k[:2]), "q_out"),
        ((k, k, slots, kv, k, Angles(half[:2], half[:2]), k), "cos"),
        ((k, k, slots, kv._replace(scales=torch.ones(2, 2))), "has scales"),
    ):
        with pytest.raises(ValueError, match=reason):
            cache_write(*arguments)

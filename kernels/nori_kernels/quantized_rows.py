"""Rows stored as int8 or E4M3 with one float32 scale: x ≈ q · scale, scale = max|x| / limit.

A row of zeros has scale 1 / limit, so that its q stays 0. Shared by every kernel with a quantized output.
"""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import rounded

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest magnitude of each quantized type


def limit_of(dtype: torch.dtype) -> float:
    """ValueError for what no kernel quantizes to."""
    if dtype not in LIMITS:
        raise ValueError(f"rows are quantized to {' or '.join(map(str, LIMITS))}, not {dtype}")
    return LIMITS[dtype]


def quantize_reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., width] → q [..., width] of `dtype` and float64 scales [...]; the twin of every quantize-out."""
    wide = x.double()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / LIMITS[dtype]
    q = wide / scale[..., None]
    return (q.round() if dtype == torch.int8 else q.float()).to(dtype), scale


@triton.jit
def scale_of(largest, LIMIT: tl.constexpr):
    """float32 max|x| → scale."""
    return tl.where(largest > 0, largest, 1.0) / LIMIT


@triton.jit
def quantized(x, dtype: tl.constexpr):
    """float32 x / scale → `dtype`, to nearest even; saturates."""
    if dtype == tl.int8:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        # 1.5 · 2^23: one unit of the sum is 1, so the addition rounds; tl has no rint
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return rounded(x, dtype)

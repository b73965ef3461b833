"""Conversions inside kernels, exact in the interpreter too (it keeps bf16 as uint16 and truncates where it casts)."""

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
FP8_MAX = tl.constexpr(448.0)  # of E4M3 without infinities
TRITON_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def interpreted() -> bool:
    """Whether kernels of this process run in the interpreter: TRITON_INTERPRET=1 when they were imported."""
    return bool(INTERPRET)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """x as an operand of tl.dot: of `dtype` on a GPU, float32 in the interpreter (its bf16 products are wrong)."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x as `dtype`, to nearest even; E4M3 saturates at 448."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
        if INTERPRET:
            bits = x.to(tl.uint32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
            tiny = (x + 24576.0) - 24576.0  # 1.5 * 2**14: one unit of the sum is 2**-9, the least of E4M3
            x = tl.where(tl.abs(x) < 0.015625, tiny, normal)
        return x.to(dtype)
    elif dtype == tl.bfloat16 and INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)

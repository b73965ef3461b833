"""W4A16 and W8A16: activations in bf16 or fp16 times packed weights, unpacked in registers.

q - zero is exact in both types, so products are of exact weights; the scale multiplies each 32 columns' float32 sum.
"""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import operand, rounded
from nori_kernels.quant.layouts import PackedWeight
from nori_kernels.require import require
from nori_kernels.variant import Variant

# Rows of x from which a tile is chosen → (BLOCK_M, BLOCK_N, warps, stages).
TILES = {0: (16, 64, 4, 4), 33: (64, 64, 4, 3)}


def weight_gemm_reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [M, rows]."""
    y = x.double() @ weight.dense().T
    return y if bias is None else y + bias.double()


@triton.jit
def weight_gemm_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    group,
    x_stride,
    q_stride,
    scale_stride,
    out_stride,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (row tile, column tile): 64 of `inner` at a time, as the two halves of a run."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    own_m, own_n = tl.where(m < rows, m, 0).to(tl.int64), tl.where(n < columns, n, 0).to(tl.int64)
    x_tile = x_ptr + own_m[:, None] * x_stride + k[None, :]
    q_tile = q_ptr + own_n[None, :] * q_stride + k[:, None]
    kind: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, 64):
        low = tl.load(q_tile)
        if BITS == 4:
            high = low >> 4
            low = low & 15
            q_tile += 32
        else:
            high = tl.load(q_tile + 32)
            q_tile += 64
        x = tl.load(x_tile, mask=(start + k < inner)[None, :], other=0.0)
        place = own_n * scale_stride + start // group
        w = low.to(tl.float32) - tl.load(zero_ptr + place).to(tl.float32)[None, :]
        acc += tl.dot(operand(x, kind), operand(w, kind)) * tl.load(scale_ptr + place).to(tl.float32)[None, :]
        there = start + 32 < inner
        x = tl.load(x_tile + 32, mask=(start + 32 + k < inner)[None, :], other=0.0)
        place = own_n * scale_stride + tl.where(there, (start + 32) // group, 0)
        w = high.to(tl.float32) - tl.load(zero_ptr + place).to(tl.float32)[None, :]
        acc += tl.dot(operand(x, kind), operand(w, kind)) * tl.load(scale_ptr + place).to(tl.float32)[None, :]
        x_tile += 64
    if BIAS:
        acc += tl.load(bias_ptr + own_n).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(place, rounded(acc, out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def weight_gemm(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, columns] in bf16 or fp16 → [M, rows] of x's type, or of out's."""
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] != weight.columns or x.stride(1) != 1:
        raise ValueError(
            f"x is bf16 or fp16 [M, {weight.columns}] with contiguous rows, not {x.dtype} {tuple(x.shape)}"
        )
    rows, columns = len(x), len(weight.q)
    out = x.new_empty(rows, columns) if out is None else out
    require("out", out, (rows, columns))
    if bias is not None:
        require("bias", bias, (columns,))
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if rows:
        block_m, block_n, warps, stages = TILES[max(least for least in TILES if least <= rows)]
        weight_gemm_kernel[(triton.cdiv(rows, block_m), triton.cdiv(columns, block_n))](
            x,
            weight.q,
            weight.scale,
            weight.zero,
            out if bias is None else bias,
            out,
            rows,
            columns,
            weight.columns,
            weight.group,
            x.stride(0),
            weight.q.stride(0),
            weight.scale.stride(0),
            out.stride(0),
            BITS=weight.bits,
            BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return out


def _variant(bits: int, least: int) -> Variant:
    block_m, block_n, warps, stages = TILES[least]
    return Variant(
        kernel=weight_gemm_kernel,
        label=f"W{bits} bf16 {block_m}x{block_n}",
        signature={
            "x_ptr": "*bf16",
            "q_ptr": "*u8",
            "scale_ptr": "*bf16",
            "zero_ptr": "*u8",
            "bias_ptr": "*bf16",
            "out_ptr": "*bf16",
            **dict.fromkeys(("rows", "columns", "inner", "group"), "i32"),
            **dict.fromkeys(("x_stride", "q_stride", "scale_stride", "out_stride"), "i64"),
        },
        constexprs={"BITS": bits, "BIAS": False, "BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=warps,
        num_stages=stages,
        aligned=("inner", "group", "x_stride", "q_stride", "out_stride"),
        tensor_cores="large" if block_m >= 64 else "any",
    )


VARIANTS = [_variant(bits, least) for bits in (4, 8) for least in TILES]

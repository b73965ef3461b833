"""Products of quantized operands: int8 W8A8, and FP8 with scales per tensor, per row or per block of 128.

y[m, n] = Σ_k a[m, k] · w[n, k] with the scales of both outside the sum, or (blocks) outside each 128 of it.
"""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import operand, rounded
from nori_kernels.require import require
from nori_kernels.variant import Variant

GROUP = 128  # columns, and rows of a weight, of one block scale
# Rows of a from which a tile is chosen → (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages).
TILES = {0: (16, 64, 128, 4, 4), 33: (64, 128, 128, 4, 3)}


def scaled_gemm_reference(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [M, N]; shapes as scaled_gemm has them."""
    wide_a, wide_w = a.double(), w.double()
    if a_scale.dim() == 2:
        columns = torch.arange(a.shape[1]) // GROUP
        wide_a = wide_a * a_scale.double()[:, columns]
        wide_w = wide_w * w_scale.double()[torch.arange(len(w)) // GROUP][:, columns]
    else:
        wide_a, wide_w = wide_a * a_scale.double()[:, None], wide_w * w_scale.double()[:, None]
    y = wide_a @ wide_w.T
    return y if bias is None else y + bias.double()


@triton.jit
def scaled_gemm_kernel(
    a_ptr,
    w_ptr,
    out_ptr,
    a_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    rows,
    columns,
    inner,
    a_stride,
    w_stride,
    out_stride,
    a_scale_stride,
    w_scale_stride,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (row tile, column tile). a [rows, inner], w [columns, inner]. Scale strides: 0 = one for the tensor."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0: only the store is masked, so that loads stay plain and are pipelined.
    own_m, own_n = tl.where(m < rows, m, 0).to(tl.int64), tl.where(n < columns, n, 0).to(tl.int64)
    a_tile = a_ptr + own_m[:, None] * a_stride + k[None, :]
    w_tile = w_ptr + own_n[None, :] * w_stride + k[:, None]
    kind: tl.constexpr = a_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if kind == tl.int8 else tl.float32)
    for start in range(0, inner, BLOCK_K):
        left = inner - start
        a = tl.load(a_tile, mask=k[None, :] < left, other=0.0)
        w = tl.load(w_tile, mask=k[:, None] < left, other=0.0)
        if kind == tl.int8:
            acc = tl.dot(a, w, acc, out_dtype=tl.int32)
        elif GROUPED:
            group = start // GROUP
            a_scale = tl.load(a_scale_ptr + own_m * a_scale_stride + group)
            w_scale = tl.load(w_scale_ptr + (own_n // GROUP) * w_scale_stride + group)
            acc += tl.dot(operand(a, kind), operand(w, kind)) * a_scale[:, None] * w_scale[None, :]
        else:
            acc = tl.dot(operand(a, kind), operand(w, kind), acc)
        a_tile += BLOCK_K
        w_tile += BLOCK_K
    y = acc.to(tl.float32)
    if not GROUPED:
        a_scale = tl.load(a_scale_ptr + own_m * a_scale_stride)
        y = y * a_scale[:, None] * tl.load(w_scale_ptr + own_n * w_scale_stride)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + own_n).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(place, rounded(y, out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def scaled_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [M, K] and w [N, K], both int8 or both float8_e4m3fn → out [M, N] of any float type.

    float32 scales: a_scale [M] or [1], w_scale [N] or [1]; or (FP8) [M, ⌈K / 128⌉] and [⌈N / 128⌉, ⌈K / 128⌉].
    """
    (rows, inner), columns = a.shape, len(w)
    grouped = a_scale.dim() == 2
    groups = triton.cdiv(inner, GROUP)
    fits_a = a_scale.shape == (rows, groups) if grouped else a_scale.shape in ((rows,), (1,))
    blocks = (triton.cdiv(columns, GROUP), groups)
    fits_w = w_scale.shape == blocks if grouped else w_scale.shape in ((columns,), (1,))
    if a.dtype != w.dtype or not fits_a or not fits_w or (grouped and a.dtype == torch.int8) or w.shape[1] != inner:
        raise ValueError(f"{a.dtype} {[tuple(t.shape) for t in (a, a_scale, w, w_scale)]} is no scaled product")
    require("a", a, (rows, inner), torch.int8, torch.float8_e4m3fn)
    require("w", w, (columns, inner), a.dtype)
    require("out", out, (rows, columns))
    if bias is not None:
        require("bias", bias, (columns,))
    if rows:
        block_m, block_n, block_k, warps, stages = TILES[max(least for least in TILES if least <= rows)]
        scaled_gemm_kernel[(triton.cdiv(rows, block_m), triton.cdiv(columns, block_n))](
            a,
            w,
            out,
            a_scale,
            w_scale,
            out if bias is None else bias,
            rows,
            columns,
            inner,
            a.stride(0),
            w.stride(0),
            out.stride(0),
            a_scale.stride(0) if len(a_scale) > 1 or grouped else 0,
            w_scale.stride(0) if len(w_scale) > 1 or grouped else 0,
            BIAS=bias is not None,
            GROUPED=grouped,
            GROUP=GROUP,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return out


def _variant(kind: str, least: int, grouped: bool) -> Variant:
    block_m, block_n, block_k, warps, stages = TILES[least]
    return Variant(
        kernel=scaled_gemm_kernel,
        label=f"{kind}{' blocks' if grouped else ''} {block_m}x{block_n}x{block_k}",
        signature={
            "a_ptr": f"*{kind}",
            "w_ptr": f"*{kind}",
            "out_ptr": "*bf16",
            "a_scale_ptr": "*fp32",
            "w_scale_ptr": "*fp32",
            "bias_ptr": "*bf16",
            **dict.fromkeys(("rows", "columns", "inner"), "i32"),
            **dict.fromkeys(("a_stride", "w_stride", "out_stride", "a_scale_stride", "w_scale_stride"), "i64"),
        },
        constexprs={
            "BIAS": False,
            "GROUPED": grouped,
            "GROUP": GROUP,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        num_warps=warps,
        num_stages=stages,
        aligned=("inner", "a_stride", "w_stride", "out_stride"),
        tensor_cores="large" if block_m >= 64 else "any",
    )


VARIANTS = [
    *(_variant("i8", least, False) for least in TILES),
    *(_variant("fp8e4nv", least, False) for least in TILES),
    *(_variant("fp8e4nv", least, True) for least in TILES),
]

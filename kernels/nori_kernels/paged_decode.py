"""Split-KV flash decoding: one new token per row against its paged keys, the heads of a KV group in one tile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nori_kernels.attend import (
    ALIGNED,
    LN2,
    Scoring,
    attend,
    attention_reference,
    attention_signature,
    key_tiling,
    require_shapes,
)
from nori_kernels.casts import TRITON_TYPES, operand
from nori_kernels.layout import PagedKV
from nori_kernels.merge_splits import merge_splits
from nori_kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one new token, as device tensors int32; items and starts are plan_splits'."""

    items: torch.Tensor  # [S, 3]
    starts: torch.Tensor  # [R + 1]
    rows: torch.Tensor  # [R]: which token of q and out
    tables: torch.Tensor  # [R, blocks]
    context_lens: torch.Tensor  # [R], the new token included; 0 gives zeros


def paged_decode_reference(q: torch.Tensor, kv: PagedKV, rows: DecodeRows, scoring: Scoring) -> torch.Tensor:
    """float64 [R, heads, dim] of the tokens rows.rows of q [T, heads, dim]."""
    out = torch.zeros(len(rows.rows), *q.shape[1:], dtype=torch.float64)
    for row, (token, length) in enumerate(zip(rows.rows.tolist(), rows.context_lens.tolist(), strict=True)):
        if length:
            out[row] = attention_reference(q[token : token + 1], kv, rows.tables[row], length, scoring)[0]
    return out


@triton.jit
def paged_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    items_ptr,
    rows_ptr,
    tables_ptr,
    context_ptr,
    parts_ptr,
    lse_ptr,
    kv_heads,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Program (item, KV head): parts[item, heads of the group] and their log-sum-exp."""
    item, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(items_ptr + item * 3).to(tl.int64)
    start, stop = tl.load(items_ptr + item * 3 + 1), tl.load(items_ptr + item * 3 + 2)
    place = tl.load(context_ptr + row) - 1
    token = tl.load(rows_ptr + row).to(tl.int64)
    members, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    live = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    heads = head * GROUP + members
    q_at = token * stride_q_token + heads.to(tl.int64)[:, None] * stride_q_head + dims[None, :]
    q = operand(tl.load(q_ptr + q_at, mask=live, other=0.0), q_ptr.dtype.element_ty)
    value_scale = 1.0
    if HAS_SCALES:
        scale = scale * tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + kv_heads + head)
    low = 0
    if HAS_WINDOW:
        low = place - window + 1
    acc, top, total = attend(
        q,
        tl.full([ROWS], 0, tl.int32) + place,
        tables_ptr + row * stride_table,
        keys_ptr,
        values_ptr,
        start,
        stop,
        low,
        head,
        stride_block,
        stride_head,
        stride_token,
        scale,
        softcap,
        window,
        DIM,
        DIM_PAD,
        ROWS,
        KEYS,
        BLOCK_SIZE,
        HAS_WINDOW,
        HAS_CAP,
        q_ptr.dtype.element_ty,
    )
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    out_at = item * kv_heads * GROUP + heads
    tl.store(parts_ptr + out_at[:, None] * DIM + dims[None, :], acc * (value_scale / total)[:, None], mask=live)
    lse = tl.where(nothing, -float("inf"), top * LN2 + tl.log(total))
    tl.store(lse_ptr + out_at, lse, mask=members < GROUP)


def paged_decode(q: torch.Tensor, kv: PagedKV, rows: DecodeRows, scoring: Scoring, out: torch.Tensor) -> None:
    """q [T, heads, dim] → out[rows.rows] [T, heads, dim], any float dtype, dim contiguous; other rows stay as they are.

    ValueError for shapes, dtypes and caches that require_shapes refuses.
    """
    require_shapes(q, kv, out)
    heads, dim = q.shape[1:]
    kv_heads = kv.keys.shape[1]
    group = heads // kv_heads
    tile = max(16, triton.next_power_of_2(group))
    tiling = key_tiling(q.dtype, dim, tile)
    count = len(rows.items)
    parts = torch.empty(count, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if count:
        paged_decode_kernel[(count, kv_heads)](
            q,
            kv.keys,
            kv.values,
            lse if kv.scales is None else kv.scales,
            rows.items,
            rows.rows,
            rows.tables,
            rows.context_lens,
            parts,
            lse,
            kv_heads,
            q.stride(0),
            q.stride(1),
            *kv.strides,
            rows.tables.stride(0),
            scoring.scale,
            scoring.softcap,
            scoring.window,
            GROUP=group,
            DIM=dim,
            DIM_PAD=triton.next_power_of_2(dim),
            ROWS=tile,
            KEYS=tiling.keys,
            BLOCK_SIZE=kv.block_size,
            HAS_SCALES=kv.scales is not None,
            HAS_WINDOW=scoring.window > 0,
            HAS_CAP=scoring.softcap > 0,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            enable_fp_fusion=True,
        )
    merge_splits(parts, lse, rows.starts, rows.rows, out, scoring.sinks)


def _variant(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, group: int, extras: bool = False) -> Variant:
    tile = max(16, triton.next_power_of_2(group))
    tiling = key_tiling(dtype, dim, tile)
    return Variant(
        kernel=paged_decode_kernel,
        label=f"{TRITON_TYPES[dtype]} kv {TRITON_TYPES[kv_dtype]} dim {dim} group {group}{' window cap' * extras}",
        signature={
            **attention_signature(dtype, kv_dtype),
            "items_ptr": "*i32",
            "rows_ptr": "*i32",
            "parts_ptr": "*fp32",
            "lse_ptr": "*fp32",
        },
        constexprs={
            "GROUP": group,
            "DIM": dim,
            "DIM_PAD": triton.next_power_of_2(dim),
            "ROWS": tile,
            "KEYS": tiling.keys,
            "BLOCK_SIZE": 16,
            "HAS_SCALES": kv_dtype == torch.float8_e4m3fn,
            "HAS_WINDOW": extras,
            "HAS_CAP": extras,
        },
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        aligned=ALIGNED,
        tensor_cores="any",
    )


_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
VARIANTS = [
    _variant(_BF16, _BF16, 64, 4),
    _variant(_BF16, _BF16, 128, 4),
    _variant(_BF16, _BF16, 256, 8, extras=True),
    _variant(_BF16, _FP8, 128, 8),
    _variant(torch.float32, torch.float32, 128, 4),
]

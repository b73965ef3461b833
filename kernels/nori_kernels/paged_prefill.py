"""Varlen causal attention of new tokens over a paged prefix: prompts, chunks, prefix hits, rows of 1 + k drafts.

The new tokens' K and V are in the cache already (cache_write). A tile is whole tokens with the heads of one KV group.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nori_kernels.attend import (
    ALIGNED,
    LOG2E,
    Scoring,
    attend,
    attention_reference,
    attention_signature,
    key_tiling,
    require_shapes,
)
from nori_kernels.casts import TRITON_TYPES, operand, rounded
from nori_kernels.layout import PagedKV
from nori_kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of several new tokens, as device tensors int32; tiles are plan_tiles' for tile_rows // group tokens."""

    tiles: torch.Tensor  # [n, 2] of row and first new token
    tile_rows: int
    first_tokens: torch.Tensor  # [R]: where the row's new tokens begin in q and out
    query_lens: torch.Tensor  # [R]
    tables: torch.Tensor  # [R, blocks]
    context_lens: torch.Tensor  # [R], the new tokens included


def tile_rows(dtype: torch.dtype, dim: int, group: int, longest: int) -> int:
    """Rows of a tile for a longest row of `longest` new tokens: 16 for drafts, 64 or 128 for prompts; ≥ group.

    None of 32: Hopper's and Blackwell's large products take 64 rows, and a step loads the same keys.
    """
    most = 128 if dim <= 128 and dtype != torch.float32 else 64 if dtype != torch.float32 else 16
    wanted = 16 if longest * group <= 16 else min(most, max(64, triton.next_power_of_2(longest * group)))
    return max(wanted, triton.next_power_of_2(group))


def paged_prefill_reference(q: torch.Tensor, kv: PagedKV, rows: PrefillRows, scoring: Scoring) -> torch.Tensor:
    """float64 [T, heads, dim]; tokens of no row are NaN."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    firsts, counts = rows.first_tokens.tolist(), rows.query_lens.tolist()
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if count:
            tokens = slice(first, first + count)
            out[tokens] = attention_reference(q[tokens], kv, rows.tables[row], int(rows.context_lens[row]), scoring)
    return out


@triton.jit
def paged_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    sinks_ptr,
    tiles_ptr,
    first_ptr,
    count_ptr,
    tables_ptr,
    context_ptr,
    out_ptr,
    kv_heads,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
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
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Program (tile, KV head): ROWS // GROUP tokens of one row, all heads of the group."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * 2 + 1)
    count, context = tl.load(count_ptr + row), tl.load(context_ptr + row)
    members, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    TOKENS: tl.constexpr = ROWS // GROUP
    tokens = begin + members // GROUP
    is_row = (members < TOKENS * GROUP) & (tokens < count)
    live = is_row[:, None] & (dims < DIM)[None, :]
    heads = (head * GROUP + members % GROUP).to(tl.int64)
    places = (tl.load(first_ptr + row) + tokens).to(tl.int64)
    q_at = places[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    q = operand(tl.load(q_ptr + q_at, mask=live, other=0.0), q_ptr.dtype.element_ty)
    value_scale = 1.0
    if HAS_SCALES:
        scale = scale * tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + kv_heads + head)
    own = context - count + tokens
    stop = tl.minimum(context, context - count + begin + TOKENS)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, context - count + begin - window + 1)
    acc, top, total = attend(
        q,
        own,
        tables_ptr + row * stride_table,
        keys_ptr,
        values_ptr,
        start,
        stop,
        start,
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
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        larger = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - larger)[:, None]
        total = total * tl.exp2(top - larger) + tl.exp2(sink - larger)
    result = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_at = places[:, None] * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(out_ptr + out_at, rounded(result, out_ptr.dtype.element_ty), mask=live)


def paged_prefill(q: torch.Tensor, kv: PagedKV, rows: PrefillRows, scoring: Scoring, out: torch.Tensor) -> None:
    """q [T, heads, dim] → the rows' tokens of out [T, heads, dim], dim contiguous; other tokens stay as they are.

    ValueError for shapes, dtypes and caches that require_shapes refuses.
    """
    require_shapes(q, kv, out)
    heads, dim = q.shape[1:]
    kv_heads = kv.keys.shape[1]
    if rows.tile_rows < max(16, heads // kv_heads) or rows.tile_rows & (rows.tile_rows - 1):
        raise ValueError(f"tiles of {rows.tile_rows} rows do not hold a group of {heads // kv_heads} heads")
    if len(rows.tiles) == 0:
        return
    tiling = key_tiling(q.dtype, dim, rows.tile_rows)
    paged_prefill_kernel[(len(rows.tiles), kv_heads)](
        q,
        kv.keys,
        kv.values,
        rows.tiles if kv.scales is None else kv.scales,
        rows.tiles if scoring.sinks is None else scoring.sinks,
        rows.tiles,
        rows.first_tokens,
        rows.query_lens,
        rows.tables,
        rows.context_lens,
        out,
        kv_heads,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *kv.strides,
        rows.tables.stride(0),
        scoring.scale,
        scoring.softcap,
        scoring.window,
        GROUP=heads // kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        ROWS=rows.tile_rows,
        KEYS=tiling.keys,
        BLOCK_SIZE=kv.block_size,
        HAS_SCALES=kv.scales is not None,
        HAS_SINKS=scoring.sinks is not None,
        HAS_WINDOW=scoring.window > 0,
        HAS_CAP=scoring.softcap > 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )


def _variant(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, longest: int, group: int = 4, extras: bool = False
) -> Variant:
    rows = tile_rows(dtype, dim, group, longest)
    tiling = key_tiling(dtype, dim, rows)
    kinds = f"{TRITON_TYPES[dtype]} kv {TRITON_TYPES[kv_dtype]}"
    return Variant(
        kernel=paged_prefill_kernel,
        label=f"{kinds} dim {dim} rows {rows}{' window cap sinks' * extras}",
        signature={
            **attention_signature(dtype, kv_dtype),
            "sinks_ptr": "*fp32",
            "tiles_ptr": "*i32",
            "first_ptr": "*i32",
            "count_ptr": "*i32",
            "out_ptr": f"*{TRITON_TYPES[dtype]}",
            "stride_out_token": "i64",
            "stride_out_head": "i64",
        },
        constexprs={
            "GROUP": group,
            "DIM": dim,
            "DIM_PAD": triton.next_power_of_2(dim),
            "ROWS": rows,
            "KEYS": tiling.keys,
            "BLOCK_SIZE": 16,
            "HAS_SCALES": kv_dtype == torch.float8_e4m3fn,
            "HAS_SINKS": extras,
            "HAS_WINDOW": extras,
            "HAS_CAP": extras,
        },
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        aligned=(*ALIGNED, "stride_out_token", "stride_out_head"),
        tensor_cores="large" if rows >= 64 else "any",
    )


_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
VARIANTS = [
    *(_variant(_BF16, _BF16, dim, 128) for dim in (80, 128, 256)),
    *(_variant(_BF16, _BF16, 128, longest) for longest in (4, 16)),  # 16 and 64 rows
    _variant(_BF16, _BF16, 64, 128, extras=True),
    _variant(_BF16, _FP8, 128, 128),
]

"""What decode and prefill share: one tile of query rows against a range of one sequence's paged keys, and its tiles."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nori_kernels.casts import TRITON_TYPES, operand
from nori_kernels.layout import PagedKV, gather_reference, token_offsets

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores come about. window, softcap: 0 for none. sinks: float32 [heads] or None: a key that has no value."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a launch: keys per iteration, warps of a program, loads in flight."""

    keys: int
    warps: int
    stages: int


def key_tiling(dtype: torch.dtype, dim: int, rows: int) -> Tiling:
    """For query tiles of `rows` rows. Wide heads and float32 take fewer keys: they must fit sm_80's 163 KiB."""
    if dtype == torch.float32:
        return Tiling(keys=16, warps=4, stages=2)
    warps = 8 if rows * dim >= 64 * 128 else 4
    if dim <= 64 and rows < 64:
        return Tiling(keys=64, warps=warps, stages=2)
    if rows == 64 and 64 < dim <= 128:
        return Tiling(keys=32, warps=4, stages=3)
    return Tiling(keys=64 if dim <= 128 else 32, warps=warps, stages=3 if dim <= 128 else 2)


def attention_reference(
    q: torch.Tensor, kv: PagedKV, table: torch.Tensor, length: int, scoring: Scoring
) -> torch.Tensor:
    """q [n, heads, dim], the last n of the sequence's `length` tokens → float64 [n, heads, dim]."""
    keys, values = gather_reference(kv, table, length)
    repeat = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    behind = torch.arange(length - len(q), length)[:, None] - torch.arange(length)[None, :]
    hidden = (behind < 0) | (behind >= (scoring.window or length + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length].nan_to_num(), values)


def require_shapes(q: torch.Tensor, kv: PagedKV, out: torch.Tensor) -> None:
    """ValueError unless the kernels take such queries, such a cache and such a result."""
    heads, dim = q.shape[1:]
    if dim % 16 or not 16 <= dim <= 256 or kv.keys.shape[3] != dim:
        raise ValueError(f"head_dim {dim} over a cache of {kv.keys.shape[3]}: a multiple of 16 up to 256 is needed")
    if heads % kv.keys.shape[1]:
        raise ValueError(f"{heads} query heads are no multiple of {kv.keys.shape[1]} KV heads")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or q.stride(2) != 1:
        raise ValueError(f"queries of {q.dtype} with strides {q.stride()} are not taken")
    if kv.keys.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"KV of {kv.keys.dtype} under queries of {q.dtype}")
    if (kv.keys.dtype == torch.float8_e4m3fn) != (kv.scales is not None):
        raise ValueError("FP8 KV has scales and other KV has none")
    if out.shape != q.shape or out.stride(2) != 1:
        raise ValueError(f"out is {list(out.shape)} with strides {out.stride()}, queries are {list(q.shape)}")


@triton.jit
def attend(
    q,
    own,
    table_ptr,
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
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys start … stop of KV head `head` for q [ROWS, DIM_PAD] at positions own [ROWS]; nothing before low is read.

    Returns (acc [ROWS, DIM_PAD], top [ROWS], total [ROWS]): acc / total is the result; top is a greatest score, base 2.
    """
    dims = tl.arange(0, DIM_PAD)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(start, stop, KEYS):
        places = begin + tl.arange(0, KEYS)
        there = (places < stop) & (places >= low)
        lines = token_offsets(table_ptr, places, there, head, stride_block, stride_head, stride_token, BLOCK_SIZE)
        offsets = lines[:, None] + dims[None, :]
        within = there[:, None] & (dims < DIM)[None, :]
        keys = operand(tl.load(keys_ptr + offsets, mask=within, other=0.0), DTYPE)
        scores = tl.dot(q, tl.trans(keys), input_precision="tf32x3") * scale
        if HAS_CAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
        seen = there[None, :] & (places[None, :] <= own[:, None])
        if HAS_WINDOW:
            seen = seen & (places[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores * LOG2E, -float("inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(larger == -float("inf"), 0.0, larger)  # nothing seen yet
        weights = tl.exp2(scores - safe[:, None])
        kept = tl.exp2(top - safe)
        total = total * kept + tl.sum(weights, 1)
        values = operand(tl.load(values_ptr + offsets, mask=within, other=0.0), DTYPE)
        acc = tl.dot(operand(weights, DTYPE), values, acc * kept[:, None], input_precision="tf32x3")
        top = larger
    return acc, top, total


def attention_signature(dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, str]:
    """Types of the arguments that both kernels have."""
    query, stored = f"*{TRITON_TYPES[dtype]}", f"*{TRITON_TYPES[kv_dtype]}"
    return {
        "q_ptr": query,
        "keys_ptr": stored,
        "values_ptr": stored,
        "scales_ptr": "*fp32",
        "tables_ptr": "*i32",
        "context_ptr": "*i32",
        "kv_heads": "i32",
        "stride_q_token": "i64",
        "stride_q_head": "i64",
        "stride_block": "i64",
        "stride_head": "i64",
        "stride_token": "i64",
        "stride_table": "i64",
        "scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
    }


ALIGNED = ("stride_q_token", "stride_q_head", "stride_block", "stride_head", "stride_token")

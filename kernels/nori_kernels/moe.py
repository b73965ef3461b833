"""Mixture of experts: route → align → grouped_gemm (twice, an activation between) → reduce.

A slot is one (token, choice): slot t · k + j. align sorts slots by expert and gives each expert whole tiles, so that a
tile of the product reads one expert's weight. No atomics: every order and every sum is fixed, whatever the batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nori_kernels.casts import operand, rounded
from nori_kernels.require import require
from nori_kernels.variant import Variant

BLOCK = 1024
# Slots of an expert, on average, from which a tile is chosen → (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages).
TILES = {0: (16, 64, 64, 4, 4), 33: (64, 128, 64, 4, 3)}


class Aligned(NamedTuple):
    """slots int32 [n]: slots by expert, each expert's filled up to whole tiles with a number past the last slot.

    experts int32 [n / tile]: whose tile it is, -1 behind the last one; tile: rows of one tile.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    tile: int


def route_reference(logits: torch.Tensor, choices: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 weights and int64 experts [T, choices], likeliest first, equal ones by number."""
    table = torch.softmax(logits.double(), dim=-1)
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :choices]
    weights = table.gather(1, order)
    return weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights, order


def grouped_gemm_reference(x: torch.Tensor, w: torch.Tensor, experts: torch.Tensor, shared: int) -> torch.Tensor:
    """float64 [slots, N]; experts [slots]; row of x of slot s: s // shared."""
    rows = x.double()[torch.arange(len(experts)) // shared]
    return torch.einsum("sk,snk->sn", rows, w.double()[experts.long()])


def reduce_reference(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float64 [T, N]."""
    return (y.double().unflatten(0, weights.shape) * weights.double()[..., None]).sum(dim=1)


@triton.jit
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    logits_stride,
    count,
    CHOICES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: softmax over its experts, CHOICES times the likeliest that is left."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    place = logits_ptr + token * logits_stride + experts
    score = tl.load(place, mask=experts < count, other=-float("inf")).to(tl.float32)
    best = tl.max(score, axis=0)
    total = tl.sum(tl.exp(score - best), axis=0)
    if RENORMALIZE:
        left, total = score, 0.0
        for _ in tl.static_range(CHOICES):
            top = tl.max(left, axis=0)
            first = tl.min(tl.where(left == top, experts, BLOCK), axis=0)
            left = tl.where(experts == first, -float("inf"), left)
            total += tl.exp(top - best)
    for choice in tl.static_range(CHOICES):
        top = tl.max(score, axis=0)
        first = tl.min(tl.where(score == top, experts, BLOCK), axis=0)
        score = tl.where(experts == first, -float("inf"), score)
        tl.store(weights_ptr + token * CHOICES + choice, tl.exp(top - best) / total)
        tl.store(experts_ptr + token * CHOICES + choice, first)


@triton.jit
def count_slots_kernel(experts_ptr, counts_ptr, slots, BLOCK: tl.constexpr):
    """One expert: how many slots chose it."""
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += (tl.load(experts_ptr + slot, mask=slot < slots, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit
def place_slots_kernel(
    experts_ptr,
    counts_ptr,
    slots_ptr,
    tiles_ptr,
    slots,
    count,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One expert: its slots in order behind those of the experts before it, then the rest of its last tile."""
    expert = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts_ptr + number, mask=number < count, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(number < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(number == expert, tiles, 0), axis=0)
    filled = first * TILE
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + slot, mask=slot < slots, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(slots_ptr + filled + rank - 1, slot, mask=mine)
        filled += tl.sum(mine.to(tl.int32), axis=0)
    rest = filled + tl.arange(0, TILE)
    tl.store(slots_ptr + rest, tl.zeros([TILE], tl.int32) + slots, mask=rest < (first + own) * TILE)
    for tile in range(0, own):
        tl.store(tiles_ptr + first + tile, expert)


@triton.jit
def grouped_gemm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    slots_ptr,
    tiles_ptr,
    slots,
    columns,
    inner,
    shared,
    x_stride,
    w_stride_expert,
    w_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of slots, tile of columns): out[slot] = x[slot / shared] · w[expert]ᵀ."""
    expert = tl.load(tiles_ptr + tl.program_id(0))
    if expert >= 0:
        slot = tl.load(slots_ptr + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        source = tl.where(slot < slots, slot // shared, 0).to(tl.int64)
        own_n = tl.where(n < columns, n, 0).to(tl.int64)
        x_tile = x_ptr + source[:, None] * x_stride + k[None, :]
        w_tile = w_ptr + expert.to(tl.int64) * w_stride_expert + own_n[None, :] * w_stride + k[:, None]
        kind: tl.constexpr = x_ptr.dtype.element_ty
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, inner, BLOCK_K):
            left = inner - start
            x = tl.load(x_tile, mask=k[None, :] < left, other=0.0)
            w = tl.load(w_tile, mask=k[:, None] < left, other=0.0)
            acc = tl.dot(operand(x, kind), operand(w, kind), acc)
            x_tile += BLOCK_K
            w_tile += BLOCK_K
        place = out_ptr + slot.to(tl.int64)[:, None] * out_stride + n[None, :]
        inside = (slot < slots)[:, None] & (n < columns)[None, :]
        tl.store(place, rounded(acc, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def reduce_slots_kernel(
    y_ptr, weights_ptr, out_ptr, y_stride, out_stride, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, tile of columns): its slots' rows times their weights, summed in order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = token * CHOICES + choice
        y = tl.load(y_ptr + slot * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + slot)
    tl.store(out_ptr + token * out_stride + columns, rounded(total, out_ptr.dtype.element_ty), mask=inside)


def route(logits: torch.Tensor, choices: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts] → float32 weights and int32 experts [T, choices]; renormalize: a token's weights sum to 1."""
    tokens, count = logits.shape
    if not 0 < choices <= count:
        raise ValueError(f"{choices} of {count} experts cannot be chosen")
    require("logits", logits, (tokens, count))
    weights = torch.empty(tokens, choices, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, choices, dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits,
            weights,
            experts,
            logits.stride(0),
            count,
            CHOICES=choices,
            RENORMALIZE=renormalize,
            BLOCK=triton.next_power_of_2(count),
            num_warps=1,
            enable_fp_fusion=True,
        )
    return weights, experts


def align(experts: torch.Tensor, count: int) -> Aligned:
    """experts int32 [T, choices] below `count` → slots by expert. Sizes depend on shapes alone, not on the choices."""
    if experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts must be contiguous int32, not {experts.dtype} with strides {experts.stride()}")
    slots = experts.numel()
    tile = TILES[max(least for least in TILES if least <= slots // count)][0]
    tiles = min(slots, count + slots // tile)  # an expert has at most one tile that is not full
    result = Aligned(
        torch.empty(tiles * tile, dtype=torch.int32, device=experts.device),
        torch.full((tiles,), -1, dtype=torch.int32, device=experts.device),
        tile,
    )
    if slots:
        counts = torch.empty(count, dtype=torch.int32, device=experts.device)
        count_slots_kernel[(count,)](experts, counts, slots, BLOCK=BLOCK)
        place_slots_kernel[(count,)](
            experts,
            counts,
            result.slots,
            result.experts,
            slots,
            count,
            TILE=tile,
            EXPERTS=triton.next_power_of_2(count),
            BLOCK=BLOCK,
        )
    return result


def grouped_gemm(x: torch.Tensor, w: torch.Tensor, aligned: Aligned, out: torch.Tensor, shared: int) -> torch.Tensor:
    """x [slots / shared, K], w [experts, N, K] → out [slots, N]; shared: slots that read a row of x (choices or 1)."""
    slots, columns = out.shape
    if len(x) * shared != slots or x.dtype != w.dtype or x.stride(1) != 1 or w.stride(2) != 1:
        raise ValueError(f"{tuple(x.shape)} {x.dtype} by {tuple(w.shape)} {w.dtype} does not give {slots} slots")
    require("w", w, (len(w), columns, x.shape[1]))
    require("out", out, (slots, columns))
    if slots:
        block_m, block_n, block_k, warps, stages = next(t for t in TILES.values() if t[0] == aligned.tile)
        grouped_gemm_kernel[(len(aligned.experts), triton.cdiv(columns, block_n))](
            x,
            w,
            out,
            aligned.slots,
            aligned.experts,
            slots,
            columns,
            x.shape[1],
            shared,
            x.stride(0),
            w.stride(0),
            w.stride(1),
            out.stride(0),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return out


def reduce_slots(y: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """y [T · choices, N], float32 weights [T, choices] → out [T, N]."""
    tokens, choices = weights.shape
    require("y", y, (tokens * choices, out.shape[1]))
    require("out", out, (tokens, out.shape[1]))
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be contiguous float32, not {weights.dtype} with strides {weights.stride()}")
    if tokens:
        reduce_slots_kernel[(tokens, triton.cdiv(y.shape[1], BLOCK))](
            y,
            weights,
            out,
            y.stride(0),
            out.stride(0),
            y.shape[1],
            CHOICES=choices,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
    return out


def _gemm_variant(least: int) -> Variant:
    block_m, block_n, block_k, warps, stages = TILES[least]
    return Variant(
        kernel=grouped_gemm_kernel,
        label=f"bf16 {block_m}x{block_n}x{block_k}",
        signature={
            **dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("slots_ptr", "tiles_ptr"), "*i32"),
            **dict.fromkeys(("slots", "columns", "inner", "shared"), "i32"),
            **dict.fromkeys(("x_stride", "w_stride_expert", "w_stride", "out_stride"), "i64"),
        },
        constexprs={"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k},
        num_warps=warps,
        num_stages=stages,
        aligned=("inner", "x_stride", "w_stride_expert", "w_stride", "out_stride"),
        tensor_cores="large" if block_m >= 64 else "any",
    )


VARIANTS = [
    Variant(
        kernel=route_kernel,
        label="8 of 128",
        signature={
            "logits_ptr": "*bf16",
            "weights_ptr": "*fp32",
            "experts_ptr": "*i32",
            "logits_stride": "i64",
            "count": "i32",
        },
        constexprs={"CHOICES": 8, "RENORMALIZE": True, "BLOCK": 128},
        num_warps=1,
    ),
    Variant(
        kernel=count_slots_kernel,
        label="",
        signature={"experts_ptr": "*i32", "counts_ptr": "*i32", "slots": "i32"},
        constexprs={"BLOCK": BLOCK},
    ),
    Variant(
        kernel=place_slots_kernel,
        label="128 experts",
        signature={
            **dict.fromkeys(("experts_ptr", "counts_ptr", "slots_ptr", "tiles_ptr"), "*i32"),
            **dict.fromkeys(("slots", "count"), "i32"),
        },
        constexprs={"TILE": 64, "EXPERTS": 128, "BLOCK": BLOCK},
    ),
    *(_gemm_variant(least) for least in TILES),
    Variant(
        kernel=reduce_slots_kernel,
        label="bf16 of 8",
        signature={
            "y_ptr": "*bf16",
            "weights_ptr": "*fp32",
            "out_ptr": "*bf16",
            **dict.fromkeys(("y_stride", "out_stride"), "i64"),
            "width": "i32",
        },
        constexprs={"CHOICES": 8, "BLOCK": BLOCK},
        aligned=("y_stride", "out_stride"),
    ),
]

"""Rotary embedding of q and k and the write of k and v into the paged cache in one launch; FP8 by scales of a head."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nori_kernels.casts import TRITON_TYPES, rounded
from nori_kernels.layout import PagedKV
from nori_kernels.variant import Variant


class Angles(NamedTuple):
    """cos and sin [T, dim / 2], of one dtype and equal strides: element i turns with element i + dim / 2 (GPT-NeoX)."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotate_reference(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [T, heads, dim] → float64, rotated."""
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.cos.double()[:, None], angles.sin.double()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def cache_write_reference(
    k: torch.Tensor, v: torch.Tensor, kv: PagedKV, angles: Angles | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be stored for each token before rounding: float64 [T, kv heads, dim] each."""
    pair = (k.double() if angles is None else rotate_reference(k, angles), v.double())
    if kv.scales is None:
        return pair
    limit = torch.finfo(kv.keys.dtype).max
    divided = [(x / scale.double()[:, None]).clamp(-limit, limit) for x, scale in zip(pair, kv.scales, strict=True)]
    return divided[0], divided[1]


@triton.jit
def cache_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    scales_ptr,
    q_out_ptr,
    keys_ptr,
    values_ptr,
    kv_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_angle,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_head,
    stride_token,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Program (token, KV head): that head's k and v, and q of its group. A slot below 0 is not written."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    halves, members = tl.arange(0, HALF_PAD), tl.arange(0, GROUP_PAD)
    inside = halves < HALF
    k_at = k_ptr + token * stride_k_token + head * stride_k_head + halves
    v_at = v_ptr + token * stride_v_token + head * stride_v_head + halves
    k_first = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
    k_second = tl.load(k_at + HALF, mask=inside, other=0.0).to(tl.float32)
    v_first = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    v_second = tl.load(v_at + HALF, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        cos = tl.load(cos_ptr + token * stride_angle + halves, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * stride_angle + halves, mask=inside, other=0.0).to(tl.float32)
        heads = head * GROUP + members
        live = (members < GROUP)[:, None] & inside[None, :]
        q_at = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head + halves[None, :]
        q_first = tl.load(q_at, mask=live, other=0.0).to(tl.float32)
        q_second = tl.load(q_at + HALF, mask=live, other=0.0).to(tl.float32)
        out_at = q_out_ptr + token * stride_out_token + heads[:, None] * stride_out_head + halves[None, :]
        turned = q_first * cos[None, :] - q_second * sin[None, :]
        tl.store(out_at, rounded(turned, q_out_ptr.dtype.element_ty), mask=live)
        turned = q_second * cos[None, :] + q_first * sin[None, :]
        tl.store(out_at + HALF, rounded(turned, q_out_ptr.dtype.element_ty), mask=live)
        turned = k_first * cos - k_second * sin
        k_second = k_second * cos + k_first * sin
        k_first = turned
    if HAS_SCALES:
        k_scale, v_scale = tl.load(scales_ptr + head), tl.load(scales_ptr + kv_heads + head)
        k_first, k_second = k_first / k_scale, k_second / k_scale
        v_first, v_second = v_first / v_scale, v_second / v_scale
    slot = tl.load(slots_ptr + token).to(tl.int64)
    stored = halves < tl.where(slot >= 0, HALF, 0)
    at = slot // BLOCK_SIZE * stride_block + head * stride_head + slot % BLOCK_SIZE * stride_token + halves
    tl.store(keys_ptr + at, rounded(k_first, keys_ptr.dtype.element_ty), mask=stored)
    tl.store(keys_ptr + at + HALF, rounded(k_second, keys_ptr.dtype.element_ty), mask=stored)
    tl.store(values_ptr + at, rounded(v_first, values_ptr.dtype.element_ty), mask=stored)
    tl.store(values_ptr + at + HALF, rounded(v_second, values_ptr.dtype.element_ty), mask=stored)


def cache_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    kv: PagedKV,
    q: torch.Tensor | None = None,
    angles: Angles | None = None,
    q_out: torch.Tensor | None = None,
) -> None:
    """k, v [T, kv heads, dim] → slots [T] (block * block_size + offset; below 0: none) of kv.

    With angles, k is rotated on its way and q [T, heads, dim] into q_out (which may be q); without, neither is given.
    dim is contiguous everywhere. ValueError where one of q, angles and q_out is missing or shapes differ.
    """
    count, kv_heads, dim = k.shape
    if len({q is None, angles is None, q_out is None}) > 1 or dim % 2 or kv.keys.shape[3] != dim:
        raise ValueError(f"q, angles and q_out come together, and dim {dim} is even and the cache's")
    if v.shape != k.shape or slots.shape != (count,) or any(x.stride(-1) != 1 for x in (k, v, *(angles or ()))):
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}; dim must be contiguous")
    if (kv.keys.dtype == torch.float8_e4m3fn) != (kv.scales is not None):
        raise ValueError("FP8 KV has scales and other KV has none")
    if kv.keys.shape[1] != kv_heads:
        raise ValueError(f"k of {kv_heads} heads into a cache of {kv.keys.shape[1]}")
    if q is not None and (q.shape[0] != count or q.shape[1] % kv_heads or q.shape[2] != dim or q.stride(2) != 1):
        raise ValueError(f"q {tuple(q.shape)} with strides {q.stride()} beside k {tuple(k.shape)}")
    if q_out is not None and (q_out.shape != q.shape or q_out.stride(2) != 1):
        raise ValueError(f"q_out {tuple(q_out.shape)} with strides {q_out.stride()} is not q's {tuple(q.shape)}")
    if angles and (angles.cos.shape != (count, dim // 2) or angles.cos.stride() != angles.sin.stride()):
        raise ValueError(f"cos {tuple(angles.cos.shape)} is not {(count, dim // 2)}, or sin has other strides")
    if count == 0:
        return
    query = k if q is None else q
    target = query if q_out is None else q_out
    cos, sin = angles or (k, k)
    group = query.shape[1] // kv_heads
    cache_write_kernel[(count, kv_heads)](
        query,
        k,
        v,
        cos,
        sin,
        slots,
        slots if kv.scales is None else kv.scales,
        target,
        kv.keys,
        kv.values,
        kv_heads,
        *query.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos.stride(0),
        *target.stride()[:2],
        *kv.strides,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        HALF=dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=kv.block_size,
        ROTATE=angles is not None,
        HAS_SCALES=kv.scales is not None,
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=True,
    )


def _variant(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, rotate: bool) -> Variant:
    query = f"*{TRITON_TYPES[dtype]}"
    stored = f"*{TRITON_TYPES[kv_dtype]}"
    strides = [f"stride_{name}" for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "angle")]
    strides += [f"stride_{name}" for name in ("out_token", "out_head", "block", "head", "token")]
    return Variant(
        kernel=cache_write_kernel,
        label=f"{query[1:]} kv {stored[1:]} dim {dim}{' rope' * rotate}",
        signature={
            **{f"{name}_ptr": query for name in ("q", "k", "v", "cos", "sin", "q_out")},
            "slots_ptr": "*i64",
            "scales_ptr": "*fp32",
            "keys_ptr": stored,
            "values_ptr": stored,
            "kv_heads": "i32",
            **dict.fromkeys(strides, "i64"),
        },
        constexprs={
            "GROUP": 4 if rotate else 1,  # without rope q is not touched
            "GROUP_PAD": 4 if rotate else 1,
            "HALF": dim // 2,
            "HALF_PAD": triton.next_power_of_2(dim // 2),
            "BLOCK_SIZE": 16,
            "ROTATE": rotate,
            "HAS_SCALES": kv_dtype == torch.float8_e4m3fn,
        },
        num_warps=1,
        num_stages=1,
        aligned=tuple(strides),
    )


VARIANTS = [
    _variant(torch.bfloat16, torch.bfloat16, 128, False),
    _variant(torch.bfloat16, torch.float8_e4m3fn, 128, True),
]

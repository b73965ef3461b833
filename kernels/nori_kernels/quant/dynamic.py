"""Activations → int8 or E4M3 before a product: one scale a row, one for every 128 columns, or one that is given."""

import torch
import triton
import triton.language as tl

from nori_kernels.quantized_rows import LIMITS, limit_of, quantize_reference, quantized, scale_of
from nori_kernels.targets import WITHOUT_FP8
from nori_kernels.variant import Variant

BLOCK = 1024
GROUP = 128  # columns of one scale in block-scaled FP8


def quantize_rows_reference(
    x: torch.Tensor, dtype: torch.dtype, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, width] → q, and float64 scales [n] or [n, width / group]."""
    if group is None:
        return quantize_reference(x, dtype)
    q, scale = quantize_reference(x.unflatten(1, (-1, group)), dtype)
    return q.flatten(1), scale


def quantize_static_reference(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = (x.double() / scale.double()).clamp(-LIMITS[dtype], LIMITS[dtype])
    return (y.round() if dtype == torch.int8 else y.float()).to(dtype)


@triton.jit
def quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, out_stride, width, groups, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, group): its `width` columns, once for the largest magnitude and once more to quantize."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = x_ptr + row * x_stride + group * width
    out = out_ptr + row * out_stride + group * width
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)))
    step = scale_of(tl.max(largest, axis=0), LIMIT)
    tl.store(scale_ptr + row * groups + group, step)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32) / step
        tl.store(out + columns, quantized(y, out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def quantize_static_kernel(x_ptr, out_ptr, scale_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    y = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) / tl.load(scale_ptr)
    tl.store(out_ptr + row * out_stride + columns, quantized(y, out_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, width] → q [n, width] of int8 or float8_e4m3fn, and float32 scales [n], or [n, width / group]."""
    rows, width = x.shape
    if x.stride(1) != 1 or (group is not None and width % group):
        raise ValueError(f"rows must be contiguous and whole groups of {group}, not {tuple(x.shape)}")
    limit, groups = limit_of(dtype), 1 if group is None else width // group
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    scale = torch.empty((rows,) if group is None else (rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        block = BLOCK if group is None else triton.next_power_of_2(group)
        quantize_rows_kernel[(rows, groups)](
            x,
            out,
            scale,
            x.stride(0),
            out.stride(0),
            width // groups,
            groups,
            LIMIT=limit,
            BLOCK=block,
            num_warps=4 if block > 128 else 1,
            enable_fp_fusion=True,
        )
    return out, scale


def quantize_static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [n, width], scale float32 [1] → q [n, width]; what lies beyond the limits saturates."""
    rows, width = x.shape
    limit_of(dtype)
    if x.stride(1) != 1 or scale.numel() != 1:
        raise ValueError("rows must be contiguous and the scale one number")
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if rows:
        quantize_static_kernel[(rows, triton.cdiv(width, BLOCK))](
            x, out, scale, x.stride(0), out.stride(0), width, BLOCK=BLOCK, enable_fp_fusion=True
        )
    return out


def _signature(out: str) -> dict[str, str]:
    """What both kernels take."""
    pointers = {"x_ptr": "*bf16", "out_ptr": f"*{out}", "scale_ptr": "*fp32"}
    return {**pointers, "x_stride": "i64", "out_stride": "i64", "width": "i32"}


def _rows(out: str, block: int, targets: tuple[str, ...] = ()) -> Variant:
    return Variant(
        kernel=quantize_rows_kernel,
        label=f"bf16 to {out} block {block}",
        signature={**_signature(out), "groups": "i32"},
        constexprs={"LIMIT": 127.0 if out == "i8" else 448.0, "BLOCK": block},
        num_warps=4 if block > 128 else 1,
        aligned=("x_stride", "out_stride", "width"),
        targets=targets,
    )


def _static(out: str, targets: tuple[str, ...] = ()) -> Variant:
    return Variant(
        kernel=quantize_static_kernel,
        label=f"bf16 to {out}",
        signature=_signature(out),
        constexprs={"BLOCK": BLOCK},
        aligned=("x_stride", "out_stride", "width"),
        targets=targets,
    )


VARIANTS = [
    _rows("fp8e4nv", BLOCK),
    _rows("fp8e4nv", GROUP),
    _rows("i8", BLOCK, WITHOUT_FP8),
    _static("fp8e4nv"),
    _static("i8", WITHOUT_FP8),
]

"""RMSNorm, with the residual sum before it and quantization behind it in the same launch.

One program a row, so a row's bits depend on nothing else. Statistics and products are float32; the result is rounded
once (the plain layer rounds before it multiplies by the weight: at most one more unit in the last place).
"""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import rounded
from nori_kernels.quantized_rows import limit_of, quantize_reference, quantized, scale_of
from nori_kernels.require import require
from nori_kernels.variant import Variant

MAX_HIDDEN = 16384  # a row is held in registers


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """float64: norm of x (+ residual) [n, hidden], and the sum where a residual is given."""
    wide = x.double()
    total = None
    if residual is not None:
        total = wide + residual.double()
        wide = total.to(residual.dtype).double()  # what later layers see is what is normed
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.double(), total


def rms_norm_quantized_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_reference(rms_norm_reference(x, weight, eps, residual)[0], dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    out_stride,
    hidden,
    eps,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Row pid of x [n, hidden]; residual += x in place; out [n, hidden]; scale float32 [n] when quantizing."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        place = residual_ptr + row * residual_stride + columns
        total = rounded(x + tl.load(place, mask=inside, other=0.0).to(tl.float32), residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    y = x * scale * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        step = scale_of(tl.max(tl.abs(y), axis=0), LIMIT)
        tl.store(scale_ptr + row, step)
        y = quantized(y / step, out_ptr.dtype.element_ty)
    else:
        y = rounded(y, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, y, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, hidden], weight [hidden] → [n, hidden]. A residual [n, hidden] becomes residual + x, which is normed."""
    out = torch.empty_like(x) if out is None else out
    _launch(x, weight, eps, residual, out, None)
    return out


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As rms_norm, quantized by row: int8 or float8_e4m3fn [n, hidden] and float32 scales [n]."""
    if out is None:
        out = torch.empty_like(x, dtype=dtype), torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(x, weight, eps, residual, *out)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden {hidden} exceeds {MAX_HIDDEN}")
    require("x", x, (rows, hidden))
    require("weight", weight, (hidden,))
    require("out", out, (rows, hidden))
    if residual is not None:
        require("residual", residual, (rows, hidden))
    if scale is not None:
        require("scale", scale, (rows,), torch.float32)
    if not rows:
        return
    block = triton.next_power_of_2(hidden)
    rms_norm_kernel[(rows,)](
        x,
        weight,
        x if residual is None else residual,
        out,
        x if scale is None else scale,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        hidden,
        eps,
        LIMIT=1.0 if scale is None else limit_of(out.dtype),
        BLOCK=block,
        RESIDUAL=residual is not None,
        QUANTIZE=scale is not None,
        num_warps=warps_for(block),
    )


def warps_for(block: int) -> int:
    """Warps for one program that holds `block` elements: about 16 elements a thread, 1 to 16 warps."""
    return min(16, max(1, block // 512))


def _variant(dtype: str, hidden: int, out: str, residual: bool) -> Variant:
    quantize = out != dtype
    block = triton.next_power_of_2(hidden)
    return Variant(
        kernel=rms_norm_kernel,
        label=f"{dtype} to {out} hidden {hidden}{' residual' if residual else ''}",
        signature={
            "x_ptr": f"*{dtype}",
            "weight_ptr": f"*{dtype}",
            "residual_ptr": f"*{dtype}",
            "out_ptr": f"*{out}",
            "scale_ptr": "*fp32",
            "x_stride": "i64",
            "residual_stride": "i64",
            "out_stride": "i64",
            "hidden": "i32",
            "eps": "fp32",
        },
        constexprs={
            "LIMIT": {"i8": 127.0, "fp8e4nv": 448.0}.get(out, 1.0),
            "BLOCK": block,
            "RESIDUAL": residual,
            "QUANTIZE": quantize,
        },
        num_warps=warps_for(block),
        aligned=("x_stride", "residual_stride", "out_stride"),
    )


VARIANTS = [
    _variant("bf16", 4096, "bf16", True),
    _variant("bf16", 4096, "fp8e4nv", True),
]

"""Gated activations of the feed-forward block: act(gate) · up, and the same quantized by row.

gate and up are the halves of each row, as the merged gate|up product leaves them. Element-wise, in float32.
"""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import rounded
from nori_kernels.quantized_rows import limit_of, quantize_reference, quantized, scale_of
from nori_kernels.require import require
from nori_kernels.targets import WITHOUT_FP8
from nori_kernels.variant import Variant

KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # gelu: by erf; gelu_tanh: the approximation many checkpoints name
BLOCK = 1024


def gated_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """float64: x [n, 2 · inner] → [n, inner]."""
    gate, up = x.double().chunk(2, dim=-1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def gated_quantized_reference(x: torch.Tensor, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_reference(gated_reference(x, kind), dtype)


@triton.jit
def gated_tile(gate_ptr, up_ptr, columns, inner, KIND: tl.constexpr):
    """float32 act(gate) · up of these columns of one row; 0 past inner."""
    inside = columns < inner
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        u = gate
        if KIND == 2:  # 0.5 · (1 + tanh(v)) = sigmoid(2 v)
            u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        small = tl.exp(-tl.abs(u))  # at most 1, so nothing overflows
        active = gate * tl.where(u >= 0, 1.0, small) / (1.0 + small)
    return active * up


@triton.jit
def gated_kernel(x_ptr, out_ptr, x_stride, out_stride, inner, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = x_ptr + row * x_stride
    y = gated_tile(x, x + inner, columns, inner, KIND)
    tl.store(out_ptr + row * out_stride + columns, rounded(y, out_ptr.dtype.element_ty), mask=columns < inner)


@triton.jit
def gated_quantized_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    out_stride,
    inner,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: once for the largest magnitude, once more (from the cache) to quantize."""
    row = tl.program_id(0).to(tl.int64)
    x = x_ptr + row * x_stride
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        y = gated_tile(x, x + inner, start + tl.arange(0, BLOCK), inner, KIND)
        largest = tl.maximum(largest, tl.abs(y))
    step = scale_of(tl.max(largest, axis=0), LIMIT)
    tl.store(scale_ptr + row, step)
    for start in range(0, inner, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = gated_tile(x, x + inner, columns, inner, KIND) / step
        tl.store(out_ptr + row * out_stride + columns, quantized(y, out_ptr.dtype.element_ty), mask=columns < inner)


def gated(x: torch.Tensor, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, 2 · inner], gate first → act(gate) · up [n, inner]; kind: a key of KINDS."""
    rows, inner = _shape(x, kind)
    out = x.new_empty(rows, inner) if out is None else out
    require("out", out, (rows, inner))
    if rows:
        gated_kernel[(rows, triton.cdiv(inner, BLOCK))](
            x, out, x.stride(0), out.stride(0), inner, KIND=KINDS[kind], BLOCK=BLOCK
        )
    return out


def gated_quantized(
    x: torch.Tensor, kind: str, dtype: torch.dtype, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As gated, quantized by row: int8 or float8_e4m3fn [n, inner] and float32 scales [n]."""
    rows, inner = _shape(x, kind)
    limit = limit_of(dtype)
    if out is None:
        out = x.new_empty(rows, inner, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    require("out", out[0], (rows, inner), dtype)
    require("scale", out[1], (rows,), torch.float32)
    if rows:
        gated_quantized_kernel[(rows,)](
            x,
            out[0],
            out[1],
            x.stride(0),
            out[0].stride(0),
            inner,
            LIMIT=limit,
            KIND=KINDS[kind],
            BLOCK=BLOCK,
        )
    return out


def _shape(x: torch.Tensor, kind: str) -> tuple[int, int]:
    """(n, inner) of x."""
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r} is none of {', '.join(KINDS)}")
    if x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"rows must be contiguous and of even width, not {tuple(x.shape)}")
    return x.shape[0], x.shape[1] // 2


def _variant(kind: str, out: str, targets: tuple[str, ...] = ()) -> Variant:
    quantize = out != "bf16"
    strides = {"x_stride": "i64", "out_stride": "i64", "inner": "i32"}
    scale = {"scale_ptr": "*fp32"} if quantize else {}
    return Variant(
        kernel=gated_quantized_kernel if quantize else gated_kernel,
        label=f"{kind} to {out}",
        signature={"x_ptr": "*bf16", "out_ptr": f"*{out}", **scale, **strides},
        constexprs={
            "KIND": KINDS[kind],
            "BLOCK": BLOCK,
            **({"LIMIT": 127.0 if out == "i8" else 448.0} if quantize else {}),
        },
        aligned=("x_stride", "out_stride", "inner"),
        targets=targets,
    )


VARIANTS = [_variant("silu", "bf16"), _variant("silu", "fp8e4nv"), _variant("silu", "i8", WITHOUT_FP8)]

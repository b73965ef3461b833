"""Token embedding of one rank's share of the vocabulary: other ranks' ids give zeros, for the sum over ranks."""

import torch
import triton
import triton.language as tl

from nori_kernels.require import require
from nori_kernels.variant import Variant

BLOCK = 1024


def embed_reference(ids: torch.Tensor, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
    local = ids - first
    foreign = (local < 0) | (local >= len(weight))
    return weight[local.masked_fill(foreign, 0)].masked_fill(foreign[:, None], 0)


@triton.jit
def embed_kernel(ids_ptr, weight_ptr, out_ptr, weight_stride, out_stride, first, rows, hidden, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    local = tl.load(ids_ptr + token + columns * 0).to(tl.int64) - first  # one id, as wide as the mask
    own = (local >= 0) & (local < rows)
    values = tl.load(weight_ptr + local * weight_stride + columns, mask=inside & own, other=0.0)
    tl.store(out_ptr + token * out_stride + columns, values, mask=inside)


def embed(ids: torch.Tensor, weight: torch.Tensor, first: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """ids int64 or int32 [T], weight [rows, hidden] of the ids first : first + rows → [T, hidden]."""
    rows, hidden = weight.shape
    out = weight.new_empty(len(ids), hidden) if out is None else out
    require("ids", ids, (len(ids),), torch.int64, torch.int32)
    require("weight", weight, (rows, hidden))
    require("out", out, (len(ids), hidden), weight.dtype)
    if len(ids):
        embed_kernel[(len(ids), triton.cdiv(hidden, BLOCK))](
            ids, weight, out, weight.stride(0), out.stride(0), first, rows, hidden, BLOCK=BLOCK
        )
    return out


VARIANTS = [
    Variant(
        kernel=embed_kernel,
        label="bf16",
        signature={
            "ids_ptr": "*i64",
            "weight_ptr": "*bf16",
            "out_ptr": "*bf16",
            "weight_stride": "i64",
            "out_stride": "i64",
            "first": "i32",
            "rows": "i32",
            "hidden": "i32",
        },
        constexprs={"BLOCK": BLOCK},
        aligned=("weight_stride", "out_stride"),
    )
]

"""Merge what the splits of each sequence gave, weighted by their log-sum-exp; the sink, if any, joins here once."""

import torch
import triton
import triton.language as tl

from nori_kernels.casts import rounded
from nori_kernels.variant import Variant


def merge_splits_reference(
    parts: torch.Tensor, lse: torch.Tensor, starts: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """parts [S, heads, dim], lse [S, heads]; row r owns splits starts[r] : starts[r + 1]. float64 [R, heads, dim]."""
    rows = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        logs = lse[first:last].double()
        total = logs if sinks is None else torch.cat([logs, sinks.double()[None]])
        weights = torch.exp(logs - torch.logsumexp(total, 0)).nan_to_num()
        rows.append((weights[..., None] * parts[first:last].double()).sum(0))
    return torch.stack(rows) if rows else parts.double()[:0]


@triton.jit
def merge_splits_kernel(
    parts_ptr,
    lse_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    rows_ptr,
    heads,
    stride_out_row,
    stride_out_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (row, head): out[rows[row], head]. One pass in the order of splits, so the bits depend on it alone."""
    row, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    dims = tl.arange(0, DIM_PAD)
    acc = tl.zeros([DIM_PAD], tl.float32)
    top = -float("inf")
    total = 0.0
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32)
        total = 1.0
    for split in range(first, last):
        place = tl.cast(split, tl.int64) * heads + head
        log = tl.load(lse_ptr + place)
        part = tl.load(parts_ptr + place * DIM + dims, mask=dims < DIM, other=0.0)
        larger = tl.maximum(top, log)
        safe = tl.where(larger == -float("inf"), 0.0, larger)  # nothing seen yet
        kept, weight = tl.exp(top - safe), tl.exp(log - safe)
        acc = acc * kept + part * weight
        total = total * kept + weight
        top = larger
    result = acc / tl.where(total == 0.0, 1.0, total)
    place = tl.load(rows_ptr + row).to(tl.int64) * stride_out_row + head * stride_out_head
    tl.store(out_ptr + place + dims, rounded(result, out_ptr.dtype.element_ty), mask=dims < DIM)


def merge_splits(
    parts: torch.Tensor,
    lse: torch.Tensor,
    starts: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """parts float32 [S, heads, dim] and lse float32 [S, heads] → out[rows[r]] for each r; starts int32 [R + 1].

    rows: int32 [R], which row of out [T, heads, dim] (dim contiguous) is written. A row without splits gets zeros.
    """
    _, heads, dim = parts.shape
    if len(rows) == 0:
        return
    merge_splits_kernel[(len(rows), heads)](
        parts,
        lse,
        starts,
        parts if sinks is None else sinks,
        out,
        rows,
        heads,
        out.stride(0),
        out.stride(1),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        HAS_SINKS=sinks is not None,
        num_warps=2,
        num_stages=2,
        enable_fp_fusion=True,
    )


def _variant(dtype: str, dim: int, sinks: bool) -> Variant:
    return Variant(
        kernel=merge_splits_kernel,
        label=f"{dtype} dim {dim}{' sinks' if sinks else ''}",
        signature={
            "parts_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "starts_ptr": "*i32",
            "sinks_ptr": "*fp32",
            "out_ptr": f"*{dtype}",
            "rows_ptr": "*i32",
            "heads": "i32",
            "stride_out_row": "i64",
            "stride_out_head": "i64",
        },
        constexprs={"DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "HAS_SINKS": sinks},
        num_warps=2,
        num_stages=2,
        aligned=("stride_out_row", "stride_out_head"),
    )


VARIANTS = [_variant("bf16", 128, False)]

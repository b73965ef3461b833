"""Log-probabilities of chosen ids and of the n likeliest, best first and equal ones by id, without a sort.

One program a row. Each of the n is found by one pass over the row for what stands next in the order (score, then id).
"""

import torch
import triton
import triton.language as tl

from nori_kernels.require import require
from nori_kernels.variant import Variant

WARPS = 8


def logprobs_reference(
    logits: torch.Tensor, ids: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 [P], int64 [P, most], float64 [P, most]; see logprobs."""
    table = torch.log_softmax(logits.double(), dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a row of -inf
    order = table.sort(dim=-1, descending=True, stable=True)
    chosen = table.gather(1, ids.long()[:, None]).squeeze(1).clamp_min(-1e30)
    top_ids = order.indices[:, :most].masked_fill(order.values[:, :most] == -torch.inf, -1)
    pad = (0, most - top_ids.shape[1])
    top = torch.nn.functional.pad(order.values[:, :most], pad, value=-torch.inf)
    return chosen, torch.nn.functional.pad(top_ids, pad, value=-1), top


@triton.jit
def logprobs_kernel(
    logits_ptr,
    ids_ptr,
    chosen_ptr,
    top_ids_ptr,
    top_ptr,
    logits_stride,
    top_stride,
    vocab,
    most,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32))
    best = tl.max(top, axis=0)
    best = tl.where(best == -float("inf"), 0.0, best)  # a row of -inf alone
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        score = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        total += tl.exp(score - best).to(tl.float64)
    total = tl.sum(total, axis=0)
    lse = best.to(tl.float64) + tl.log(tl.where(total > 0, total, 1.0))
    own = tl.load(row_ptr + tl.load(ids_ptr + row)).to(tl.float64) - lse
    tl.store(chosen_ptr + row, tl.maximum(own, -1e30).to(tl.float32))
    last_score, last_id = float("inf"), -1
    for place in range(0, most):
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        where = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            score = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            later = (score < last_score) | ((score == last_score) & (ids > last_id))
            where = tl.where(later & (score > top), ids, where)
            top = tl.where(later & (score > top), score, top)
        last_score = tl.max(top, axis=0)
        last_id = tl.min(tl.where(top == last_score, where, 2147483647), axis=0)
        found = last_score > -float("inf")
        tl.store(top_ids_ptr + row * top_stride + place, tl.where(found, last_id, -1))
        tl.store(top_ptr + row * top_stride + place, (last_score.to(tl.float64) - lse).to(tl.float32))


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, most: int, block: int = 1024
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [P, vocab], finite or -inf; ids int32 [P] → log-softmax of ids, the `most` likeliest ids, and theirs.

    float32 [P] (at least -1e30), int32 [P, most], float32 [P, most]; where fewer ids are possible, as in a row of
    -inf alone: -1 and -inf.
    """
    rows, vocab = logits.shape
    require("logits", logits, (rows, vocab))
    require("ids", ids, (rows,), torch.int32)
    device = logits.device
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(rows, most, dtype=torch.int32, device=device)
    top = torch.empty(rows, most, dtype=torch.float32, device=device)
    if rows:
        logprobs_kernel[(rows,)](
            logits,
            ids,
            chosen,
            top_ids,
            top,
            logits.stride(0),
            top.stride(0),
            vocab,
            most,
            BLOCK=block,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return chosen, top_ids, top


VARIANTS = [
    Variant(
        kernel=logprobs_kernel,
        label="1024 ids",
        signature={
            "logits_ptr": "*fp32",
            "ids_ptr": "*i32",
            "chosen_ptr": "*fp32",
            "top_ids_ptr": "*i32",
            "top_ptr": "*fp32",
            "logits_stride": "i64",
            "top_stride": "i64",
            "vocab": "i32",
            "most": "i32",
        },
        constexprs={"BLOCK": 1024},
        num_warps=WARPS,
        aligned=("logits_stride",),
    )
]

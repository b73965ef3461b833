"""Logits → token ids on the device, the same ids as the CPU sampler's: edit_scores, then choose, both a row at a time.

choose never sorts: thresholds of top_k and top_p are found by bisecting the bits of a score, which order like the
scores themselves; the draw is the CPU sampler's Gumbel-max in two levels, over blocks of 64 ids and inside one.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from nori_kernels.philox import philox_reference, words_at
from nori_kernels.require import require
from nori_kernels.variant import Variant

GROUP = tl.constexpr(64)  # ids of one block of the draw; part of the meaning of a seed
BITS = 2  # of a score that one pass over the vocabulary settles
SIXTY_FOUR_BITS = ("seed", "candidate", "index")  # of SamplingRows
WARPS = 16  # of one row: with 8 Triton 3.6 spills on every target, 3.9 with 4 on sm_90


class SamplingRows(NamedTuple):
    """Of P rows, all on the device. float32: temperature (0 = greedy), top_p, min_p. int32: top_k (0 = all).

    int64: seed (64 bits), candidate and index (below 2^32; index counts the row's output tokens).
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    candidate: torch.Tensor
    index: torch.Tensor


class Seen(NamedTuple):
    """counts int32 and prompt bool [C, vocab]; row int32 [P]: which of them, -1 = none; float32 [P] penalties."""

    counts: torch.Tensor
    prompt: torch.Tensor
    row: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


class Bitmask(NamedTuple):
    """words int32 [M, w]: bit b of word i is id 32 i + b, ids past them are hidden; row int32 [P], -1 = none."""

    words: torch.Tensor
    row: torch.Tensor


def edit_scores_reference(
    logits: torch.Tensor, seen: Seen | None = None, bitmask: Bitmask | None = None, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [P, vocab]: hidden ids are -inf."""
    scores = torch.nan_to_num(logits.double(), nan=-1e30, posinf=1e30, neginf=-1e30)
    ids = torch.arange(logits.shape[1])
    for row in range(len(scores)):
        if seen is not None and (own := int(seen.row[row])) >= 0:
            counts, score, factor = seen.counts[own], scores[row], seen.repetition[row].double()
            scaled = torch.where(score > 0, score / factor, score * factor)
            score = torch.where((counts > 0) | seen.prompt[own], scaled, score)
            score = score - seen.frequency[row].double() * counts
            scores[row] = score - seen.presence[row].double() * (counts > 0)
        if bitmask is not None and (own := int(bitmask.row[row])) >= 0:
            words = torch.nn.functional.pad(bitmask.words[own].long(), (0, len(ids) // 32 + 1))
            scores[row, (words[ids // 32] >> (ids % 32)) & 1 == 0] = -torch.inf
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


@triton.jit
def edit_scores_kernel(
    logits_ptr,
    scores_ptr,
    allowed_ptr,
    words_ptr,
    words_row_ptr,
    counts_ptr,
    prompt_ptr,
    seen_row_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    logits_stride,
    scores_stride,
    words_stride,
    seen_stride,
    vocab,
    words,
    ALLOWED: tl.constexpr,
    MASKED: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, tile of ids): no NaN, penalties, then what is hidden becomes -inf."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    score = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    score = tl.where(score != score, -1e30, score)
    score = tl.where(score == float("inf"), 1e30, tl.where(score == -float("inf"), -1e30, score))
    if SEEN:
        own = tl.load(seen_row_ptr + row)
        if own >= 0:
            place = own.to(tl.int64) * seen_stride + ids
            counts = tl.load(counts_ptr + place, mask=inside, other=0)
            prompt = tl.load(prompt_ptr + place, mask=inside, other=0).to(tl.int32)
            factor = tl.load(repetition_ptr + row)
            scaled = tl.where(score > 0, tl.div_rn(score, factor), score * factor)
            score = tl.where((counts > 0) | (prompt != 0), scaled, score)
            score = score - tl.load(frequency_ptr + row) * counts.to(tl.float32)
            score = score - tl.where(counts > 0, tl.load(presence_ptr + row), 0.0)
    if MASKED:
        own = tl.load(words_row_ptr + row)
        if own >= 0:
            place = words_ptr + own.to(tl.int64) * words_stride + ids // 32
            word = tl.load(place, mask=ids // 32 < words, other=0)
            score = tl.where((word >> (ids % 32)) & 1 != 0, score, -float("inf"))
    if ALLOWED:
        score = tl.where(tl.load(allowed_ptr + ids, mask=inside, other=0).to(tl.int32) != 0, score, -float("inf"))
    tl.store(scores_ptr + row * scores_stride + ids, score, mask=inside)


def choose_reference(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """float64 twin of choose, by sorting: ids int64 [P]."""
    result = scores.argmax(dim=-1)
    for row in torch.nonzero((rows.temperature > 0) & (rows.top_k != 1)).flatten().tolist():
        scaled = (scores[row].double() - scores[row].max().double()) / rows.temperature[row].double()
        scaled[scaled < torch.log(rows.min_p[row].double())] = -torch.inf
        if 0 < (k := int(rows.top_k[row])) < len(scaled):
            scaled[scaled < scaled.topk(k).values[-1]] = -torch.inf
        if (p := float(rows.top_p[row])) < 1.0:
            order = scaled.sort(descending=True).values
            sums = order.exp().cumsum(0)
            scaled[scaled < order[int((sums < p * sums[-1]).sum())]] = -torch.inf
        groups = torch.nn.functional.pad(scaled, (0, -len(scaled) % 64), value=-torch.inf).view(-1, 64)
        group = int((groups.exp().sum(1).log() + _noise_reference(rows, row, 0, len(groups))).argmax())
        result[row] = group * 64 + int((groups[group] + _noise_reference(rows, row, 1, 64)).argmax())
    return result


def _noise_reference(rows: SamplingRows, row: int, level: int, count: int) -> torch.Tensor:
    """float64 [count] Gumbel noise."""
    one = [np.array([int(v[row]) & (2**64 - 1)], np.uint64) for v in (rows.index, rows.candidate, rows.seed)]
    word = np.arange(-(-count // 4), dtype=np.uint64)
    words = philox_reference((word, one[0], one[1], np.array([level], np.uint64)), one[2]).reshape(-1)[:count]
    return -torch.log(-torch.log((torch.from_numpy(words.astype(np.float64)) + 0.5) * 2.0**-32))


@triton.jit
def scaled_scores(row_ptr, ids, vocab, best, temperature):
    """(score - best) / temperature, at most 0; -inf past the vocabulary."""
    score = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
    return tl.div_rn(score - best, temperature)


@triton.jit
def score_key(scaled):
    """uint32 that grows as a score (at most 0) falls; the bits of its magnitude."""
    return tl.abs(scaled).to(tl.uint32, bitcast=True)


@triton.jit
def reach(
    row_ptr, vocab, best, temperature, ceiling, need, MASS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Least key such that ids up to it (and to `ceiling`) are `need` many, or have `need` of exp(scaled) in sum."""
    choices = tl.arange(0, 1 << BITS).to(tl.uint32)
    prefix = tl.full([], 0, tl.uint32)
    for step in range(0, 32, BITS):
        shift = tl.cast(32 - BITS - step, tl.uint32)
        below = (tl.full([], 1, tl.uint32) << shift) - 1
        ends = prefix + (choices << shift) + below
        sums = tl.zeros([1 << BITS], tl.float64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            scaled = scaled_scores(row_ptr, ids, vocab, best, temperature)
            key = score_key(scaled)
            part = tl.where((key <= ceiling) & (ids < vocab), tl.exp(scaled) if MASS else 1.0, 0.0)
            sums += tl.sum(tl.where(key[:, None] <= ends[None, :], part[:, None], 0.0), axis=0).to(tl.float64)
        passed = tl.minimum(tl.sum((sums < need).to(tl.int32), axis=0), (1 << BITS) - 1)
        prefix += passed.to(tl.uint32) << shift
    return prefix


@triton.jit
def mass(row_ptr, vocab, best, temperature, ceiling, BLOCK: tl.constexpr):
    """float64 sum of exp(scaled) over ids with keys up to `ceiling`."""
    total = tl.zeros([1], tl.float64)
    for start in range(0, vocab, BLOCK):
        scaled = scaled_scores(row_ptr, start + tl.arange(0, BLOCK), vocab, best, temperature)
        part = tl.where(score_key(scaled) <= ceiling, tl.exp(scaled), 0.0)
        total += tl.sum(part, axis=0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def gumbel(word):
    """Standard Gumbel noise, float64, of uniform uint32 words."""
    return -tl.log(-tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def draw(row_ptr, vocab, best, temperature, ceiling, seed, index, candidate, BLOCK: tl.constexpr):
    """An id from softmax(scaled) of the ids with keys up to `ceiling`."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    inside = tl.arange(0, GROUP)
    level = tl.full([], 0, tl.uint32)
    top = tl.full([GROUPS], -float("inf"), tl.float64)
    where = tl.zeros([GROUPS], tl.int32)
    for start in range(0, vocab, BLOCK):
        group = start // GROUP + tl.arange(0, GROUPS)
        scaled = scaled_scores(row_ptr, group[:, None] * GROUP + inside[None, :], vocab, best, temperature)
        total = tl.sum(tl.where(score_key(scaled) <= ceiling, tl.exp(scaled), 0.0), axis=1).to(tl.float64)
        score = tl.log(tl.where(total > 0, total, 1.0)) + gumbel(words_at(group, index, candidate, level, seed))
        score = tl.where(total > 0, score, -float("inf"))
        where = tl.where(score > top, group, where)
        top = tl.maximum(score, top)
    group = tl.min(tl.where(top == tl.max(top, axis=0), where, 2147483647), axis=0)
    scaled = scaled_scores(row_ptr, group * GROUP + inside, vocab, best, temperature)
    score = scaled.to(tl.float64) + gumbel(words_at(inside, index, candidate, level + 1, seed))
    score = tl.where(score_key(scaled) <= ceiling, score, -float("inf"))
    place = tl.min(tl.where(score == tl.max(score, axis=0), inside, GROUP), axis=0)
    return group * GROUP + place


@triton.jit
def choose_kernel(
    scores_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    floor_ptr,
    seed_ptr,
    candidate_ptr,
    index_ptr,
    ids_ptr,
    dead_ptr,
    scores_stride,
    vocab,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the likeliest id; where the row is drawn, what min_p, top_k and top_p leave, and an id of it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * scores_stride
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        score = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        where = tl.where(score > top, ids, where)
        top = tl.maximum(score, top)
    best = tl.max(top, axis=0)
    chosen = tl.min(tl.where(top == best, where, 2147483647), axis=0)
    dead = best == -float("inf")
    tl.store(dead_ptr + row, dead.to(tl.int8))
    best = tl.where(dead, 0.0, best)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    tl.store(ids_ptr + row, chosen)
    if (temperature > 0) & (top_k != 1):
        ceiling = score_key(tl.load(floor_ptr + row))
        if (top_k > 0) & (top_k < vocab):
            everything = tl.full([], 0xFFFFFFFF, tl.uint32)
            many = reach(row_ptr, vocab, best, temperature, everything, top_k.to(tl.float64), False, BITS, BLOCK)
            ceiling = tl.minimum(ceiling, many)
        if top_p < 1.0:
            need = top_p.to(tl.float64) * mass(row_ptr, vocab, best, temperature, ceiling, BLOCK)
            ceiling = tl.minimum(ceiling, reach(row_ptr, vocab, best, temperature, ceiling, need, True, BITS, BLOCK))
        seed = tl.load(seed_ptr + row)
        index, candidate = tl.load(index_ptr + row).to(tl.uint32), tl.load(candidate_ptr + row).to(tl.uint32)
        tl.store(ids_ptr + row, draw(row_ptr, vocab, best, temperature, ceiling, seed, index, candidate, BLOCK))


def edit_scores(
    logits: torch.Tensor,
    seen: Seen | None = None,
    bitmask: Bitmask | None = None,
    allowed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [P, vocab] of any float type → float32 scores: no NaN, penalized, hidden ids -inf.

    allowed: bool [vocab], False for ids that stand for no token. Bias is added to the logits before, by the caller.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device) if out is None else out
    require("logits", logits, (rows, vocab))
    require("out", out, (rows, vocab), torch.float32)
    if seen is not None:
        require("counts", seen.counts, (len(seen.counts), vocab), torch.int32)
        require("prompt", seen.prompt, tuple(seen.counts.shape), torch.bool)
        require("row", seen.row, (rows,), torch.int32)
        for penalty in seen[3:]:
            require("penalty", penalty, (rows,), torch.float32)
        if seen.counts.stride() != seen.prompt.stride():
            raise ValueError("counts and prompt must have equal strides")
    if bitmask is not None:
        require("words", bitmask.words, tuple(bitmask.words.shape), torch.int32)
        require("row", bitmask.row, (rows,), torch.int32)
    if allowed is not None:
        require("allowed", allowed, (vocab,), torch.bool)
    if rows:
        block = 1024
        edit_scores_kernel[(rows, triton.cdiv(vocab, block))](
            logits,
            out,
            out if allowed is None else allowed.view(torch.int8),
            *((out, out) if bitmask is None else bitmask),
            *((out,) * 6 if seen is None else (seen.counts, seen.prompt.view(torch.int8), *seen[2:])),
            logits.stride(0),
            out.stride(0),
            0 if bitmask is None else bitmask.words.stride(0),
            0 if seen is None else seen.counts.stride(0),
            vocab,
            0 if bitmask is None else bitmask.words.shape[1],
            ALLOWED=allowed is not None,
            MASKED=bitmask is not None,
            SEEN=seen is not None,
            BLOCK=block,
            enable_fp_fusion=False,  # the CPU's products and sums are rounded apart
        )
    return out


def choose(scores: torch.Tensor, rows: SamplingRows, block: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scores [P, vocab] → ids int32 [P], and int8 [P]: 1 where nothing was allowed (the id means nothing).

    block: ids of one tile, a power of two and at least 128; the result does not depend on it but for sums' last bits.
    """
    count, vocab = scores.shape
    require("scores", scores, (count, vocab), torch.float32)
    for name, values in rows._asdict().items():
        kind = torch.int32 if name == "top_k" else torch.int64 if name in SIXTY_FOUR_BITS else torch.float32
        require(name, values, (count,), kind)
    ids = torch.empty(count, dtype=torch.int32, device=scores.device)
    dead = torch.empty(count, dtype=torch.int8, device=scores.device)
    if count:
        choose_kernel[(count,)](
            scores,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            torch.log(rows.min_p),
            rows.seed,
            rows.candidate,
            rows.index,
            ids,
            dead,
            scores.stride(0),
            vocab,
            BITS=BITS,
            BLOCK=block,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return ids, dead


_EDIT_POINTERS = {
    "scores_ptr": "*fp32",
    "allowed_ptr": "*i8",
    "words_ptr": "*i32",
    "words_row_ptr": "*i32",
    "counts_ptr": "*i32",
    "prompt_ptr": "*i8",
    "seen_row_ptr": "*i32",
    "repetition_ptr": "*fp32",
    "frequency_ptr": "*fp32",
    "presence_ptr": "*fp32",
}
_CHOOSE_POINTERS = {
    "scores_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "top_p_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "floor_ptr": "*fp32",
    "seed_ptr": "*i64",
    "candidate_ptr": "*i64",
    "index_ptr": "*i64",
    "ids_ptr": "*i32",
    "dead_ptr": "*i8",
}
VARIANTS = [
    Variant(
        kernel=edit_scores_kernel,
        label="all edits",
        signature={
            "logits_ptr": "*fp32",
            **_EDIT_POINTERS,
            **dict.fromkeys(("logits_stride", "scores_stride", "words_stride", "seen_stride"), "i64"),
            "vocab": "i32",
            "words": "i32",
        },
        constexprs={"ALLOWED": True, "MASKED": True, "SEEN": True, "BLOCK": 1024},
        aligned=("logits_stride", "scores_stride", "seen_stride"),
        fp_fusion=False,
    ),
    Variant(
        kernel=choose_kernel,
        label="1024 ids",
        signature={**_CHOOSE_POINTERS, "scores_stride": "i64", "vocab": "i32"},
        constexprs={"BITS": BITS, "BLOCK": 1024},
        num_warps=WARPS,
        aligned=("scores_stride",),
        fp_fusion=False,
    ),
]

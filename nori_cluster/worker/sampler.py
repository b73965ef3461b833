"""Logits → token ids, all rows at once; each row's result is a function of its own logits, parameters and counters.

The draw is a Gumbel-max in two levels: first among blocks of 64 neighbouring ids by their log-sum-exp, then among the
ids of the winning block. That is an exact draw from softmax, needs 832 words of Philox a row instead of one per id, and
changes only where two perturbed scores are nearly equal, however the logits were rounded.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.types import StepLogprobs, pack
from nori_cluster.worker.philox import Words, gumbel, philox
from nori_cluster.worker.slots import Int32Array, SamplingColumns

BLOCK: Final = 64  # ids per block of the first level; part of the definition of a seed's meaning
NUCLEUS: Final = 1024  # likeliest ids looked at first for top_p; flat rows are sorted in full
CPU_ROWS: Final = 8  # rows drawn at once, so that their scores stay in the cache: 32 at once take four times as long
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the S rows that sample, gathered from the SlotTable."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Int32Array
    seed: Words
    candidate: NDArray[np.uint32]
    output_index: Int32Array  # absolute index of the token in the sequence's output
    logprobs: Int32Array  # -1 = off
    bias_rows: NDArray[np.int64]  # [N] row of each bias entry
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]

    @staticmethod
    def gather(columns: SamplingColumns, slots: Int32Array, output_index: Int32Array) -> "SamplingRows":
        rows: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        if columns.biases:
            for row, slot in enumerate(slots.tolist()):
                if slot in columns.biases:
                    ids.append(columns.biases[slot][0])
                    values.append(columns.biases[slot][1])
                    rows.append(np.full(len(ids[-1]), row, np.int64))
        return SamplingRows(
            temperature=columns.temperature[slots],
            top_p=columns.top_p[slots],
            top_k=columns.top_k[slots],
            seed=columns.seed[slots],
            candidate=columns.candidate[slots],
            output_index=output_index,
            logprobs=columns.logprobs[slots],
            bias_rows=np.concatenate(rows) if rows else np.zeros(0, np.int64),
            bias_ids=np.concatenate(ids) if ids else np.zeros(0, np.int64),
            bias_values=np.concatenate(values) if values else np.zeros(0, np.float32),
        )


def sample(
    logits: torch.Tensor, rows: SamplingRows, plan_rows: NDArray[np.int64], allowed: torch.Tensor | None = None
) -> tuple[Int32Array, StepLogprobs | None]:
    """float32 logits [S, vocab] → ids [S] and the logprobs asked for; plan_rows names each row in the plan.

    allowed: bool [vocab], False for ids that stand for no token. A row of NaN or infinities yields finite results.
    """
    logits = _finite(logits)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, _NEVER)
    scores = logits
    if len(rows.bias_rows):
        device = logits.device
        where = (torch.from_numpy(rows.bias_rows).to(device), torch.from_numpy(rows.bias_ids).to(device))
        scores = logits.index_put(where, torch.from_numpy(rows.bias_values).to(device), accumulate=True)
    best, ids = scores.max(dim=-1)
    drawn = np.flatnonzero((rows.temperature > 0) & (rows.top_k != 1))
    at_once = CPU_ROWS if scores.device.type == "cpu" else max(1, len(drawn))
    for first in range(0, len(drawn), at_once):
        part = drawn[first : first + at_once]
        index = torch.from_numpy(part).to(scores.device)
        ids[index] = _draw(scores[index], best[index], rows, part)
    chosen = ids.to("cpu", torch.int32).numpy()
    if (rows.logprobs < 0).all():
        return chosen, None
    return chosen, _logprobs(logits, ids, rows.logprobs, plan_rows)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """The same logits when all are finite, else NaN → never and infinities → large, row by row."""
    if bool(torch.isfinite(logits.sum(dim=-1)).all()):
        return logits
    return torch.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)


def _draw(scores: torch.Tensor, best: torch.Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> torch.Tensor:
    """Sample the rows `drawn` of the step; scores [D, vocab] (overwritten) with their maxima best [D] → ids [D]."""
    count, vocab = scores.shape
    device = scores.device
    temperature = torch.from_numpy(rows.temperature[drawn]).to(device)
    scaled = scores.sub_(best[:, None]).div_(temperature[:, None])  # at most 0, so no temperature overflows
    _keep_top_k(scaled, rows.top_k[drawn])
    _keep_top_p(scaled, rows.top_p[drawn])
    blocks = -(-vocab // BLOCK)
    if vocab % BLOCK:
        scaled = torch.nn.functional.pad(scaled, (0, blocks * BLOCK - vocab), value=_NEVER)
    padded = scaled.view(count, blocks, BLOCK)
    coarse, fine = noise(rows.seed[drawn], rows.candidate[drawn], rows.output_index[drawn], blocks)
    weight = padded.exp().sum(dim=-1).double().log()
    block = (weight + torch.from_numpy(coarse).to(device)).argmax(dim=-1)
    inside = padded[torch.arange(count, device=device), block].double() + torch.from_numpy(fine).to(device)
    return block * BLOCK + inside.argmax(dim=-1)


def noise(
    seed: Words, candidate: NDArray[np.uint32], output_index: Int32Array, blocks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gumbel noise [D, blocks] for the choice of a block and [D, BLOCK] for the choice inside it.

    Philox key: seed. Counter: (word / 4, output token index, candidate, level).
    """
    index, who, key = output_index.astype(np.uint64)[:, None], candidate.astype(np.uint64)[:, None], seed[:, None]
    inner = BLOCK // 4
    outer = -(-blocks // 4)
    words = np.concatenate([np.arange(outer, dtype=np.uint64), np.arange(inner, dtype=np.uint64)])[None, :]
    level = np.concatenate([np.zeros(outer, np.uint64), np.ones(inner, np.uint64)])[None, :]
    result = gumbel(philox((words, index, who, level), key))
    return result[:, :outer].reshape(len(seed), -1)[:, :blocks], result[:, outer:].reshape(len(seed), -1)


def _keep_top_k(scaled: torch.Tensor, top_k: Int32Array) -> None:
    """Hide all but the k likeliest ids of each row; ids equal to the k-th stay."""
    rows = np.flatnonzero((top_k > 0) & (top_k < scaled.shape[1]))
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(scaled.device)
    limits = torch.from_numpy(top_k[rows].astype(np.int64)).to(scaled.device)
    part = scaled[index]
    likeliest = part.topk(int(top_k[rows].max()), dim=-1).values
    threshold = likeliest.gather(1, limits[:, None] - 1)
    scaled[index] = part.masked_fill_(part < threshold, _NEVER)


def _keep_top_p(scaled: torch.Tensor, top_p: NDArray[np.float32]) -> None:
    """Hide all but the fewest likeliest ids whose probability reaches top_p; ids equal to the last one stay."""
    rows = np.flatnonzero(top_p < 1.0)
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(scaled.device)
    part = scaled[index]
    target = torch.from_numpy(top_p[rows].astype(np.float64)).to(scaled.device)
    target = target * part.exp().sum(dim=-1, dtype=torch.float64)
    threshold, reached = _nucleus(part.topk(min(NUCLEUS, part.shape[1]), dim=-1).values, target)
    if not bool(reached.all()):
        flat = torch.nonzero(~reached).flatten()
        threshold[flat] = _nucleus(part[flat].sort(dim=-1, descending=True).values, target[flat])[0]
    scaled[index] = part.masked_fill_(part < threshold[:, None], _NEVER)


def _nucleus(likeliest: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """likeliest [n, k], descending: the score of the id at which the sum of exp reaches target; whether it does."""
    reached = likeliest.double().exp().cumsum(dim=-1)
    place = (reached < target[:, None]).sum(dim=-1)
    last = place.clamp_max(likeliest.shape[1] - 1)
    return likeliest.gather(1, last[:, None]).squeeze(1), place < likeliest.shape[1]


def _logprobs(
    logits: torch.Tensor, ids: torch.Tensor, wanted: Int32Array, plan_rows: NDArray[np.int64]
) -> StepLogprobs:
    """Raw log-softmax of the chosen ids and of the `wanted` likeliest, best first, equal ones by id."""
    rows = np.flatnonzero(wanted >= 0)
    index = torch.from_numpy(rows).to(logits.device)
    table = torch.log_softmax(logits[index].double(), dim=-1)
    chosen = table.gather(1, ids[index, None]).squeeze(1).clamp_min(-1e30)
    most = min(int(wanted[rows].max()), table.shape[1])
    top = table.topk(most, dim=-1)
    values, top_ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    counts = np.minimum(wanted[rows], np.isfinite(values).sum(axis=1))
    order = np.lexsort((top_ids, -values), axis=1)
    keep = np.arange(most)[None, :] < counts[:, None]
    return StepLogprobs(
        rows=pack(plan_rows[rows]),
        chosen=chosen.cpu().numpy().astype("<f4").tobytes(),
        top_counts=pack(counts),
        top_ids=pack(np.take_along_axis(top_ids, order, axis=1)[keep]),
        top_values=np.take_along_axis(values, order, axis=1)[keep].astype("<f4").tobytes(),
    )

"""Logits → token ids, all rows at once; each row's result is a function of its own logits, parameters and counters.

The draw is a Gumbel-max in two levels: first among blocks of 64 neighbouring ids by their log-sum-exp, then among the
ids of the winning block. That is an exact draw from softmax, needs 832 words of Philox a row instead of one per id, and
changes only where two perturbed scores are nearly equal, however the logits were rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.types import StepLogprobs, pack
from nori_cluster.worker.edits import StepEdits
from nori_cluster.worker.philox import Words, gumbel, philox
from nori_cluster.worker.slots import Int32Array, SlotTable

BLOCK: Final = 64  # ids per block of the first level; part of the definition of a seed's meaning
NUCLEUS: Final = 1024  # likeliest ids looked at first for top_p; flat rows are sorted in full
CPU_ROWS: Final = 8  # rows drawn at once, so that their scores stay in the cache: 32 at once take four times as long
_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the P positions that sample, gathered from the SlotTable: one per row, and one more per draft."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: Int32Array
    min_p: NDArray[np.float32]
    seed: Words
    candidate: NDArray[np.uint32]
    output_index: Int32Array  # absolute index of the token in the sequence's output
    logprobs: Int32Array  # -1 = off
    edits: StepEdits | None

    @staticmethod
    def gather(table: SlotTable, slots: Int32Array, places: Int32Array) -> "SamplingRows":
        """slots, places [P]: whose position it is, and how many drafts stand before it."""
        columns = table.sampling
        ends = table.known[slots] + places
        starts = table.prompt_len[slots]
        return SamplingRows(
            temperature=columns.temperature[slots],
            top_p=columns.top_p[slots],
            top_k=columns.top_k[slots],
            min_p=columns.min_p[slots],
            seed=columns.seed[slots],
            candidate=columns.candidate[slots],
            output_index=ends - starts,
            logprobs=columns.logprobs[slots],
            edits=StepEdits.gather(columns.edits, slots, table.tokens, starts, ends),
        )


class Mask(NamedTuple):
    """What a grammar allows: packed [n, words] int32, bit b of word w is id 32 w + b, for n of the positions."""

    rows: NDArray[np.int64]
    allowed: Int32Array


class Penalties(NamedTuple):
    """What the n penalized positions have seen; see worker/penalties.py."""

    rows: NDArray[np.int64]
    apply: Callable[[torch.Tensor], torch.Tensor]  # float32 scores [n, vocab] → penalized


class Choice(NamedTuple):
    """ids [P] on the host. dead: positions where nothing was allowed (their id means nothing).

    logits: as the model gave them, ids without a token hidden. scores: after masks, bias and penalties.
    """

    ids: Int32Array
    dead: NDArray[np.int64]
    logits: torch.Tensor
    scores: torch.Tensor


def choose(
    logits: torch.Tensor,
    rows: SamplingRows,
    allowed: torch.Tensor | None = None,
    mask: Mask | None = None,
    penalties: Penalties | None = None,
) -> Choice:
    """float32 logits [P, vocab] → an id for each position.

    allowed: bool [vocab], False for ids that stand for no token. A row of NaN or infinities yields finite results.
    Order: grammar, allowed ids, bad words, bias, penalties, min_tokens, temperature, min_p, top_k, top_p.
    """
    logits = finite_logits(logits, allowed)
    scores = _edit(logits, rows.edits, mask, penalties)
    best, ids = scores.max(dim=-1)
    drawn = np.flatnonzero((rows.temperature > 0) & (rows.top_k != 1))
    at_once = CPU_ROWS if scores.device.type == "cpu" else max(1, len(drawn))
    for first in range(0, len(drawn), at_once):
        part = drawn[first : first + at_once]
        index = torch.from_numpy(part).to(scores.device)
        ids[index] = _draw(_scaled(scores[index], best[index], rows, part), rows, part)
    dead = np.zeros(0, np.int64)
    if rows.edits is not None or mask is not None:
        dead = torch.nonzero(best == _NEVER).flatten().cpu().numpy()
    return Choice(ids.to("cpu", torch.int32).numpy(), dead, logits, scores)


def _edit(
    logits: torch.Tensor, edits: StepEdits | None, mask: Mask | None, penalties: Penalties | None
) -> torch.Tensor:
    """Scores [P, vocab]: logits where nothing is asked for (then the same tensor), else a changed copy."""
    if edits is None and mask is None and penalties is None:
        return logits
    scores, device = logits.clone(), logits.device

    def put(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    if mask is not None:
        index = put(mask.rows)
        scores[index] = scores[index].masked_fill_(~put(unpack_bits(mask.allowed, logits.shape[1])), _NEVER)
    if edits is not None and edits.allowed_rows:
        kept = (put(edits.allowed.rows), put(edits.allowed.ids))
        values = scores[kept]
        scores[torch.tensor(edits.allowed_rows, device=device)] = _NEVER
        scores[kept] = values
    if edits is not None and edits.banned:
        scores[put(edits.banned.rows), put(edits.banned.ids)] = _NEVER
    if edits is not None and edits.bias:
        scores.index_put_((put(edits.bias.rows), put(edits.bias.ids)), put(edits.bias.values), accumulate=True)
    if penalties is not None:
        index = put(penalties.rows)
        scores[index] = penalties.apply(scores[index])
    if edits is not None and edits.late:
        _hide_late(scores, put(edits.late.rows), put(edits.late.ids))
    return scores


def _hide_late(scores: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Hide the ids that may not come yet; where a finished grammar allows nothing else, they stay."""
    values = scores[rows, ids]
    scores[rows, ids] = _NEVER
    stuck = (scores[rows] == _NEVER).all(dim=-1)
    if bool(stuck.any()):
        scores[rows[stuck], ids[stuck]] = values[stuck]


def unpack_bits(packed: Int32Array, vocab: int) -> NDArray[np.bool_]:
    """[n, words] → bool [n, vocab]; ids past the packed words are not allowed."""
    bits = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=1, bitorder="little")[:, :vocab].view(
        np.bool_
    )
    missing = vocab - bits.shape[1]
    return np.pad(bits, ((0, 0), (0, missing))) if missing > 0 else np.ascontiguousarray(bits)


def report(
    choice: Choice, rows: SamplingRows, kept: NDArray[np.int64], plan_rows: NDArray[np.int64], processed: bool = False
) -> StepLogprobs | None:
    """Logprobs of the kept positions (ascending) that ask for them; plan_rows [P] names each position's row.

    processed: of the distribution that was drawn from instead of the model's own.
    """
    asking = kept[rows.logprobs[kept] >= 0]
    if not len(asking):
        return None
    index = torch.from_numpy(asking).to(choice.logits.device)
    if processed:
        table = choice.scores[index]
        hot = np.flatnonzero(rows.temperature[asking] > 0)
        if len(hot):
            where = torch.from_numpy(hot).to(table.device)
            table[where] = _scaled(table[where], table[where].max(dim=-1).values, rows, asking[hot])
    else:
        table = choice.logits[index]
    return logprobs_of(table, choice.ids[asking], rows.logprobs[asking], plan_rows[asking])


def sample(
    logits: torch.Tensor, rows: SamplingRows, plan_rows: NDArray[np.int64], allowed: torch.Tensor | None = None
) -> tuple[Int32Array, StepLogprobs | None]:
    """choose and report for rows without drafts: ids [P] and the logprobs asked for."""
    choice = choose(logits, rows, allowed)
    return choice.ids, report(choice, rows, np.arange(len(choice.ids)), plan_rows)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """The same logits when all are finite, else NaN → never and infinities → large, row by row."""
    if bool(torch.isfinite(logits.sum(dim=-1)).all()):
        return logits
    return torch.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)


def _scaled(scores: torch.Tensor, best: torch.Tensor, rows: SamplingRows, which: NDArray[np.int64]) -> torch.Tensor:
    """scores [D, vocab] (overwritten) of the positions `which`, best [D] their maxima → at most 0, divided by the
    temperature, -inf where min_p, top_k or top_p cut."""
    temperature = torch.from_numpy(rows.temperature[which]).to(scores.device)
    best = best.masked_fill(best == _NEVER, 0.0)  # of a row where nothing is allowed
    scaled = scores.sub_(best[:, None]).div_(temperature[:, None])  # at most 0, so no temperature overflows
    _keep_min_p(scaled, rows.min_p[which])
    _keep_top_k(scaled, rows.top_k[which])
    _keep_top_p(scaled, rows.top_p[which])
    return scaled


def _draw(scaled: torch.Tensor, rows: SamplingRows, drawn: NDArray[np.int64]) -> torch.Tensor:
    """Draw from softmax(scaled [D, vocab]) for the positions `drawn` → ids [D]."""
    count, vocab = scaled.shape
    device = scaled.device
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


def _keep_min_p(scaled: torch.Tensor, min_p: NDArray[np.float32]) -> None:
    """Hide ids whose probability is below min_p times that of the likeliest."""
    if not (min_p > 0).any():
        return
    with np.errstate(divide="ignore"):
        threshold = torch.from_numpy(np.log(min_p)).to(scaled.device)
    scaled.masked_fill_(scaled < threshold[:, None], _NEVER)


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
    target = target * _row_sums(part.exp())
    threshold, reached = _nucleus(part.topk(min(NUCLEUS, part.shape[1]), dim=-1).values, target)
    if not bool(reached.all()):
        flat = torch.nonzero(~reached).flatten()
        threshold[flat] = _nucleus(part[flat].sort(dim=-1, descending=True).values, target[flat])[0]
    scaled[index] = part.masked_fill_(part < threshold[:, None], _NEVER)


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """float64 [n] sums of rows [n, vocab], in two stages: the bits of one long sum depend on the number of rows."""
    count, vocab = values.shape
    whole = vocab - vocab % BLOCK
    sums = values[:, :whole].reshape(count, -1, BLOCK).sum(dim=-1, dtype=torch.float64).sum(dim=-1)
    return sums + values[:, whole:].sum(dim=-1, dtype=torch.float64)


def _nucleus(likeliest: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """likeliest [n, k], descending: the score of the id at which the sum of exp reaches target; whether it does."""
    reached = likeliest.double().exp().cumsum(dim=-1)
    place = (reached < target[:, None]).sum(dim=-1)
    last = place.clamp_max(likeliest.shape[1] - 1)
    return likeliest.gather(1, last[:, None]).squeeze(1), place < likeliest.shape[1]


def logprobs_of(
    logits: torch.Tensor, ids: Int32Array, wanted: Int32Array, plan_rows: NDArray[np.int64]
) -> StepLogprobs:
    """log-softmax of rows [n, vocab]: that of ids [n] and of the `wanted` likeliest, best first, equal ones by id."""
    table = torch.log_softmax(logits.double(), dim=-1)
    chosen = table.gather(1, torch.from_numpy(ids.astype(np.int64)).to(table.device)[:, None]).squeeze(1)
    most = min(int(wanted.max()), table.shape[1])
    top = table.topk(most, dim=-1)
    values, top_ids = top.values.cpu().numpy(), top.indices.cpu().numpy()
    counts = np.minimum(wanted, np.isfinite(values).sum(axis=1))
    order = np.lexsort((top_ids, -values), axis=1)
    keep = np.arange(most)[None, :] < counts[:, None]
    return StepLogprobs(
        rows=pack(plan_rows),
        chosen=chosen.clamp_min(-1e30).cpu().numpy().astype("<f4").tobytes(),
        top_counts=pack(counts),
        top_ids=pack(np.take_along_axis(top_ids, order, axis=1)[keep]),
        top_values=np.take_along_axis(values, order, axis=1)[keep].astype("<f4").tobytes(),
    )


def concatenated(parts: Sequence[StepLogprobs]) -> StepLogprobs:
    """The entries of all parts in order."""
    return StepLogprobs(*(b"".join(getattr(part, name) for part in parts) for name in StepLogprobs.__struct_fields__))


def finite_logits(logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """The rows as logprobs are taken of: no NaN, ids without a token hidden."""
    logits = _finite(logits)
    return logits if allowed is None else logits.masked_fill(~allowed, _NEVER)

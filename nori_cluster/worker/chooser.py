"""Rank 0's side of sampling: what it remembers of slots beside the SlotTable, and the calls of the sampler in a step.

enter → begin → (the forward runs) → choose → keep → report, once per step; score for prompt tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.types import SequenceStart, StepLogprobs, unpack
from nori_cluster.worker.penalties import TokenCounts, penalize
from nori_cluster.worker.sampler import (
    Choice,
    Mask,
    Penalties,
    SamplingRows,
    choose,
    finite_logits,
    logprobs_of,
    report,
)
from nori_cluster.worker.slots import Int32Array, SlotTable
from nori_cluster.worker.structured import Structured

NOTHING_ALLOWED = "the request's own limits (grammar, allowed_token_ids, bad_words) leave no token to say"


class Chosen(NamedTuple):
    """One step's positions: whose they are, what they asked for, what came of it, and slots whose grammar failed."""

    owners: Int32Array
    rows: SamplingRows
    choice: Choice
    failures: dict[int, str]


class Chooser:
    """allowed: bool [vocab], None = every id stands for a token. mode: NumericsConfig.logprobs_mode."""

    def __init__(
        self,
        table: SlotTable,
        structured: Structured,
        vocab_size: int,
        device: torch.device,
        allowed: torch.Tensor | None,
        mode: str,
    ) -> None:
        self._table = table
        self._structured = structured
        self._allowed = allowed
        self._processed = mode == "processed_logprobs"
        self._counts = TokenCounts(vocab_size, device)
        self._masked = np.zeros(0, np.int64)  # positions of this step whose masks are being filled
        self._chosen: Chosen

    def enter(self, drops: Int32Array, starts: Sequence[SequenceStart]) -> None:
        """Forget slots, remember new sequences; the table has them already."""
        for slot in drops.tolist():
            self._counts.drop(slot)
            self._structured.drop(slot)
        for start in starts:
            controls = start.sampling.controls
            constraint = None if controls is None else controls.constraint
            self._structured.start(start.slot, constraint, unpack(start.tokens)[start.prompt_len :])
            if self._table.sampling.penalized[start.slot]:
                self._counts.start(start.slot, unpack(start.tokens), start.prompt_len)

    def begin(self, owners: Int32Array, places: Int32Array) -> None:
        """Start to fill the grammar masks of the step's positions, beside the forward."""
        self._masked = np.flatnonzero(self._structured.constrained(owners))
        if not len(self._masked):
            return
        lasts = np.flatnonzero(np.append(places[1:], 0) == 0)  # of each slot's positions: as many drafts as its place
        lasts = lasts[np.isin(lasts, self._masked)]
        slots, known = owners[lasts], self._table.known
        drafts = [
            self._table.tokens[slot, known[slot] : known[slot] + count].tolist()
            for slot, count in zip(slots.tolist(), places[lasts].tolist(), strict=True)
        ]
        self._structured.begin(slots.tolist(), drafts)

    def choose(self, logits: torch.Tensor, owners: Int32Array, places: Int32Array) -> Int32Array:
        """An id for each of P positions: float32 logits [P, vocab] of these slots, behind so many drafts."""
        rows = SamplingRows.gather(self._table, owners, places)
        mask: Mask | None = None
        failures: dict[int, str] = {}
        if len(self._masked):
            allowed, failures = self._structured.finish()
            mask = Mask(self._masked, allowed)
        choice = choose(logits, rows, self._allowed, mask, self._penalties(owners, places))
        self._chosen = Chosen(owners, rows, choice, failures)
        return choice.ids

    def _penalties(self, owners: Int32Array, places: Int32Array) -> Penalties | None:
        which = np.flatnonzero(self._table.sampling.penalized[owners])
        if not len(which):
            return None
        slots, columns = owners[which], self._table.sampling
        output, prompt = self._counts.gather(self._table, slots, places[which])
        return Penalties(which, lambda scores: penalize(scores, columns, slots, output, prompt))

    def keep(self, owners: Int32Array, ids: Int32Array) -> None:
        """These tokens of these slots count; those of one slot in order."""
        self._counts.add(owners, ids)
        if len(self._masked):
            constrained = self._structured.constrained(owners)
            for slot in np.unique(owners[constrained]).tolist():
                self._structured.advance(slot, ids[owners == slot].tolist())

    def report(
        self, kept: NDArray[np.int64], plan_rows: NDArray[np.int64]
    ) -> tuple[StepLogprobs | None, tuple[tuple[int, str], ...]]:
        """Logprobs of the kept positions, and the plan rows that cannot go on with the reason."""
        owners, rows, choice, failures = self._chosen
        reasons = dict.fromkeys(plan_rows[np.intersect1d(choice.dead, kept)].tolist(), NOTHING_ALLOWED)
        for slot, reason in failures.items():
            reasons[int(plan_rows[owners == slot][0])] = reason
        return report(choice, rows, kept, plan_rows, self._processed), tuple(reasons.items())

    def score(
        self, logits: torch.Tensor, targets: Int32Array, wanted: Int32Array, plan_rows: NDArray[np.int64]
    ) -> StepLogprobs:
        """Logprobs of given tokens [n] under logits [n, vocab]: the model's own, whatever the mode."""
        return logprobs_of(finite_logits(logits, self._allowed), targets, wanted, plan_rows)

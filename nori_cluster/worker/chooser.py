"""Rank 0's side of sampling: what it remembers of slots beside the SlotTable, and the calls of the sampler in a step.

enter → choose → keep → report, once per step; score for prompt tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.types import SequenceStart, StepLogprobs, unpack
from nori_cluster.worker.penalties import TokenCounts, penalize
from nori_cluster.worker.sampler import (
    Choice,
    Penalties,
    SamplingRows,
    choose,
    finite_logits,
    logprobs_of,
    report,
)
from nori_cluster.worker.slots import Int32Array, SlotTable

NOTHING_ALLOWED = "the request's own limits (grammar, allowed_token_ids, bad_words) leave no token to say"


class Chooser:
    """allowed: bool [vocab], None = every id stands for a token. mode: NumericsConfig.logprobs_mode."""

    def __init__(
        self, table: SlotTable, vocab_size: int, device: torch.device, allowed: torch.Tensor | None, mode: str
    ) -> None:
        self._table = table
        self._allowed = allowed
        self._processed = mode == "processed_logprobs"
        self._counts = TokenCounts(vocab_size, device)
        self._chosen: tuple[SamplingRows, Choice]  # of this step

    def enter(self, drops: Int32Array, starts: Sequence[SequenceStart]) -> None:
        """Forget slots, remember new sequences; the table has them already."""
        for slot in drops.tolist():
            self._counts.drop(slot)
        for start in starts:
            if self._table.sampling.penalized[start.slot]:
                self._counts.start(start.slot, unpack(start.tokens), start.prompt_len)

    def choose(self, logits: torch.Tensor, owners: Int32Array, places: Int32Array) -> Int32Array:
        """An id for each of P positions: float32 logits [P, vocab] of these slots, behind so many drafts."""
        rows = SamplingRows.gather(self._table, owners, places)
        choice = choose(logits, rows, self._allowed, None, self._penalties(owners, places))
        self._chosen = rows, choice
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

    def report(
        self, kept: NDArray[np.int64], plan_rows: NDArray[np.int64]
    ) -> tuple[StepLogprobs | None, tuple[tuple[int, str], ...]]:
        """Logprobs of the kept positions, and the plan rows that cannot go on with the reason."""
        rows, choice = self._chosen
        dead = np.unique(plan_rows[np.intersect1d(choice.dead, kept)]).tolist()
        failures = tuple((row, NOTHING_ALLOWED) for row in dead)
        return report(choice, rows, kept, plan_rows, self._processed), failures

    def score(
        self, logits: torch.Tensor, targets: Int32Array, wanted: Int32Array, plan_rows: NDArray[np.int64]
    ) -> StepLogprobs:
        """Logprobs of given tokens [n] under logits [n, vocab]: the model's own, whatever the mode."""
        return logprobs_of(finite_logits(logits, self._allowed), targets, wanted, plan_rows)

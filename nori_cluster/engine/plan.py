"""Building one StepPlan, and remembering it until its result is applied."""

from collections.abc import Sequence as Row
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.engine.prefix import CacheEvents
from nori_cluster.types import FinishReason, NewBlocks, SequenceStart, StepLogprobs, StepPlan, pack


class InFlight(NamedTuple):
    """A plan whose result is awaited. samples[r]: row r reaches the end of what is known and samples one token.

    drafts[r]: how many of the row's counts are room for drafts; it samples as many more tokens as drafts are kept.
    """

    step: int
    slots: NDArray[np.int32]
    counts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    drafts: NDArray[np.int32]


class StartNews(NamedTuple):
    """A sequence got its first token. queue_time: seconds between arrival and first plan.

    prompt_logprobs: one entry per prompt token but the first, when asked for.
    """

    key: int
    cached_tokens: int
    queue_time: float
    prompt_logprobs: StepLogprobs | None = None


class FinishNews(NamedTuple):
    """The last word about a key. error: why, when the reason is ERROR or CANCELLED by deadline."""

    key: int
    reason: FinishReason
    matched_token_id: int | None = None
    error: str = ""
    accepted_drafts: int = 0
    proposed_drafts: int = 0
    retryable: bool = False  # given up by this group: it may go on in another


class StepDeltas(msgspec.Struct):
    """News of one step: keys[i] got counts[i] of the concatenated ids. rows[i] is its plan row in logprobs, which may
    hold more entries of it than counts[i] (what came after a stop): the first counts[i] are its own."""

    step: int
    keys: NDArray[np.int64]
    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    rows: NDArray[np.int32]
    starts: Row[StartNews] = ()
    finishes: Row[FinishNews] = ()
    logprobs: StepLogprobs | None = None
    cache_events: CacheEvents | None = None


class PlanBuilder:
    """Collects what a step's plan carries besides its rows: starts, and new blocks per KV group and slot."""

    def __init__(self, num_groups: int) -> None:
        self._starts: list[SequenceStart] = []
        self._blocks: list[dict[int, list[NDArray[np.int32]]]] = [{} for _ in range(num_groups)]

    def start(self, start: SequenceStart) -> None:
        self._starts.append(start)

    def give(self, group: int, slot: int, ids: NDArray[np.int32]) -> None:
        """Blocks appended to the table of a slot that is (or will be) a row of this plan."""
        self._blocks[group].setdefault(slot, []).append(ids)

    def withdraw(self, slot: int) -> None:
        """The slot is no row of this plan after all."""
        for given in self._blocks:
            given.pop(slot, None)

    def build(self, step: int, drops: list[int], slots: NDArray[np.int32], counts: NDArray[np.int32]) -> StepPlan:
        return StepPlan(
            step=step,
            drops=pack(drops),
            starts=tuple(self._starts),
            slots=pack(slots),
            counts=pack(counts),
            blocks=tuple(_pack_blocks(given, slots) for given in self._blocks),
        )


def _pack_blocks(given: dict[int, list[NDArray[np.int32]]], slots: NDArray[np.int32]) -> NewBlocks:
    counts = np.zeros(len(slots), dtype=np.int32)
    ids: list[NDArray[np.int32]] = []
    for row in np.flatnonzero(np.isin(slots, list(given))) if given else ():
        for part in given[int(slots[row])]:
            counts[row] += len(part)
            ids.append(part)
    assert sum(map(len, ids)) == sum(len(part) for parts in given.values() for part in parts), "blocks without a row"
    return NewBlocks(counts=pack(counts), ids=pack(np.concatenate(ids)) if ids else b"")

"""Masks for rows whose output must belong to a grammar, filled by one thread while the forward runs.

Worker calls start/drop as slots change, begin before a forward and finish after it, advance with the tokens it kept.
All work on matchers is queued to the one thread, in order; a slot that fails keeps its reason and touches no other.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens
from numpy.typing import NDArray

from nori_cluster.checkpoint.folder import read_text
from nori_cluster.errors import NoriError
from nori_cluster.grammar import GrammarError, compile_matcher, first_line, load_tokenizer
from nori_cluster.types import Constraint, Int32Array
from nori_cluster.worker.vocabulary import allowed_ids

Row = tuple[llguidance.LLMatcher, int]  # and the position of its first mask
DraftedRow = tuple[llguidance.LLMatcher, int, list[int]]
COMPILED = 64  # grammars kept; one is some 10 kB to a few MB


class SlotGrammar:
    """The grammar state of one slot; only the thread touches it after its start."""

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher | None = None
        self.failure = ""
        self.ended = False  # an EOS or the end of the grammar was passed: what comes after is not looked at


class Structured:
    """Grammar states by slot. vocab_size: width of the logits, which may exceed the tokenizer's vocabulary."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = tuple(id_ for id_ in eos_token_ids if 0 <= id_ < vocab_size)
        self._words = (vocab_size + 31) // 32
        self._eos_bits = pack_bits(np.array(self._eos_ids, np.int64), self._words)
        self._slots: dict[int, SlotGrammar] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._known_bits = np.full(self._words, -1, np.int32)
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        self._kept: list[tuple[SlotGrammar, list[int]]] = []  # tokens since the last begin
        self._filling: Future[tuple[Int32Array, dict[int, str]]] | None = None

    def preload(self) -> None:
        """Start loading the tokenizer (0.5 s to a few seconds), which the first constraint would wait for."""
        self._thread.submit(self._guarded, SlotGrammar(), self._load)

    def start(self, slot: int, constraint: Constraint | None, output_ids: Int32Array) -> None:
        """The slot gets a new sequence; None = it is free. output_ids: tokens it has generated already."""
        if constraint is None:
            self.drop(slot)
            return
        state = self._slots[slot] = SlotGrammar()
        ids = [int(id_) for id_ in output_ids]
        self._thread.submit(self._guarded, state, partial(self._open, state, constraint, ids))

    def drop(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def constrained(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """bool [rows]: which of the slots have a grammar."""
        return np.isin(slots, np.fromiter(self._slots, np.int64, len(self._slots)))

    def begin(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Start filling: for each slot a mask for the state after 0, 1, … len(draft) of its draft tokens.

        The states do not change. Positions after a draft token that the grammar forbids, or that ends it, allow
        everything: such tokens cannot be accepted.
        """
        rows = [(int(slot), self._slots.get(int(slot)), list(draft)) for slot, draft in zip(slots, drafts, strict=True)]
        kept, self._kept = self._kept, []
        self._filling = self._thread.submit(self._fill, kept, rows)

    def finish(self) -> tuple[Int32Array, dict[int, str]]:
        """int32 [positions, ⌈vocab / 32⌉], bit = allowed; and, by slot, why some cannot go on (all is allowed them)."""
        assert self._filling is not None, "finish without begin"
        filling, self._filling = self._filling, None
        return filling.result()

    def advance(self, slot: int, ids: Sequence[int]) -> None:
        """Tokens that the slot's sequence keeps."""
        state = self._slots.get(slot)
        if state is not None:
            self._kept.append((state, [int(id_) for id_ in ids]))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # The rest runs in the thread.

    def _guarded(self, state: SlotGrammar, work: Callable[[], object]) -> None:
        """Run work(); what goes wrong is the slot's failure."""
        try:
            work()
        except (GrammarError, NoriError) as error:
            state.failure = f"the grammar {error}" if isinstance(error, GrammarError) else str(error)
        except BaseException as bug:  # noqa: BLE001 - one sequence fails, the others go on; panics are no Exceptions
            state.failure = f"the grammar failed: {bug or type(bug).__name__}"

    def _load(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            definition = read_text(self._folder, "tokenizer.json")
            if definition is None:
                raise GrammarError("needs a tokenizer.json, which the model does not have")
            known = allowed_ids(self._folder, self._vocab_size)
            ids = np.arange(self._vocab_size) if known is None else np.flatnonzero(known)
            self._known_bits = pack_bits(ids, self._words)
            self._executor = llguidance.LLExecutor()
            self._tokenizer = load_tokenizer(definition, self._vocab_size, self._eos_ids)
        return self._tokenizer

    def _open(self, state: SlotGrammar, constraint: Constraint, output_ids: list[int]) -> None:
        template = self._compiled.pop(constraint, None)
        if template is None:
            template = compile_matcher(self._load(), constraint)
        self._compiled[constraint] = template
        while len(self._compiled) > COMPILED:
            self._compiled.popitem(last=False)
        state.matcher = template.deep_copy()
        self._consume(state, output_ids)

    def _consume(self, state: SlotGrammar, ids: list[int]) -> None:
        for id_ in ids:
            if state.ended or state.matcher is None or state.failure:
                return
            if id_ in self._eos_ids or state.matcher.is_stopped():
                state.ended = True
            elif not state.matcher.consume_token(id_):
                reason = state.matcher.get_error()
                known = "limit" in reason or "max is" in reason or "too many" in reason
                raise GrammarError(
                    f"is too complex: {first_line(reason)}" if known else f"does not allow the token {id_}"
                )

    def _fill(
        self, kept: list[tuple[SlotGrammar, list[int]]], rows: list[tuple[int, SlotGrammar | None, list[int]]]
    ) -> tuple[Int32Array, dict[int, str]]:
        for owner, ids in kept:
            self._guarded(owner, partial(self._consume, owner, ids))
        counts = [1 + len(draft) for _, _, draft in rows]
        starts = np.cumsum([0, *counts])
        width = self._words if self._tokenizer is None else (self._tokenizer.vocab_size + 31) // 32
        masks = np.full((int(starts[-1]), width), -1, np.int32)
        single: list[Row] = []
        drafted: list[DraftedRow] = []
        active: list[tuple[int, SlotGrammar, int]] = []
        for (slot, state, draft), at in zip(rows, starts.tolist(), strict=False):
            if state is None or state.failure or state.matcher is None:
                continue
            active.append((slot, state, at))
            if state.ended:
                continue
            stop = next((i for i, id_ in enumerate(draft) if id_ in self._eos_ids), len(draft))
            if draft[:stop]:
                drafted.append((state.matcher, at, draft[:stop]))
            else:
                single.append((state.matcher, at))
        try:
            self._fill_in_parallel(single, drafted, masks)
        except BaseException:  # noqa: BLE001 - panics of the library are no Exceptions; find out whose it is
            for _, state, at in active:
                own = [entry for entry in drafted if entry[1] == at]
                work = partial(self._fill_in_parallel, [e for e in single if e[1] == at], own, masks)
                self._guarded(state, work)
        masks = np.ascontiguousarray(masks[:, : self._words])
        self._settle(masks, active)
        failures = {slot: state.failure for slot, state, _ in rows if state is not None and state.failure}
        return masks, failures

    def _fill_in_parallel(self, single: list[Row], drafted: list[DraftedRow], masks: Int32Array) -> None:
        if single and self._executor is not None:
            fill_next_token_bitmask_par(self._executor, single, masks)
        if drafted and self._executor is not None:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)

    def _settle(self, masks: Int32Array, active: list[tuple[int, SlotGrammar, int]]) -> None:
        """Every EOS where one is allowed, no id without a token; first positions without any id are failures."""
        for _, state, at in active:
            if state.ended:
                masks[at] = self._eos_bits
        ends: NDArray[np.bool_] = np.any(masks & self._eos_bits, axis=1)
        masks[ends] |= self._eos_bits
        masks &= self._known_bits
        some: NDArray[np.bool_] = np.any(masks, axis=1)
        for _, state, at in active:
            assert state.matcher is not None
            if not state.ended and state.matcher.is_error():
                state.failure = f"the grammar is too complex: {first_line(state.matcher.get_error())}"
            elif not some[at]:
                state.failure = "the grammar allows no further token"
            if state.failure:
                masks[at] = -1


def pack_bits(ids: NDArray[np.int64], words: int) -> Int32Array:
    """int32 [words] with the bits of these ids set, as llguidance lays them out (bit i % 32 of word i // 32)."""
    flags = np.zeros(words * 32, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)

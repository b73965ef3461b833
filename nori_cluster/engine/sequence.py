"""Sequences: what was asked (SequenceRequest), its life (Sequence), and the per-slot columns the step loop works on.

A waiting sequence owns its tokens as an array; a running one keeps them in the columns of its slot and nowhere else.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.hashing import Digest, extend
from nori_cluster.types import RowSampling, StepLogprobs


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a request, every default resolved.

    key: unique among live sequences, chosen by the caller. prompt_token_ids: prompt, then `resumed_tokens` ids that
    were generated before. max_tokens counts resumed ones too. order_key: lower runs first. deadline: engine clock.
    cache_salt separates prefix caches. siblings: equal for the candidates of one request with several, else None.
    """

    key: int
    prompt_token_ids: tuple[int, ...]
    sampling: RowSampling
    max_tokens: int
    resumed_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    order_key: int = 0
    deadline: float | None = None
    cache_salt: bytes = b""
    siblings: int | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt proper."""
        return len(self.prompt_token_ids) - self.resumed_tokens


class Sequence:
    """The mutable life of a request, owned by the Scheduler. slot is -1 while it waits."""

    __slots__ = (
        "accepted", "arrival", "cached_tokens", "digests", "limit", "order", "preemptions", "prompt_logprobs",
        "proposed", "request", "root", "slot", "started", "tokens",
    )  # fmt: skip

    def __init__(self, request: SequenceRequest, limit: int, arrival: float, number: int, root: Digest | None) -> None:
        self.request = request
        self.limit = limit  # most tokens (prompt + output) it may come to
        self.arrival = arrival
        self.order = (request.order_key, number)
        self.slot = -1
        self.started: float | None = None  # when it was first planned
        self.preemptions = 0
        self.cached_tokens = 0  # found in the prefix cache when it first started
        self.proposed = self.accepted = 0  # drafts
        self.prompt_logprobs: list[StepLogprobs] = []  # those of the prompt tokens computed so far, until they are told
        self.root = root  # of the digest chain; None when it shares nothing
        self.digests: list[Digest] = []  # of its first full blocks, as far as they were needed
        self.tokens: NDArray[np.int32] | None = np.array(request.prompt_token_ids, dtype=np.int32)

    def digest_blocks(self, tokens: NDArray[np.int32], blocks: int, block_size: int) -> list[Digest]:
        """Digests of its first `blocks` full blocks; `tokens` holds at least those."""
        if self.root is None:
            return []
        for block in range(len(self.digests), blocks):
            parent = self.digests[-1] if self.digests else self.root
            self.digests.append(extend(parent, tokens[block * block_size : (block + 1) * block_size].tobytes()))
        return self.digests[:blocks]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every prompt token must go through the model, cached or not: their logprobs were not told yet."""
        controls = self.request.sampling.controls
        if controls is None or controls.prompt_logprobs < 0:
            return False
        return self.tokens is None or len(self.tokens) == len(self.request.prompt_token_ids)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before it can sample."""
        return 0 if self.tokens is None else len(self.tokens)


class SlotColumns:
    """One row per slot; filled by the Scheduler when a sequence starts.

    known: tokens applied so far. first_known: value of known at which the caller hears of the first new token
    (0 after a preemption: it heard already). expected: known plus the samples of plans in flight. planned: tokens whose
    computation was ordered. computed: planned and applied. shared: leading blocks offered to the prefix index; shares:
    whether it offers any. limit: known never exceeds it. last_plan: newest plan naming the slot. alive: false once its
    sequence ended or was preempted (late results are dropped).
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.tokens = np.zeros((num_slots, max_tokens), dtype=np.int32)
        self.known = np.zeros(num_slots, dtype=np.int32)
        self.first_known = np.zeros(num_slots, dtype=np.int32)
        self.expected = np.zeros(num_slots, dtype=np.int32)
        self.planned = np.zeros(num_slots, dtype=np.int32)
        self.computed = np.zeros(num_slots, dtype=np.int32)
        self.shared = np.zeros(num_slots, dtype=np.int32)
        self.shares = np.zeros(num_slots, dtype=np.bool_)
        self.limit = np.zeros(num_slots, dtype=np.int32)
        self.last_plan = np.zeros(num_slots, dtype=np.int64)
        self.keys = np.zeros(num_slots, dtype=np.int64)
        self.alive = np.zeros(num_slots, dtype=np.bool_)

    def start(self, sequence: Sequence, computed: int) -> None:
        """Move a waiting sequence's tokens into its slot; `computed` leading tokens are cached."""
        assert sequence.tokens is not None and not self.alive[sequence.slot]
        slot, length = sequence.slot, len(sequence.tokens)
        self.tokens[slot, :length] = sequence.tokens
        self.known[slot] = self.expected[slot] = length
        self.planned[slot] = self.computed[slot] = computed
        asked = len(sequence.request.prompt_token_ids)
        self.first_known[slot] = length + 1 if length == asked else 0
        self.limit[slot] = sequence.limit
        self.keys[slot] = sequence.request.key
        self.last_plan[slot] = -1
        self.shares[slot] = sequence.root is not None
        self.alive[slot] = True
        sequence.tokens = None

    def stop(self, sequence: Sequence) -> NDArray[np.int32]:
        """The slot's sequence ends or is preempted; returns its tokens so far."""
        slot = sequence.slot
        assert self.alive[slot]
        self.alive[slot] = False
        return self.tokens[slot, : self.known[slot]].copy()

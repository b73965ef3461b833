"""The words of the system as frozen structs: what crosses a boundary and who fills it.

Request: frontend → backend. SequenceStart…StepPlan: scheduler → workers. StepResult: rank 0 → scheduler.
Array fields travel as little-endian bytes (int32 unless said otherwise); numpy views cost nothing on either side.
"""

from enum import IntEnum
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class FinishReason(IntEnum):
    """Why one sequence ended; numbers equal nori.common.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CONTENT_FILTER = 4
    CANCELLED = 5
    ERROR = 6


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The formal language an output must belong to.

    text: a JSON schema, a regular expression, a grammar (Lark or EBNF), a JSON list of strings (choice) or a structural
    tag (JSON); empty for json_object, which is any JSON object.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding controls with every default resolved.

    temperature 0 is greedy. top_k 0 and -1 are both off. logprobs: None = off, k = the chosen and k likeliest tokens;
    prompt_logprobs the same for the prompt's tokens. max_tokens None = what fits in the context; 0 = only the prompt is
    looked at. seed None = drawn at admission. allowed_token_ids None = all. bad_word_ids: token sequences that never
    appear; the frontend makes them from bad_words. min_tokens: no end by EOS, stop id or stop string before.
    stop (strings) is the gateway's business: engine and workers never see it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class RowControls(msgspec.Struct, frozen=True, array_like=True):
    """The controls that few rows use. allowed_ids: empty = all. late_ids: not sampled before min_tokens tokens.

    prompt_logprobs: -1 = off. bad_words: token sequences that must not appear in the output.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    late_ids: tuple[int, ...] = ()
    prompt_logprobs: int = -1
    constraint: Constraint | None = None


PLAIN = RowControls()


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to sample one sequence; constant for its life. seed is unsigned 64-bit.

    controls None = PLAIN.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    candidate: int
    logprobs: int = -1  # -1 = off
    controls: RowControls | None = None

    @staticmethod
    def of(sampling: SamplingParams, candidate: int, eos_token_ids: tuple[int, ...]) -> "RowSampling":
        """The part of resolved params that concerns workers. seed must be drawn; top_k ≤ 0 is off.

        Only candidate 0 of a request reports prompt logprobs.
        """
        assert sampling.seed is not None
        eos = () if sampling.ignore_eos else eos_token_ids
        asks_prompt = sampling.prompt_logprobs is not None and candidate == 0
        controls = RowControls(
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            bias_ids=tuple(sampling.logit_bias),
            bias_values=tuple(sampling.logit_bias.values()),
            allowed_ids=sampling.allowed_token_ids or (),
            bad_words=sampling.bad_word_ids,
            min_tokens=sampling.min_tokens,
            late_ids=tuple({*eos, *sampling.stop_token_ids}) if sampling.min_tokens else (),
            prompt_logprobs=(sampling.prompt_logprobs or 0) if asks_prompt else -1,
            constraint=sampling.constraint,
        )
        return RowSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=sampling.seed % (1 << 64),
            candidate=candidate,
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            controls=None if controls == PLAIN else controls,
        )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as admitted by the frontend; its `sampling.n` candidates share it. seed is unsigned 64-bit.

    time_left: seconds from now, None = no deadline. priority: lower runs sooner. cache_salt: only requests of the same
    salt share prefix-cached blocks.
    """

    id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    tenant: str = ""
    priority: int = 0
    time_left: float | None = None
    cache_salt: str = ""


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters a slot. tokens: int32 ids of prompt + tokens generated before (resumption, preemption).

    prompt_len: how many of them are the prompt: token index i of the output is position prompt_len + i.
    computed: leading tokens whose KV is already in the blocks of the first row (prefix cache).
    """

    slot: int
    tokens: bytes
    prompt_len: int
    computed: int
    sampling: RowSampling


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to the tables of one KV group: counts per row of the plan, ids concatenated in row order."""

    counts: bytes
    ids: bytes


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step's orders for every worker of a group, in the order in which they apply: drops, starts, rows.

    slots[r], counts[r]: row r advances its slot from `computed` by at most counts[r] tokens (upper bound: the worker
    stops at the true length). A row that reaches the true length samples one token. blocks: one entry per KV group.
    """

    step: int
    drops: bytes
    starts: tuple[SequenceStart, ...]
    slots: bytes
    counts: bytes
    blocks: tuple[NewBlocks, ...]


class StepLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of the tokens of some rows. rows: int32 plan row per entry (one entry per token).

    chosen: float32 per entry. top_counts: int32 per entry; top_ids int32 and top_values float32 are concatenated.
    """

    rows: bytes
    chosen: bytes
    top_counts: bytes
    top_ids: bytes
    top_values: bytes


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 sampled. counts: int32 tokens per plan row (0 = the row only computed); ids: int32, concatenated.

    error: empty, or why the step failed (then the group is lost). prompt_logprobs: one entry per computed prompt token
    but the first, of the rows that ask for them. proposed: int32 drafts tried per plan row; empty = none anywhere.
    failures: plan row and reason of sequences that cannot go on; they end with an error, the others are not touched.
    """

    step: int
    counts: bytes
    ids: bytes
    logprobs: StepLogprobs | None = None
    error: str = ""
    prompt_logprobs: StepLogprobs | None = None
    proposed: bytes = b""
    failures: tuple[tuple[int, str], ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one emitted token (raw log-softmax, natural log) and of the likeliest ones, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded group tells the engine process and, through Welcome and Register, everybody else."""

    model: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    numerics_id: str
    weights_id: str = ""  # hash of the checkpoint @ weight_version: equal ids are the same weights
    weight_version: str = ""


def pack(values: Any) -> bytes:
    """int32 little-endian bytes of a sequence or array."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack(data: bytes) -> Int32Array:
    """int32 view of packed bytes (read-only)."""
    return np.frombuffer(data, dtype="<i4")

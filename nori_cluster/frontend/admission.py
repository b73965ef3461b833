"""What a call must satisfy before it is submitted: pure checks over resolved values, one error per broken rule.

`param` names are the OpenAI fields; the gRPC servicer's fields bear the same meaning.
"""

import secrets
from collections.abc import Sequence

import msgspec

from nori_cluster.errors import ClientError, ContextLengthExceeded
from nori_cluster.types import SamplingParams

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
UINT64 = (1 << 64) - 1
MAX_PRIORITY = 1000
MAX_SALT = 128
LEAST_REPETITION_PENALTY = 2**-20  # logits stay finite; a float32 of the wire keeps its value


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one call, the same for HTTP and gRPC."""

    max_stop_strings: int = 16
    max_stop_chars: int = 4096  # of one string: as much text may be held back
    max_stop_token_ids: int = 1024
    max_logprobs: int = 20  # also of prompt_logprobs
    max_bad_word_ids: int = 4096  # token sequences
    max_prompts: int = 1024
    max_n: int = 128
    max_candidates: int = 4096  # prompts * n


def check_prompts(prompts: Sequence[tuple[int, ...]], n: int, vocab_size: int, limits: Limits, param: str) -> None:
    """Refuse no prompts, too many, an empty one, and ids outside the vocabulary."""
    if not prompts:
        raise ClientError(f"{param} must not be empty", param=param)
    if len(prompts) > limits.max_prompts:
        raise ClientError(f"at most {limits.max_prompts} prompts per request, got {len(prompts)}", param=param)
    if len(prompts) * n > limits.max_candidates:
        raise ClientError(f"prompts times n is {len(prompts) * n}; at most {limits.max_candidates}", param="n")
    for number, ids in enumerate(prompts):
        where = param if len(prompts) == 1 else f"{param}[{number}]"
        if not ids:
            raise ClientError(f"{where} must not be empty: it has no tokens", param=param)
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(id_ for id_ in ids if not 0 <= id_ < vocab_size)
            raise ClientError(
                f"{where} holds token id {_short(bad)}, which is out of the vocabulary (0 to {vocab_size - 1})",
                param=param,
            )


def check_scheduling(priority: int, cache_salt: str) -> None:
    """Refuse a priority beyond the range that aging is made for, and salts that are too long."""
    _check_range("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if len(cache_salt) > MAX_SALT:
        raise ClientError(f"cache_salt must have at most {MAX_SALT} characters", param="cache_salt")


def check_sampling(
    sampling: SamplingParams, vocab_size: int, limits: Limits, eos_token_ids: Sequence[int] = ()
) -> None:
    """Refuse values out of range, and combinations that leave no token to sample."""
    _check_range("n", sampling.n, 1, limits.max_n)
    _check_range("temperature", sampling.temperature, 0, 2)
    if not 0 < sampling.top_p <= 1:
        raise ClientError("top_p must be greater than 0 and at most 1", param="top_p")
    if sampling.top_k < -1:
        raise ClientError("top_k must be -1 or 0 (off) or positive", param="top_k")
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, INT64_MIN, INT64_MAX)
    _check_range("min_p", sampling.min_p, 0, 1)
    if not LEAST_REPETITION_PENALTY <= sampling.repetition_penalty <= 100:
        raise ClientError("repetition_penalty must be between 0.000001 and 100", param="repetition_penalty")
    _check_range("presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(sampling, name)) is not None:
            _check_range(name, count, 0, limits.max_logprobs)
    _check_length(sampling)
    _check_stops(sampling, vocab_size, limits)
    for id_, bias in sampling.logit_bias.items():
        _check_id("logit_bias", id_, vocab_size)
        if not -100 <= bias <= 100:
            raise ClientError(f"logit_bias values must lie between -100 and 100, got {bias:g}", param="logit_bias")
    _check_allowed(sampling, vocab_size, eos_token_ids)
    if len(sampling.bad_word_ids) > limits.max_bad_word_ids:
        raise ClientError(f"bad_words: at most {limits.max_bad_word_ids} token sequences", param="bad_words")
    for ids in sampling.bad_word_ids:
        if not ids:
            raise ClientError("bad_words must not be empty", param="bad_words")
        for id_ in ids:
            _check_id("bad_words", id_, vocab_size)


def _check_length(sampling: SamplingParams) -> None:
    """max_tokens 0 (only the prompt is looked at) is for the edges to allow or not."""
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise ClientError("max_tokens must not be negative", param="max_tokens")
    if sampling.min_tokens < 0:
        raise ClientError("min_tokens must not be negative", param="min_tokens")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise ClientError(
            f"min_tokens ({_short(sampling.min_tokens)}) must not exceed max_tokens ({_short(sampling.max_tokens)})",
            param="min_tokens",
        )


def _check_stops(sampling: SamplingParams, vocab_size: int, limits: Limits) -> None:
    if len(sampling.stop) > limits.max_stop_strings:
        raise ClientError(f"stop may hold at most {limits.max_stop_strings} strings", param="stop")
    if not all(sampling.stop):
        raise ClientError("stop strings must not be empty", param="stop")
    if any(len(stop) > limits.max_stop_chars for stop in sampling.stop):
        raise ClientError(f"a stop string may have at most {limits.max_stop_chars} characters", param="stop")
    if len(sampling.stop_token_ids) > limits.max_stop_token_ids:
        raise ClientError(f"stop_token_ids may hold at most {limits.max_stop_token_ids} ids", param="stop_token_ids")
    for id_ in sampling.stop_token_ids:
        _check_id("stop_token_ids", id_, vocab_size)


def _check_allowed(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    allowed = sampling.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise ClientError("allowed_token_ids must not be empty: no token could be sampled", param="allowed_token_ids")
    if len(allowed) > vocab_size:
        raise ClientError("allowed_token_ids holds more ids than the vocabulary", param="allowed_token_ids")
    for id_ in allowed:
        _check_id("allowed_token_ids", id_, vocab_size)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if sampling.min_tokens and ends.issuperset(allowed):
        raise ClientError(
            "allowed_token_ids holds only tokens that end the output, which min_tokens forbids",
            param="allowed_token_ids",
        )


def _check_id(name: str, id_: int, vocab_size: int) -> None:
    if not 0 <= id_ < vocab_size:
        raise ClientError(
            f"{name} names token id {_short(id_)}, which is out of the vocabulary (0 to {vocab_size - 1})", param=name
        )


def resolve_max_tokens(
    prompt_tokens: int,
    max_tokens: int | None,
    default: int | None,
    max_model_len: int,
    param: str,
    max_tokens_param: str,
) -> int:
    """Output tokens one candidate may have. An explicit max_tokens must fit; a default is cut to the room left.

    0 stays 0, though the prompt needs room for one token more: the engine samples one.
    """
    room = max_model_len - prompt_tokens
    head = f"This model's maximum context length is {max_model_len} tokens."
    if room < 1:
        raise ContextLengthExceeded(
            f"{head} However, your {param} has {prompt_tokens} tokens and at least one more must be generated.",
            param=param,
        )
    if max_tokens is None:
        return room if default is None else min(default, room)
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"{head} However, you requested {_short(prompt_tokens + max_tokens)} tokens "
            f"({prompt_tokens} in the {param}, {_short(max_tokens)} in the completion). "
            f"Please reduce the length of the {param} or of the completion.",
            param=max_tokens_param,
        )
    return max_tokens


def resolve_seed(seed: int | None) -> int:
    """The unsigned 64-bit seed of one Request: -1 and None are drawn, other negatives are taken modulo 2**64."""
    if seed is None or seed == -1:
        return secrets.randbits(64)
    return seed & UINT64


def resolve_sampling(sampling: SamplingParams, max_tokens: int, vocab_size: int) -> SamplingParams:
    """The values as the engine gets them: max_tokens a number (1 for 0: that token is dropped here), top_k off is 0
    and never above the vocabulary. Raises ClientError when min_tokens exceeds a max_tokens that was not given."""
    if sampling.min_tokens > max_tokens:
        raise ClientError(
            f"min_tokens ({_short(sampling.min_tokens)}) must not exceed the {max_tokens} tokens of output there is "
            "room for",
            param="min_tokens",
        )
    top_k = 0 if sampling.top_k < 1 or sampling.top_k >= vocab_size else sampling.top_k
    return msgspec.structs.replace(sampling, max_tokens=max(1, max_tokens), top_k=top_k)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ClientError(f"{name} must be between {low} and {high}, got {_short(value)}", param=name)


def _short(value: float) -> str:
    """A number as text, cut: clients may send integers of thousands of digits."""
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "a very large number"
    return text[:64]

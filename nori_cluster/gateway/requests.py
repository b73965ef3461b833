"""Request bodies → Drafts: every default resolved, every field honoured or refused. Text is not tokenized here."""

import re
from typing import Any, TypeVar

import msgspec

from nori_cluster.config import GatewayConfig
from nori_cluster.errors import ClientError
from nori_cluster.frontend.constraints import constraint_of
from nori_cluster.gateway.body import convert, decode_object
from nori_cluster.gateway.fields import check_fields
from nori_cluster.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
)
from nori_cluster.types import Constraint, SamplingParams

COMPLETION_MAX_TOKENS = 16
_INTEGER = re.compile(r"-?[0-9]{1,18}")
T = TypeVar("T")


class StreamMode(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is to be written. usage_everywhere: the running usage in every chunk as well."""

    usage: bool = False
    usage_everywhere: bool = False


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What an OpenAI body asks for. stream None = one JSON reply. ignored: names of unknown fields.

    prompts (completions): texts or token ids, one per prompt. messages (chat): for the template. prompt_logprobs: those
    asked for by name; sampling's are also what echo needs. tokens_as_ids: logprobs name tokens by id.
    """

    model: str | None
    sampling: SamplingParams
    constraint_param: str  # the field that holds sampling.constraint
    stream: StreamMode | None
    ignored: list[str]
    max_tokens_param: str = "max_tokens"
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    add_special: bool = True
    echo: bool = False
    prompts: list[str | tuple[int, ...]] = []
    messages: list[dict[str, Any]] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""


def parse_completion(body: bytes, config: GatewayConfig) -> Draft:
    """A /v1/completions body. Raises ClientError."""
    value = decode_object(body)
    request, ignored = _convert(value, CompletionRequest)
    if request.max_tokens == 0 and not request.echo:
        raise ClientError("max_tokens must be at least 1 (0 goes with echo only)", param="max_tokens")
    shown = [request.prompt_logprobs, request.logprobs if request.echo else None]
    prompt_logprobs = max((count for count in shown if count is not None), default=None)
    _check_logprobs(request, request.logprobs, config.max_logprobs)
    constraint, constraint_param = constraint_of(request) or (None, "")
    return Draft(
        model=request.model,
        sampling=_sampling(request, request.max_tokens, request.logprobs, prompt_logprobs, constraint),
        constraint_param=constraint_param,
        stream=_stream(request),
        ignored=ignored,
        priority=_or(request.priority, 0),
        cache_salt=_salt(request.cache_salt),
        return_token_ids=request.return_token_ids is True,
        tokens_as_ids=request.return_tokens_as_token_ids is True,
        prompt_logprobs=request.prompt_logprobs,
        add_special=request.add_special_tokens is not False,
        echo=request.echo is True,
        prompts=_prompts(request.prompt, config.max_prompts),
    )


def parse_chat(body: bytes, config: GatewayConfig) -> Draft:
    """A /v1/chat/completions body. Raises ClientError."""
    value = decode_object(body)
    request, ignored = _convert(value, ChatRequest)
    if request.echo:
        raise ClientError("echo is planned for chat, but not supported yet", param="echo")
    if request.add_special_tokens:
        raise ClientError("the chat template brings its own special tokens", param="add_special_tokens")
    max_tokens, max_tokens_param = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, max_tokens_param = request.max_tokens, "max_tokens"
    if max_tokens is not None and max_tokens < 1:
        raise ClientError(f"{max_tokens_param} must be at least 1", param=max_tokens_param)
    generation_prompt, continues = _ending(request.add_generation_prompt, request.continue_final_message)
    logprobs = _chat_logprobs(request, config.max_logprobs)
    _check_logprobs(request, None, config.max_logprobs)
    constraint, constraint_param = constraint_of(request) or (None, "")
    return Draft(
        model=request.model,
        sampling=_sampling(request, max_tokens, logprobs, request.prompt_logprobs, constraint),
        constraint_param=constraint_param,
        stream=_stream(request),
        ignored=ignored,
        priority=_or(request.priority, 0),
        cache_salt=_salt(request.cache_salt),
        max_tokens_param=max_tokens_param,
        return_token_ids=request.return_token_ids is True,
        tokens_as_ids=request.return_tokens_as_token_ids is True,
        prompt_logprobs=request.prompt_logprobs,
        messages=request.messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        template_kwargs=request.chat_template_kwargs or {},
    )


def parse_tokenize(body: bytes) -> tuple[TokenizeRequest, list[dict[str, Any]] | None, bool, bool]:
    """A /tokenize body: the struct, the messages as dicts, add_generation_prompt, continue_final_message."""
    value = decode_object(body)
    request, _ = _convert(value, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise ClientError("give either prompt or messages", param="prompt")
    if request.messages is None:
        return request, None, False, False
    return request, request.messages, *_ending(request.add_generation_prompt, request.continue_final_message)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return _convert(decode_object(body), DetokenizeRequest)[0]


def _convert(value: dict[str, Any], to: type[T]) -> tuple[T, list[str]]:
    ignored = check_fields(value, to.__struct_fields__)  # type: ignore[attr-defined]
    return convert(value, to), ignored


def _ending(add_generation_prompt: bool | None, continues: bool | None) -> tuple[bool, bool]:
    if continues and add_generation_prompt:
        raise ClientError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return (not continues if add_generation_prompt is None else add_generation_prompt), continues is True


def _sampling(
    request: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
) -> SamplingParams:
    stop, allowed = request.stop, request.allowed_token_ids
    if request.best_of is not None and request.best_of != _or(request.n, 1):
        raise ClientError("best_of must equal n: picking the best of more candidates is not served", param="best_of")
    return SamplingParams(
        n=_or(request.n, 1),
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=_or(request.top_k, 0),
        seed=request.seed,
        max_tokens=max_tokens,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos is True,
        include_stop_str_in_output=request.include_stop_str_in_output is True,
        skip_special_tokens=request.skip_special_tokens is not False,
        logit_bias=_logit_bias(request.logit_bias),
        logprobs=logprobs,
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        min_tokens=_or(request.min_tokens, 0),
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        bad_words=tuple(request.bad_words or ()),
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
    )


def _salt(value: str | None) -> str:
    if value == "":
        raise ClientError("cache_salt must not be empty", param="cache_salt")
    return value or ""


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    resolved = {}
    for key, value in (bias or {}).items():
        if not _INTEGER.fullmatch(key):
            raise ClientError(f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias")
        resolved[int(key)] = value
    return resolved


def _check_logprobs(request: SamplingFields, logprobs: int | None, limit: int) -> None:
    """The counts as they were asked for: the sampling's prompt_logprobs may come from another field."""
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and not 0 <= count <= limit:
            raise ClientError(f"{name} must be between 0 and {limit}", param=name)
    if request.prompt_logprobs is not None and request.stream:
        raise ClientError("prompt_logprobs does not go with stream", param="prompt_logprobs")


def _chat_logprobs(request: ChatRequest, limit: int) -> int | None:
    top = request.top_logprobs
    if top is not None and not 0 <= top <= limit:
        raise ClientError(f"top_logprobs must be between 0 and {limit}", param="top_logprobs")
    if top and not request.logprobs:
        raise ClientError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if request.logprobs else None


def _stream(request: SamplingFields) -> StreamMode | None:
    if not request.stream:
        if request.stream_options is not None:
            raise ClientError("stream_options needs stream: true", param="stream_options")
        return None
    options = request.stream_options or StreamOptions()
    usage = options.include_usage is True
    return StreamMode(usage=usage, usage_everywhere=usage and options.continuous_usage_stats is True)


def _prompts(prompt: str | list[str | int | list[int]], limit: int) -> list[str | tuple[int, ...]]:
    """One entry per prompt: "a", ["a", "b"], [1, 2] and [[1], [2]] give 1, 2, 1 and 2."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [tuple(item for item in prompt if isinstance(item, int))]
    if len(prompt) > limit:
        raise ClientError(f"at most {limit} prompts per request, got {len(prompt)}", param="prompt")
    if not prompt:
        raise ClientError("prompt must not be empty", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ClientError(
            "prompt must be a string, a list of strings, of token ids or of lists of them", param="prompt"
        )
    return [tuple(item) if isinstance(item, list) else str(item) for item in prompt]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value

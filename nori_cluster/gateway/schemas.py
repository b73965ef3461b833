"""Request bodies as msgspec structs: what is decoded, and what the OpenAPI document shows.

Null and absent are the same everywhere; defaults are resolved in requests.py.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nori_cluster.frontend.constraints import ConstraintFields

Prompt = str | list[str | int | list[int]]
# The turns are checked where they are rendered (frontend/messages.py); the document shows Message.
Messages = Annotated[
    list[dict[str, Any]],
    Meta(extra_json_schema={"items": {"$ref": "#/components/schemas/Message"}, "minItems": 1}),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: one last chunk with the usage. continuous_usage_stats: the running usage in every chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(ConstraintFields, kw_only=True):
    """What both generation endpoints take. top_k 0 and -1 are off; seed -1 is none; best_of must equal n.

    min_tokens delays EOS, stop_token_ids and stop strings. prompt_logprobs does not go with stream. Of the fields that
    constrain the output (response_format, structured_outputs, guided_*, regex, ebnf, json_schema, structural_tag) at
    most one may be given.
    """

    model: str | None = None
    n: Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 128})] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 2})] | None = None
    top_p: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None = None
    top_k: Annotated[int, Meta(extra_json_schema={"minimum": -1})] | None = None
    seed: int | None = None
    best_of: Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None = None
    min_p: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] | None = None
    repetition_penalty: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 100})] | None = None
    presence_penalty: Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] | None = None
    frequency_penalty: Annotated[float, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] | None = None
    max_tokens: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None
    min_tokens: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[int], Meta(extra_json_schema={"minItems": 1})] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. max_tokens is 16 when absent or null; 0 only with echo, which puts the prompt before the
    text, and with logprobs the prompt's logprobs before the text's."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call made earlier; arguments is JSON text."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct, kw_only=True):
    """One element of an assistant message's tool_calls."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn. Content: text, null beside tool_calls, or a list of {"type": "text", "text": …} parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions. max_completion_tokens wins over max_tokens; without both, what fits."""

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(extra_json_schema={"minimum": 1})] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(extra_json_schema={"minimum": 0})] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every error of every route."""

    error: ErrorDetail

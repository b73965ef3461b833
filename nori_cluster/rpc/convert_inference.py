"""protobuf ↔ our structs for the public plane. A field that is not served is refused by name, never ignored."""

import json
from collections.abc import Iterable
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from nori_cluster.errors import ClientError, NoriError, UnsupportedParameter
from nori_cluster.frontend.candidate import Delta
from nori_cluster.frontend.generation import Usage
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as common
from nori_cluster.rpc.generated.nori.common.v1 import sampling_pb2
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.types import SamplingParams

MAX_REQUEST_ID = 128
_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
# Planned sampling fields and the value at which each changes nothing (None: any value changes the meaning).
_UNSERVED: dict[str, float | None] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "reasoning_token_budget": None,
    "constraint": None,
    "extra": None,
}
_FIELDS = {  # the frontend's words → ours
    "n": "task.sampling.candidate_count",
    "stop": "task.sampling.stop_strings",
    "logprobs": "task.output.top_logprobs",
    "model": "task.model",
    "prompt": "task.prompt",
    **{
        name: f"task.sampling.{name}"
        for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "logit_bias")
    },
}


def model_name(value: str) -> str | None:
    """ "models/x" or "x"; None when absent."""
    return value.removeprefix("models/") or None


def with_field(error: NoriError) -> NoriError:
    """The same error naming the field of this API instead of OpenAI's."""
    if error.param is None or error.param not in _FIELDS:
        return error
    return type(error)(error.message, _FIELDS[error.param], error.retry_after)


def request_id(value: str) -> str | None:
    """The client's id, checked; None when absent."""
    if len(value) > MAX_REQUEST_ID or not value.isprintable():
        raise ClientError("request_id must be at most 128 printable characters", param="task.request_id")
    return value or None


def refuse_unserved(task: pb.GenerationTask) -> None:
    """Fields of a GenerationTask that change the meaning and are planned only."""
    if task.tool_config.functions or task.tool_config.choice not in (pb.TOOL_CHOICE_UNSPECIFIED, pb.TOOL_CHOICE_NONE):
        raise _planned("task.tool_config")
    if task.output.HasField("prompt_logprobs"):
        raise _planned("task.output.prompt_logprobs")
    if task.output.echo_prompt:
        raise _planned("task.output.echo_prompt")


def sampling_from_pb(value: sampling_pb2.SamplingParams, output: pb.OutputOptions) -> SamplingParams:
    """Defaults resolved. Raises UnsupportedParameter naming the field."""
    for name, neutral in _UNSERVED.items():
        if value.HasField(cast("Any", name)) and (neutral is None or getattr(value, name) != neutral):
            raise _planned(f"task.sampling.{name}")
    if value.allowed_token_ids:
        raise _planned("task.sampling.allowed_token_ids")

    def given(name: str, default: Any) -> Any:
        return getattr(value, name) if value.HasField(cast("Any", name)) else default

    return SamplingParams(
        n=given("candidate_count", 1),
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=given("top_k", 0),
        seed=given("seed", None),
        max_tokens=given("max_tokens", None),
        stop=tuple(value.stop_strings),
        stop_token_ids=tuple(value.stop_token_ids),
        ignore_eos=value.ignore_eos,
        include_stop_str_in_output=value.include_stop_string,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        logit_bias=dict(value.logit_bias),
        logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
    )


def messages_from_pb(conversation: pb.Conversation, where: str) -> list[dict[str, Any]]:
    """OpenAI-shaped messages for the chat template. where: dotted path of the conversation."""
    if not conversation.messages:
        raise ClientError(f"{where}.messages must not be empty", param=f"{where}.messages")
    return [_message(m, f"{where}.messages[{i}]") for i, m in enumerate(conversation.messages)]


def _message(message: pb.Message, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise ClientError(f"{where}.role is missing or unknown", param=f"{where}.role")
    for number, part in enumerate(message.parts):
        if part.WhichOneof("kind") != "text":
            raise _planned(f"{where}.parts[{number}].media")
    out: dict[str, Any] = {"role": role, "content": "".join(part.text for part in message.parts)}
    if message.tool_calls:
        raise _planned(f"{where}.tool_calls")
    for name in ("tool_call_id", "name"):
        if getattr(message, name):
            out[name] = getattr(message, name)
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    return out


def tool_from_pb(function: pb.FunctionTool) -> dict[str, Any]:
    """The OpenAI shape that chat templates expect. Raises ClientError when the parameters are not JSON."""
    try:
        parameters = json.loads(function.parameters_json or "{}")
    except ValueError as error:
        raise ClientError("parameters_json is not JSON", param="functions.parameters_json") from error
    described = {"name": function.name, "description": function.description, "parameters": parameters}
    return {"type": "function", "function": described}


def template_args(conversation: pb.Conversation) -> dict[str, Any]:
    return MessageToDict(conversation.template_args)


def _planned(field: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{field} is planned, but not supported yet", param=field)


# -- answers --------------------------------------------------------------------------------------------------------


def usage_to_pb(usage: Usage) -> common.Usage:
    return common.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _matched(delta: Delta) -> common.MatchedStop | None:
    if isinstance(delta.stop_reason, str):
        return common.MatchedStop(text=delta.stop_reason)
    return None if delta.stop_reason is None else common.MatchedStop(token_id=delta.stop_reason)


def _reason(delta: Delta) -> "common.FinishReason":
    assert delta.finish_reason is not None
    return cast("common.FinishReason", int(delta.finish_reason))


def candidate_to_pb(delta: Delta, with_ids: bool) -> pb.Candidate:
    """A whole candidate."""
    return pb.Candidate(
        index=delta.index,
        text=delta.text,
        finish_reason=_reason(delta),
        matched_stop=_matched(delta),
        token_ids=delta.token_ids if with_ids else (),
        logprobs=None if delta.logprobs is None else convert.logprobs_to_pb(delta.logprobs),
    )


def delta_to_pb(request: str, delta: Delta, with_ids: bool) -> Iterable[pb.StreamGenerateResponse]:
    """The events of one Delta: news, then the end of the candidate."""
    ids = delta.token_ids if with_ids else []
    if delta.text or ids or delta.logprobs:
        news = pb.CandidateDelta(
            index=delta.index,
            text=delta.text,
            token_ids=ids,
            logprobs=None if delta.logprobs is None else convert.logprobs_to_pb(delta.logprobs),
        )
        yield pb.StreamGenerateResponse(request_id=request, delta=news)
    if delta.finish_reason is not None:
        end = pb.CandidateFinished(index=delta.index, finish_reason=_reason(delta), matched_stop=_matched(delta))
        yield pb.StreamGenerateResponse(request_id=request, finished=end)

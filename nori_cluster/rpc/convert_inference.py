"""protobuf ↔ our structs for the public plane. A field that is not served is refused by name, never ignored."""

import json
from collections.abc import Iterable
from typing import Any, cast

import msgspec
from google.protobuf.json_format import MessageToDict

from nori_cluster.errors import ClientError, NoriError, UnsupportedParameter
from nori_cluster.frontend.candidate import Delta
from nori_cluster.frontend.generation import Usage
from nori_cluster.rpc import convert
from nori_cluster.rpc.convert_sampling import sampling_from_pb
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as common
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.types import SamplingParams

MAX_REQUEST_ID = 128
_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_FIELDS = {  # the frontend's words → ours
    "n": "task.sampling.candidate_count",
    "stop": "task.sampling.stop_strings",
    "logprobs": "task.output.top_logprobs",
    "prompt_logprobs": "task.output.prompt_logprobs",
    "model": "task.model",
    "prompt": "task.prompt",
    **{
        name: f"task.sampling.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "max_tokens",
            "stop_token_ids",
            "logit_bias",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
            "allowed_token_ids",
            "bad_words",
            "constraint",
        )
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


def sampling_of(task: pb.GenerationTask, streamed: bool) -> SamplingParams:
    """Defaults resolved. Raises ClientError naming the field."""
    output = task.output
    prompt_logprobs = output.prompt_logprobs if output.HasField("prompt_logprobs") else None
    if streamed and prompt_logprobs is not None:
        raise ClientError("prompt_logprobs goes with Generate only", param="task.output.prompt_logprobs")
    sampling = sampling_from_pb(task.sampling, "task.sampling.")
    if sampling.max_tokens == 0 and not (output.echo_prompt or prompt_logprobs is not None):
        raise ClientError(
            "max_tokens must be at least 1 (0 goes with echo_prompt or prompt_logprobs)",
            param="task.sampling.max_tokens",
        )
    return msgspec.structs.replace(
        sampling,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
        prompt_logprobs=prompt_logprobs,
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
        accepted_draft_tokens=usage.accepted_drafts,
        proposed_draft_tokens=usage.proposed_drafts,
    )


def _matched(delta: Delta) -> common.MatchedStop | None:
    if isinstance(delta.stop_reason, str):
        return common.MatchedStop(text=delta.stop_reason)
    return None if delta.stop_reason is None else common.MatchedStop(token_id=delta.stop_reason)


def _reason(delta: Delta) -> "common.FinishReason":
    assert delta.finish_reason is not None
    return cast("common.FinishReason", int(delta.finish_reason))


def candidate_to_pb(delta: Delta, with_ids: bool, echo: str = "") -> pb.Candidate:
    """A whole candidate. echo: the prompt's text when it is to come first."""
    return pb.Candidate(
        index=delta.index,
        text=echo + delta.text,
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

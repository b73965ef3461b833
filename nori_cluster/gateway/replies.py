"""Whole JSON replies of the generation endpoints, from the Deltas of a finished Generation."""

from collections.abc import Sequence
from typing import Any

from nori_cluster.frontend.service import Delta, Generation, Usage
from nori_cluster.gateway.logprobs import (
    Shown,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from nori_cluster.types import FinishReason

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def finish_name(reason: FinishReason) -> str:
    """OpenAI's word. An early end by the engine (cancelled, error) arrives as a failure, never as a finish reason."""
    return FINISH_REASONS[reason]


def usage_object(usage: Usage) -> dict[str, Any]:
    """The prediction tokens are those of speculation, there when a draft was tried."""
    details = {"reasoning_tokens": 0}
    if usage.proposed_drafts:
        details["accepted_prediction_tokens"] = usage.accepted_drafts
        details["rejected_prediction_tokens"] = usage.proposed_drafts - usage.accepted_drafts
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


def chat_reply(generation: Generation, deltas: Sequence[Delta], show: Shown) -> dict[str, Any]:
    choices = []
    for delta in deltas:
        assert delta.finish_reason is not None
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": None if delta.logprobs is None else chat_logprobs(show, delta.token_ids, delta.logprobs),
            "finish_reason": finish_name(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if show.token_ids:
            choice["token_ids"] = delta.token_ids
        choices.append(choice)
    reply = _frame(f"chatcmpl-{generation.id}", "chat.completion", generation, choices)
    if show.token_ids:
        reply["prompt_token_ids"] = list(generation.prompts[0])
    if show.prompt_logprobs is not None:
        reply["prompt_logprobs"] = _prompt_logprobs(generation, 0, show, show.prompt_logprobs)
    return reply


def completion_reply(
    generation: Generation, deltas: Sequence[Delta], show: Shown, echo: Sequence[str]
) -> dict[str, Any]:
    """echo: the text put before each candidate's, one per prompt; empty when not asked for."""
    choices = []
    for delta in deltas:
        assert delta.finish_reason is not None
        prompt = delta.index // generation.n
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": (echo[prompt] if echo else "") + delta.text,
            "logprobs": _completion_logprobs(generation, delta, show),
            "finish_reason": finish_name(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if show.token_ids:
            choice["prompt_token_ids"] = list(generation.prompts[prompt])
            choice["token_ids"] = delta.token_ids
        if show.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(generation, prompt, show, show.prompt_logprobs)
        choices.append(choice)
    return _frame(f"cmpl-{generation.id}", "text_completion", generation, choices)


def _completion_logprobs(generation: Generation, delta: Delta, show: Shown) -> dict[str, Any] | None:
    """The candidate's, after its prompt's when that is echoed."""
    if delta.logprobs is None:
        return None
    if show.echo_logprobs is None:
        return completion_logprobs(show, delta.token_ids, delta.logprobs, 0)[0]
    prompt = delta.index // generation.n
    first, offset = echoed_logprobs(
        show, generation.prompts[prompt], generation.prompt_logprobs[prompt], show.echo_logprobs
    )
    return joined(first, completion_logprobs(show, delta.token_ids, delta.logprobs, offset)[0])


def _prompt_logprobs(generation: Generation, prompt: int, show: Shown, count: int) -> list[dict[str, Any] | None]:
    return prompt_logprobs(show, generation.prompts[prompt], generation.prompt_logprobs[prompt], count)


def _frame(id_: str, kind: str, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
    reply = {
        "id": id_,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": usage_object(generation.usage),
    }
    if weights := generation.weights_ids:
        reply["system_fingerprint"] = ",".join(weights)
    return reply

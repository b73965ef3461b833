"""Whole JSON replies of the generation endpoints, from the Deltas of a finished Generation."""

from collections.abc import Sequence
from typing import Any

from nori_cluster.frontend.service import Delta, Generation, Usage
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.gateway.logprobs import chat_logprobs, completion_logprobs
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
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def chat_reply(
    generation: Generation, deltas: Sequence[Delta], tokenizer: Tokenizer, token_ids: bool
) -> dict[str, Any]:
    choices = []
    for delta in deltas:
        assert delta.finish_reason is not None
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": None if delta.logprobs is None else chat_logprobs(tokenizer, delta.token_ids, delta.logprobs),
            "finish_reason": finish_name(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if token_ids:
            choice["token_ids"] = delta.token_ids
        choices.append(choice)
    reply = _frame(f"chatcmpl-{generation.id}", "chat.completion", generation, choices)
    if token_ids:
        reply["prompt_token_ids"] = list(generation.prompts[0])
    return reply


def completion_reply(
    generation: Generation, deltas: Sequence[Delta], tokenizer: Tokenizer, echo: Sequence[str], token_ids: bool
) -> dict[str, Any]:
    """echo: the text put before each candidate's, one per prompt; empty when not asked for."""
    choices = []
    for delta in deltas:
        assert delta.finish_reason is not None
        prompt = delta.index // generation.n
        logprobs = None
        if delta.logprobs is not None:
            logprobs, _ = completion_logprobs(tokenizer, delta.token_ids, delta.logprobs, 0)
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": (echo[prompt] if echo else "") + delta.text,
            "logprobs": logprobs,
            "finish_reason": finish_name(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if token_ids:
            choice["prompt_token_ids"] = list(generation.prompts[prompt])
            choice["token_ids"] = delta.token_ids
        choices.append(choice)
    return _frame(f"cmpl-{generation.id}", "text_completion", generation, choices)


def _frame(id_: str, kind: str, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": id_,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": usage_object(generation.usage),
    }

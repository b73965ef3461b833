"""Logprobs in OpenAI's two shapes. Raw token bytes, so that clients can join the pieces of a cut character."""

from collections.abc import Sequence
from typing import Any

from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import TokenLogprob

FLOOR = -9999.0  # stands for -inf, which JSON lacks


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """{"content": [one entry per token], "refusal": null}."""
    content = []
    for id_, logprob in zip(ids, logprobs, strict=True):
        top = [
            _entry(tokenizer, top_id, value)
            for top_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        ]
        content.append({**_entry(tokenizer, id_, logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob], offset: int
) -> tuple[dict[str, Any], int]:
    """Four arrays of equal length, and the text offset after them. offset: characters before the first token.

    top_logprobs always holds the chosen token, so it has up to one entry more than asked for.
    """
    tokens, values, tops, offsets = [], [], [], []
    for id_, logprob in zip(ids, logprobs, strict=True):
        text = tokenizer.token_text(id_)
        top = {
            tokenizer.token_text(top_id): _finite(value)
            for top_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        }
        top[text] = _finite(logprob.logprob)
        tokens.append(text)
        values.append(_finite(logprob.logprob))
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _entry(tokenizer: Tokenizer, id_: int, value: float) -> dict[str, Any]:
    return {"token": tokenizer.token_text(id_), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(id_))}


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also for NaN

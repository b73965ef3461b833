"""Logprobs in OpenAI's two shapes and vLLM's prompt_logprobs. Raw token bytes, so that clients can join the pieces of
a cut character."""

from collections.abc import Sequence
from typing import Any

import msgspec

from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.gateway.requests import Draft
from nori_cluster.types import TokenLogprob

FLOOR = -9999.0  # stands for -inf, which JSON lacks


class Shown(msgspec.Struct, frozen=True):
    """What a reply shows beside its text.

    token_ids: whether. tokens_as_ids: logprobs name tokens `token_id:5`. prompt_logprobs, echo_logprobs: how many
    alternatives per prompt token in vLLM's field and before the logprobs of the output; None = not shown.
    """

    tokenizer: Tokenizer
    token_ids: bool
    tokens_as_ids: bool
    prompt_logprobs: int | None
    echo_logprobs: int | None

    @staticmethod
    def of(tokenizer: Tokenizer, draft: Draft) -> "Shown":
        echo_logprobs = draft.sampling.logprobs if draft.echo else None
        return Shown(tokenizer, draft.return_token_ids, draft.tokens_as_ids, draft.prompt_logprobs, echo_logprobs)

    def name(self, id_: int) -> str:
        """The token as logprobs name it."""
        return f"token_id:{id_}" if self.tokens_as_ids else self.tokenizer.token_text(id_)


def chat_logprobs(show: Shown, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """{"content": [one entry per token], "refusal": null}."""
    content = []
    for id_, logprob in zip(ids, logprobs, strict=True):
        top = [_entry(show, top_id, value) for top_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)]
        content.append({**_entry(show, id_, logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    show: Shown, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offset: int
) -> tuple[dict[str, Any], int]:
    """Four arrays of equal length, and the text offset after them. offset: characters before the first token.

    top_logprobs always holds the chosen token, so it has up to one entry more than asked for. A logprob of None (the
    prompt's first token) is null in both arrays.
    """
    tokens, values, tops, offsets = [], [], [], []
    for id_, logprob in zip(ids, logprobs, strict=True):
        name = show.name(id_)
        top = None
        if logprob is not None:
            top = {
                show.name(top_id): _finite(value)
                for top_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
            }
            top[name] = _finite(logprob.logprob)
        tokens.append(name)
        values.append(None if logprob is None else _finite(logprob.logprob))
        tops.append(top)
        offsets.append(offset)
        offset += len(show.tokenizer.token_text(id_))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def echoed_logprobs(
    show: Shown, ids: Sequence[int], logprobs: Sequence[TokenLogprob], count: int
) -> tuple[dict[str, Any], int]:
    """completion_logprobs of a prompt. logprobs: of its tokens but the first; count: alternatives shown of each."""
    return completion_logprobs(show, ids, [None, *(_cut(logprob, count) for logprob in logprobs)], 0)


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two runs of completion_logprobs as one."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(
    show: Shown, ids: Sequence[int], logprobs: Sequence[TokenLogprob], count: int
) -> list[dict[str, Any] | None]:
    """vLLM's field: null for the first token, then {token id: {logprob, rank, decoded_token}} with the token itself
    first. rank is 1 for the likeliest; null where the token is none of the `count` shown."""
    shown: list[dict[str, Any] | None] = [None]
    for id_, whole in zip(ids[1:], logprobs, strict=True):
        logprob = _cut(whole, count)
        values = {id_: logprob.logprob, **dict(zip(logprob.top_ids, logprob.top_logprobs, strict=True))}
        ranks = {top_id: rank for rank, top_id in enumerate(logprob.top_ids, 1)}
        shown.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": show.tokenizer.token_text(token),
                }
                for token, value in values.items()
            }
        )
    return shown


def _cut(logprob: TokenLogprob, count: int) -> TokenLogprob:
    return TokenLogprob(logprob.logprob, logprob.top_ids[:count], logprob.top_logprobs[:count])


def _entry(show: Shown, id_: int, value: float) -> dict[str, Any]:
    return {"token": show.name(id_), "logprob": _finite(value), "bytes": list(show.tokenizer.token_bytes(id_))}


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # also for NaN

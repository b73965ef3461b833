"""One admitted request on its way back: token news in (TokenSink), text Deltas out.

A Generation owns its candidates; one bare future wakes its consumer, pending news is swapped out on take.
Stop strings end a candidate here: the terminal Delta goes out at once, the backend gets an abort, late news is dropped.
"""

from collections.abc import Sequence

import msgspec

from nori_cluster.errors import NoriError
from nori_cluster.types import FinishReason, TokenLogprob


class Delta(msgspec.Struct, frozen=True):
    """News of one candidate, merged since the last take. index = prompt_index * n + candidate.

    token_ids and logprobs (parallel, only when asked for) may come before or after the text they belong to.
    finish_reason is set in exactly one Delta per candidate, its last. stop_reason: the matched stop string or stop
    token id, None for EOS and length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole call: each prompt once, all candidates' outputs."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Generation:
    """The consumer's side of one call. Used by one task; close() may come from any task of the loop.

    id: unique. prompts: token ids per prompt. created: unix seconds. model: the name the client asked for.
    """

    id: str
    model: str
    created: int
    n: int
    prompts: Sequence[tuple[int, ...]]
    queue_time: float | None  # seconds, of the first sequence that started
    time_to_first_token: float | None  # seconds since submit

    async def admitted(self) -> None:
        """Return once every candidate was accepted; raise the refusal (NoriError) after aborting the siblings."""
        raise NotImplementedError

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        """Whatever is ready, at most one Delta per candidate. Raises the NoriError that ended the call early."""
        raise NotImplementedError

    async def result(self) -> list[Delta]:
        """Wait for the end: one complete Delta per candidate, in index order. Raises like iteration."""
        raise NotImplementedError

    @property
    def usage(self) -> Usage:
        """Counts so far; final after the last Delta."""
        raise NotImplementedError

    def close(self, error: NoriError | None = None) -> None:
        """Abort what still runs. Idempotent. A consumer still waiting gets `error` (default Cancelled)."""
        raise NotImplementedError

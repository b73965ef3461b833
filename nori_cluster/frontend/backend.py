"""What the frontend needs of a cluster: a Backend takes Requests and calls TokenSinks; nothing else crosses.

Implemented by rpc.cluster_backend (router + data plane) and, in tests, by a 30-line fake.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from nori_cluster.errors import NoriError
from nori_cluster.types import FinishReason, Request, TokenLogprob


class Started(msgspec.Struct, frozen=True):
    """First news of a sequence, just before its first token. Times in seconds.

    prompt_logprobs: one entry per prompt token but the first, when the request asked for them; candidate 0 only.
    weights_id: of the weights that speak; the same for all of a request, whatever becomes of its group.
    """

    cached_tokens: int = 0
    queue_time: float = 0.0
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    weights_id: str = ""


class Finish(msgspec.Struct, frozen=True):
    """Why the engine ended a sequence. matched_token_id: the stop id of the request that ended it (None for EOS).

    With reason STOP the last token delivered is the one that stopped it (EOS or stop id): it counts in usage, its text
    is not part of the output (unless include_stop_str_in_output). `finished` follows in the same turn of the event
    loop as those tokens, so a sink that detokenizes when it is read knows before it decodes. *_drafts: speculation.
    """

    reason: FinishReason
    matched_token_id: int | None = None
    accepted_drafts: int = 0
    proposed_drafts: int = 0


class TokenSink(Protocol):
    """Receives what happens to one candidate. Called on the event loop, must not block and must not raise.

    Order: accepted, started, tokens*, then exactly one of finished | failed. After Submission.abort nothing more comes.
    """

    def accepted(self) -> None: ...

    def started(self, start: Started) -> None: ...

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """New tokens, oldest first; logprobs is parallel to ids when the request asked for them."""

    def finished(self, finish: Finish) -> None: ...

    def failed(self, error: NoriError) -> None: ...


class Submission(Protocol):
    def abort(self, candidate: int) -> None:
        """Stop one candidate; its blocks come free. No-op when it has ended."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model some group has registered. max_model_len in tokens. queue_full: a new request would be refused now, and
    should come back after so many seconds (retry_after, None = not known)."""

    name: str
    max_model_len: int
    ready_groups: int
    queue_full: bool = False
    retry_after: float | None = None


class Backend(Protocol):
    def submit(self, request: Request, sinks: Sequence[TokenSink]) -> Submission:
        """Place and start a request; sinks[i] belongs to candidate i. Returns at once; all news, refusals too,
        come through the sinks."""

    def model(self, name: str) -> ModelInfo | None:
        """What is known of a model now; None when no group ever registered it."""

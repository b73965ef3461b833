"""One candidate's way from token ids to text: decode when read, match stop strings, end exactly once."""

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import msgspec

from nori_cluster.errors import EngineFailure, NoriError
from nori_cluster.frontend.backend import Finish, Started
from nori_cluster.frontend.detokenizer import Detokenizer
from nori_cluster.frontend.stop import StopMatcher
from nori_cluster.telemetry import Histogram
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


class CandidateOwner(Protocol):
    """What a candidate tells its Generation. All calls are cheap and on the event loop."""

    def on_accepted(self) -> None: ...
    def on_started(self, candidate: "Candidate", start: Started) -> None: ...
    def on_first_token(self, now: float) -> None: ...
    def on_news(self, candidate: "Candidate") -> None: ...
    def on_stop_string(self, candidate: "Candidate") -> None: ...
    def on_overrun(self, tokens: int) -> None: ...
    def on_failed(self, error: NoriError) -> None: ...


class Candidate:
    """The TokenSink of one sequence. Tokens are only stored on arrival; `decode` turns them into text.

    Since `finished` follows the stopping token in the same turn of the event loop, decode knows whether the last
    token is one whose text is not part of the output. No stop string is looked for in the text of the first min_tokens
    tokens. prompt_only: max_tokens 0; the one token that the engine samples is dropped.
    """

    __slots__ = (
        "_accepted", "_detokenizer", "_finish", "_ids", "_include_stop", "_inter_token", "_last", "_logprobs",
        "_matcher", "_min_tokens", "_new_ids", "_new_logprobs", "_owner", "_prompt_only", "_text", "accepted_drafts",
        "closed", "count", "dirty", "finish_reason", "index", "proposed_drafts", "stop_reason", "told",
    )  # fmt: skip

    def __init__(
        self,
        owner: CandidateOwner,
        index: int,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        include_stop: bool,
        logprobs: bool,
        inter_token: Histogram,
        min_tokens: int = 0,
        prompt_only: bool = False,
    ) -> None:
        self.index = index
        self.accepted_drafts = self.proposed_drafts = 0  # known at the end
        self.count = 0  # tokens decoded: what usage counts
        self.finish_reason: FinishReason | None = None  # set by decode, once
        self.stop_reason: str | int | None = None
        self.dirty = False  # in the owner's list of candidates with news
        self.closed = False  # news is dropped from here on
        self.told = False  # the terminal Delta was taken
        self._owner = owner
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._include_stop = include_stop
        self._inter_token = inter_token
        self._min_tokens = min_tokens
        self._prompt_only = prompt_only
        self._accepted = False
        self._last: float | None = None
        self._new_ids: list[int] = []
        self._new_logprobs: list[TokenLogprob] = []
        self._finish: Finish | None = None
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if logprobs else None

    # TokenSink

    def accepted(self) -> None:
        if not self._accepted:
            self._accepted = True
            self._owner.on_accepted()

    def started(self, start: Started) -> None:
        self.accepted()
        self._owner.on_started(self, start)

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        if self.closed:
            self._owner.on_overrun(len(ids))
            return
        if not self._prompt_only:
            self._new_ids.extend(ids)
            if logprobs is not None:
                self._new_logprobs.extend(logprobs)
        now = monotonic()
        if self._last is None:
            self.accepted()
            self._owner.on_first_token(now)
        else:
            self._inter_token.observe(now - self._last)
        self._last = now
        self._owner.on_news(self)

    def finished(self, finish: Finish) -> None:
        if self.closed:
            return
        if finish.reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            self.failed(EngineFailure(f"the engine ended the request early ({finish.reason.name.lower()})"))
            return
        self.accepted()
        self.closed = True
        self.accepted_drafts, self.proposed_drafts = finish.accepted_drafts, finish.proposed_drafts
        self._finish = Finish(FinishReason.LENGTH) if self._prompt_only else finish
        self._owner.on_news(self)

    def failed(self, error: NoriError) -> None:
        if not self.closed:
            self.closed = True
            self._owner.on_failed(error)

    # Reader's side

    @property
    def ended_by_backend(self) -> bool:
        return self._finish is not None

    def decode(self) -> None:
        """Turn what arrived into text; set finish_reason when this candidate ended."""
        ids = self._new_ids
        finish = self._finish
        if self.finish_reason is not None or not (ids or finish):
            return
        self._new_ids = []
        shown = ids
        if finish is not None and finish.reason is FinishReason.STOP and not self._include_stop:
            shown = ids[:-1]
        kept = self._decode_plain(shown) if self._matcher is None else self._decode_matching(self._matcher, shown)
        if self.finish_reason is not None:  # a stop string matched at token kept - 1
            self._owner.on_overrun(len(ids) - kept)
            ids = ids[:kept]
        self.count += len(ids)
        self._ids += ids
        if self._logprobs is not None:
            self._logprobs += self._new_logprobs[: len(ids)]
            self._new_logprobs = []
        if finish is not None and self.finish_reason is None:
            self._flush(finish)

    def take(self, every_token: bool) -> Delta | None:
        """The news since the last take; None while there is nothing to tell. every_token: tokens without text count."""
        self.decode()
        ends = self.finish_reason is not None and not self.told
        if not (ends or self._text or (every_token and self._ids)):
            return None
        self.told = ends
        delta = Delta(self.index, self._text, self._ids, self._logprobs, self.finish_reason, self.stop_reason)
        self._text = ""
        self._ids = []
        if self._logprobs is not None:
            self._logprobs = []
        return delta

    def _decode_plain(self, ids: Sequence[int]) -> int:
        if ids:
            self._text += self._detokenizer.push(ids)
        return len(ids)

    def _decode_matching(self, matcher: StopMatcher, ids: Sequence[int]) -> int:
        """Token by token, so that the one that completes a match is known. Returns how many tokens are kept."""
        early = 0
        if self._min_tokens > self.count:
            early = self._decode_plain(ids[: self._min_tokens - self.count])
        for position, token in enumerate(ids[early:] if early else ids, early):
            text, matched = matcher.push(self._detokenizer.push((token,)))
            self._text += text
            if matched is not None:
                self._end(FinishReason.STOP, matched)
                self._owner.on_stop_string(self)
                return position + 1
        return len(ids)

    def _flush(self, finish: Finish) -> None:
        """Everything held back; the pending bytes of a cut character may still complete a stop string."""
        text, matched = self._detokenizer.flush(), None
        if self._matcher is not None:
            text, matched = self._matcher.push(text)
            text += self._matcher.flush()
        self._text += text
        if matched is not None:
            self._end(FinishReason.STOP, matched)
        else:
            self._end(finish.reason, finish.matched_token_id)

    def _end(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.closed = True
        self.finish_reason = reason
        self.stop_reason = stop_reason

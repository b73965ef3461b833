"""The life of one request in a gateway: placed, submitted, accepted, ended; and again elsewhere while none accepted it.

Callbacks only, no task: RouterClient decides, DataPlaneClient delivers, the frontend aborts, all on one loop.
"""

import asyncio
from collections.abc import Sequence
from enum import Enum

import msgspec

from nori_cluster.errors import (
    Cancelled,
    CapacityExceeded,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    ModelNotFound,
    NoriError,
    Overloaded,
    RateLimited,
)
from nori_cluster.frontend.backend import Started, TokenSink
from nori_cluster.routing.base import Finished, Place, Placement, Refusal, RefusalReason
from nori_cluster.rpc import convert
from nori_cluster.rpc.dataplane_client import DataPlaneClient, Entry, LinkState
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.router_client import RouterClient
from nori_cluster.types import FinishReason, Request

MAX_ATTEMPTS = 3  # placements of one request before anything was accepted
RETRY_AFTER = 1.0  # seconds, where nobody said better
DEADLINE_SLACK = 0.1  # seconds by which a group's clock may run ahead of ours


class Counts(msgspec.Struct):
    """For metrics. moved: placements that came to nothing before anything was accepted. lost: accepted sequences whose
    group broke."""

    placements: int = 0
    moved: int = 0
    lost: int = 0


class CallContext:
    """What a Call works with: the router, the links by group id, the counts."""

    def __init__(self, router: RouterClient, accept_timeout: float) -> None:
        self.router = router
        self.links: dict[str, DataPlaneClient] = {}
        self.counts = Counts()
        self.accept_timeout = accept_timeout
        self._last_request = 0

    def next_request(self) -> int:
        self._last_request += 1
        return self._last_request


class Stage(Enum):
    PLACING = 1
    SUBMITTED = 2
    ENDED = 3


class _Candidate:
    """The Receiver of one candidate. ended: its sink has heard the last word, or was aborted."""

    __slots__ = ("answered", "call", "ended", "entry", "index", "sink", "tokens")

    def __init__(self, call: "Call", index: int, sink: TokenSink) -> None:
        self.call = call
        self.index = index
        self.sink = sink
        self.tokens = sink.tokens
        self.entry: Entry | None = None
        self.answered = False  # accepted in this attempt
        self.ended = False

    def accepted(self) -> None:
        self.answered = True
        self.sink.accepted()
        self.call.settle()

    def started(self, start: Started) -> None:
        self.call.cached_tokens = max(self.call.cached_tokens, start.cached_tokens)
        self.sink.started(start)

    def finished(self, finish: pb.SequenceFinish) -> None:
        news = convert.finish_from_pb(finish)
        if news.reason is FinishReason.ERROR or news.reason is FinishReason.CANCELLED:
            self.fail(self.call.error_of(news.reason, finish.error_message))
        else:
            self.ended = True
            self.sink.finished(news)
        self.call.leave()

    def rejected(self, rejection: pb.Rejection) -> None:
        retryable = rejection.reason in (pb.REJECTION_REASON_QUEUE_FULL, pb.REJECTION_REASON_DRAINING)
        error = self.call.error_of_rejection(rejection)
        if retryable:
            self.call.set_back(self, error)
        else:
            self.fail(error)
            self.call.leave()

    def lost(self, reason: str) -> None:
        error = EngineFailure(f"worker group {self.call.group_id} was lost: {reason}")
        if self.answered:
            self.call.group_failed = True
            self.call.cluster.counts.lost += 1
            self.fail(error)
            self.call.leave()
        else:
            message = f"worker group {self.call.group_id} could not take the request: {reason}"
            self.call.set_back(self, Overloaded(message, retry_after=RETRY_AFTER))

    def fail(self, error: NoriError) -> None:
        self.ended = True
        self.sink.failed(error)


class Call:
    """A Submission. Owns the candidates of one request; at most one placement at a time."""

    def __init__(self, cluster: CallContext, request: Request, sinks: Sequence[TokenSink], context: int) -> None:
        self.cluster = cluster
        self.request = request
        self.group_id = ""
        self.group_failed = False
        self.cached_tokens = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._deadline = None if request.time_left is None else self._loop.time() + request.time_left
        wanted = request.sampling.max_tokens
        self._max_tokens = max(1, context - len(request.prompt_token_ids)) if wanted is None else wanted
        self._candidates = [_Candidate(self, index, sink) for index, sink in enumerate(sinks)]
        self._stage = Stage.PLACING
        self._attempt = 0
        self._number = 0  # of the current place
        self._link: DataPlaneClient | None = None
        self._set_back: list[tuple[_Candidate, NoriError]] = []
        self._timer: asyncio.TimerHandle | None = None

    # -- Submission -------------------------------------------------------------------------------------------------

    def abort(self, candidate: int) -> None:
        target = self._candidates[candidate]
        if target.ended:
            return
        target.ended = True
        if self._stage is Stage.PLACING:
            if all(c.ended for c in self._candidates):
                self._stage = Stage.ENDED
                self.cluster.router.cancel(self._number)
        elif self._stage is Stage.SUBMITTED:
            self._set_back = [item for item in self._set_back if item[0] is not target]
            if target.entry is not None and self._link is not None:
                self._link.abandon(target.entry)
            self.leave()

    # -- placing ----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        self._stage = Stage.PLACING
        self._number = self.cluster.next_request()
        for candidate in self._candidates:
            candidate.entry, candidate.answered = None, False
        request = self.request
        self.cluster.router.place(
            Place(
                request=self._number,
                model=request.model,
                tenant=request.tenant,
                priority=request.priority,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=self._max_tokens,
                candidates=sum(not c.ended for c in self._candidates),
                time_left=self._time_left(),
                lost_group_id=self.group_id,
                attempt=self._attempt,
            ),
            self._decided,
        )

    def refuse_later(self, error: NoriError) -> None:
        """News never comes before submit returned."""
        self._loop.call_soon(self._fail_all, error)

    def _decided(self, decision: Placement | Refusal) -> None:
        if isinstance(decision, Refusal):
            self._fail_all(self.error_of_refusal(decision))
            return
        self._attempt += 1
        self.cluster.counts.placements += 1
        self.group_id, self.group_failed = decision.group_id, False
        self._stage, self._set_back = Stage.SUBMITTED, []
        link = self.cluster.links.get(decision.group_id)
        live = [c for c in self._candidates if not c.ended]
        if link is None or link.state not in (LinkState.OPEN, LinkState.CONNECTING):
            error = Overloaded(f"worker group {decision.group_id} cannot be reached", retry_after=RETRY_AFTER)
            for candidate in live:
                self.set_back(candidate, error)
            return
        self._link = link
        sequences = convert.sequences_to_pb(
            self.request, max_tokens=self._max_tokens, order_key=decision.order_key, time_left=self._time_left()
        )
        entries = link.submit([sequences[c.index] for c in live], live)
        for candidate, entry in zip(live, entries, strict=True):
            candidate.entry = entry
        self._timer = self._loop.call_later(self.cluster.accept_timeout, self._not_accepted)

    # -- what candidates report -------------------------------------------------------------------------------------

    def set_back(self, candidate: _Candidate, error: NoriError) -> None:
        """A candidate was not accepted, but might be elsewhere."""
        self._set_back.append((candidate, error))
        self.settle()

    def settle(self) -> None:
        """Once every candidate has its answer: none accepted → another group; some → the others are refused."""
        live = [c for c in self._candidates if not c.ended]
        accepted = sum(c.answered for c in live)
        if self._stage is not Stage.SUBMITTED or accepted + len(self._set_back) < len(live):
            return
        self._stop_timer()
        if not self._set_back:
            return
        refused, self._set_back = self._set_back, []
        late = self._deadline is not None and self._loop.time() >= self._deadline
        if not accepted and not late and self._attempt < MAX_ATTEMPTS and all(not c.answered for c in self._candidates):
            self.cluster.counts.moved += 1
            self._release(failed=True)
            self.place()
            return
        self.group_failed = True
        for candidate, error in refused:
            candidate.fail(DeadlineExceeded("the deadline passed before a group took the request") if late else error)
        self.leave()

    def leave(self) -> None:
        """A candidate has ended. After the last one the reservation goes."""
        self.settle()
        if self._stage is Stage.SUBMITTED and all(c.ended for c in self._candidates):
            self._stop_timer()
            self._release(failed=self.group_failed)
            self._stage, self._link = Stage.ENDED, None

    def error_of(self, reason: FinishReason, message: str) -> NoriError:
        """Why a group ended a sequence that nobody here had aborted."""
        if self._deadline is not None and self._loop.time() >= self._deadline - DEADLINE_SLACK:
            return DeadlineExceeded(message or "the deadline passed while the request ran")
        if reason is FinishReason.CANCELLED:
            return Cancelled(message or "the worker group cancelled the request")
        return EngineFailure(message or "the worker group failed")

    def error_of_refusal(self, refusal: Refusal) -> NoriError:
        """The router's no as the client sees it: yours (4xx) or ours (503)."""
        message, retry_after = refusal.message, refusal.retry_after
        match refusal.reason:
            case RefusalReason.TENANT_LIMIT:
                return RateLimited(message, retry_after=retry_after)
            case RefusalReason.UNKNOWN_MODEL if not self._context:  # else only the router has not seen it (yet)
                return ModelNotFound(message, param="model")
            case RefusalReason.DEADLINE_PASSED:
                return DeadlineExceeded(message)
            case RefusalReason.TOO_LONG:
                return self._too_long(message)
        return Overloaded(message, retry_after=retry_after if retry_after is not None else RETRY_AFTER)

    def error_of_rejection(self, rejection: pb.Rejection) -> NoriError:
        message = rejection.message or "the worker group refused the request"
        param = rejection.param or None
        match rejection.reason:
            case pb.REJECTION_REASON_TOO_LONG:
                return self._too_long(message)
            case pb.REJECTION_REASON_INVALID:
                return ClientError(message, param=param)
            case pb.REJECTION_REASON_ADAPTER_NOT_LOADED:
                return ModelNotFound(message, param=param or "model")
            case pb.REJECTION_REASON_DEADLINE_PASSED:
                return DeadlineExceeded(message)
        given = convert.seconds(rejection.retry_after) if rejection.HasField("retry_after") else RETRY_AFTER
        return Overloaded(message, retry_after=given)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _too_long(self, message: str) -> NoriError:
        if len(self.request.prompt_token_ids) >= self._context:
            return ContextLengthExceeded(message, param="prompt")
        return CapacityExceeded(message, param="prompt")

    def _time_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._loop.time()

    def _not_accepted(self) -> None:
        """The group took too long: what it has not accepted is taken back and may go elsewhere."""
        self._timer = None
        error = Overloaded(
            f"worker group {self.group_id} did not answer in {self.cluster.accept_timeout:g} s", retry_after=RETRY_AFTER
        )
        refused = {id(candidate) for candidate, _ in self._set_back}
        for candidate in self._candidates:
            if not candidate.ended and not candidate.answered and id(candidate) not in refused:
                if candidate.entry is not None and self._link is not None:
                    self._link.abandon(candidate.entry)
                self.set_back(candidate, error)

    def _release(self, failed: bool) -> None:
        """Tell the router, once per placement."""
        output = sum(c.entry.count for c in self._candidates if c.entry is not None)
        prompt = len(self.request.prompt_token_ids) if output else 0
        cached = min(prompt, self.cached_tokens)
        self.cluster.router.finish(Finished(self._number, output, prompt - cached, cached, failed))

    def _fail_all(self, error: NoriError) -> None:
        self._stage = Stage.ENDED
        for candidate in self._candidates:
            if not candidate.ended:
                candidate.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

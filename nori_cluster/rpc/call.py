"""The life of one request in a gateway: placed, submitted, accepted, ended; and again elsewhere when its group is lost.

A continuation is a placement like the first, with what each candidate has said appended to the prompt: whoever reads
the stream sees nothing but a pause. No answer comes twice, for the old group's line is closed before.

Callbacks only, no task: RouterClient decides, DataPlaneClient delivers, the frontend aborts, all on one loop.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from enum import Enum

import msgspec

from nori_cluster.errors import (
    Cancelled,
    CapacityExceeded,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineFailure,
    ModelNotFound,
    NoReadyGroup,
    NoriError,
    Overloaded,
    QueueFull,
    RateLimited,
)
from nori_cluster.frontend.backend import Started, TokenSink
from nori_cluster.routing.base import Finished, Place, Placement, Refusal, RefusalReason
from nori_cluster.rpc import convert
from nori_cluster.rpc.dataplane_client import DataPlaneClient, Entry, LinkState
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.router_client import RouterClient
from nori_cluster.types import FinishReason, Request, TokenLogprob

MAX_ATTEMPTS = 3  # placements of one request before anything was accepted
MAX_CONTINUATIONS = 16  # of one request, after groups were lost
PATIENCE = 300.0  # seconds for which a continuation waits for a group, where the request has no deadline
RETRY_CONTINUATION = 0.25  # seconds between its tries
RETRY_AFTER = 1.0  # seconds, where nobody said better
_LATE = "the deadline passed before a group took the request"
_PASSING = (RefusalReason.NO_GROUP, RefusalReason.QUEUE_FULL, RefusalReason.UNKNOWN_MODEL)  # a restarted router's no
_ELSEWHERE = (
    pb.REJECTION_REASON_QUEUE_FULL,
    pb.REJECTION_REASON_DRAINING,
    pb.REJECTION_REASON_OTHER_WEIGHTS,  # it reloads: the router had not heard of it
)
DEADLINE_SLACK = 0.1  # seconds by which a group's clock may run ahead of ours


class Counts(msgspec.Struct):
    """For metrics. moved: placements that came to nothing before anything was accepted. lost: accepted sequences whose
    group broke. continued: requests that went on in another group, exact those in one of equal numerics_id.
    group_failures: (model, group, dead | stalled | line) → how often a group that took requests stopped to, or its line
    broke."""

    placements: int = 0
    moved: int = 0
    lost: int = 0
    continued: int = 0
    exact: int = 0
    group_failures: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)


class CallContext:
    """What a Call works with: the router, the links by group id, the counts."""

    def __init__(self, router: RouterClient, accept_timeout: float) -> None:
        self.router = router
        self.links: dict[str, DataPlaneClient] = {}
        self.patience = PATIENCE
        self.closed = False
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

    __slots__ = ("answered", "began", "call", "ended", "entry", "index", "said", "sink", "told")

    def __init__(self, call: "Call", index: int, sink: TokenSink) -> None:
        self.call = call
        self.index = index
        self.sink = sink
        self.said: list[int] = []  # every token so far, in all groups
        self.told = False  # the sink has heard `accepted`
        self.began = False  # and `started`
        self.entry: Entry | None = None
        self.answered = False  # accepted in this attempt
        self.ended = False

    def accepted(self) -> None:
        self.answered = True
        self.call.take_weights()
        if not self.told:
            self.told = True
            self.sink.accepted()
        self.call.settle()

    def started(self, start: Started) -> None:
        self.call.cached_tokens = max(self.call.cached_tokens, start.cached_tokens)
        if not self.began:
            self.began = True
            self.sink.started(msgspec.structs.replace(start, weights_id=self.call.weights))

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.said.extend(ids)
        self.sink.tokens(ids, logprobs)

    def finished(self, finish: pb.SequenceFinish) -> None:
        if finish.retryable:
            self.lost(finish.error_message or "it gave the request up")
            return
        news = convert.finish_from_pb(finish)
        if news.reason is FinishReason.ERROR or news.reason is FinishReason.CANCELLED:
            self.fail(self.call.error_of(news.reason, finish.error_message))
        else:
            self.ended = True
            self.sink.finished(news)
        self.call.leave()

    def rejected(self, rejection: pb.Rejection) -> None:
        retryable = rejection.reason in _ELSEWHERE
        error = self.call.error_of_rejection(rejection)
        if retryable:
            self.call.set_back(self, error)
        else:
            self.fail(error)
            self.call.leave()

    def lost(self, reason: str) -> None:
        if self.answered:
            self.answered = False
            self.call.cluster.counts.lost += 1
            self.call.interrupt(self, EngineFailure(f"worker group {self.call.group_id} was lost: {reason}"))
        else:
            message = f"worker group {self.call.group_id} could not take the request: {reason}"
            self.call.set_back(self, Overloaded(message, retry_after=RETRY_AFTER), soon=True)

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
        self.interruptions = 0  # groups lost under it
        self.weights = ""  # that what is said comes from
        self._numerics = ""  # of the first group
        self._waited_for = ""  # what the router last said to a continuation
        self._give_up: float | None = None  # when a continuation stops to look for a group
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
        self._resuming = False  # interrupted, and not placed again yet

    # -- Submission -------------------------------------------------------------------------------------------------

    def abort(self, candidate: int) -> None:
        target = self._candidates[candidate]
        if target.ended:
            return
        target.ended = True
        if self._stage is Stage.PLACING:
            if all(c.ended for c in self._candidates):
                self._stage = Stage.ENDED
                self._stop_timer()
                self.cluster.router.cancel(self._number)
        elif self._stage is Stage.SUBMITTED:
            self._set_back = [item for item in self._set_back if item[0] is not target]
            if target.entry is not None and self._link is not None:
                self._link.abandon(target.entry)
            self.leave()

    def take_weights(self) -> None:
        """A group has accepted a candidate: it speaks with the weights that the group holds now. Once it has spoken,
        they are those of the request: nothing goes on with others."""
        if not self._spoken and self._link is not None and self._link.description is not None:
            self.weights = self._link.description.weights_id

    @property
    def _spoken(self) -> bool:
        return any(candidate.began for candidate in self._candidates)

    # -- placing ----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        self._stage, self._timer = Stage.PLACING, None
        if self.cluster.closed:
            self._fail_all(Draining("the gateway is shutting down", retry_after=RETRY_AFTER))
            return
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
                prompt_tokens=len(request.prompt_token_ids) + max(len(c.said) for c in self._candidates),
                max_tokens=self._max_tokens,
                candidates=sum(not c.ended for c in self._candidates),
                time_left=self._time_left(),
                lost_group_id=self.group_id,
                numerics_id=self._numerics,
                weights_id=self.weights if self._spoken else "",
                attempt=self._attempt,
            ),
            self._decided,
        )

    def refuse_later(self, error: NoriError) -> None:
        """News never comes before submit returned."""
        self._loop.call_soon(self._fail_all, error)

    def _decided(self, decision: Placement | Refusal) -> None:
        if isinstance(decision, Refusal):
            if not self._wait_for_a_group(decision):
                late = self._deadline is not None and self._loop.time() >= self._deadline
                error = self.error_of_refusal(decision)
                self._fail_all(DeadlineExceeded(f"{_LATE}: {self._waited_for or error.message}") if late else error)
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
            self.request,
            max_tokens=self._max_tokens,
            order_key=decision.order_key,
            time_left=self._time_left(),
            outputs=[c.said for c in self._candidates],
            weights_id=self.weights if self._spoken else "",
        )
        entries = link.submit([sequences[c.index] for c in live], live)
        for candidate, entry in zip(live, entries, strict=True):
            candidate.entry = entry
        self._timer = self._loop.call_later(self.cluster.accept_timeout, self._not_accepted)

    def _wait_for_a_group(self, refusal: Refusal) -> bool:
        """A continuation that finds no group now looks again in a moment, while its time lasts."""
        now = self._loop.time()
        if self._give_up is None or now >= self._give_up or refusal.reason not in _PASSING:
            return False
        self._waited_for = refusal.message
        self._timer = self._loop.call_later(RETRY_CONTINUATION, self.place)
        return True

    # -- what candidates report -------------------------------------------------------------------------------------

    def interrupt(self, candidate: _Candidate, error: NoriError) -> None:
        """The group of an accepted candidate is lost; its siblings report in the same turn of the loop."""
        self._set_back.append((candidate, error))
        self.group_failed = True
        if self._give_up is None or not self._resuming:
            self._resuming = True
            self.interruptions += 1
            limit = self._loop.time() + self.cluster.patience
            self._give_up = limit if self._deadline is None else min(limit, self._deadline)
            self._loop.call_soon(self.settle)

    def set_back(self, candidate: _Candidate, error: NoriError, soon: bool = False) -> None:
        """A candidate was not accepted, but might be elsewhere. soon: its siblings report in this turn of the loop."""
        self._set_back.append((candidate, error))
        if soon:
            self._loop.call_soon(self.settle)
        else:
            self.settle()

    def settle(self) -> None:
        """Once every candidate has its answer: none accepted → another group; some → the others are refused."""
        live = [c for c in self._candidates if not c.ended]
        accepted = sum(c.answered for c in live)
        if self._stage is not Stage.SUBMITTED or accepted + len(self._set_back) < len(live):
            return
        self._stop_timer()
        if not self._set_back:
            self._went_on(live)
            return
        refused, self._set_back = self._set_back, []
        late = self._deadline is not None and self._loop.time() >= self._deadline
        if not accepted and not late and self._may_go_on():
            self.cluster.counts.moved += not self._resuming
            self._release(failed=True)
            self._retry()
            return
        self.group_failed = True
        for candidate, error in refused:
            candidate.fail(DeadlineExceeded(_LATE) if late else error)
        self.leave()

    def _may_go_on(self) -> bool:
        if self.cluster.closed:
            return False
        if self._give_up is None:
            return self._attempt < MAX_ATTEMPTS and all(not c.answered for c in self._candidates)
        return self.interruptions <= MAX_CONTINUATIONS and self._loop.time() < self._give_up

    def _retry(self) -> None:
        """To another group; a continuation that was just refused by one waits a moment."""
        self._stage = Stage.PLACING
        if self._give_up is None or self._resuming:
            self._resuming = False
            self.place()
        else:
            self._timer = self._loop.call_later(RETRY_CONTINUATION, self.place)

    def _went_on(self, live: Sequence[_Candidate]) -> None:
        """Every candidate is accepted. The first group's numerics_id is what continuations look for."""
        description = None if self._link is None else self._link.description
        numerics = "" if description is None else description.numerics_id
        if self._give_up is not None and live:
            self._give_up = None
            self.cluster.counts.continued += 1
            self.cluster.counts.exact += bool(numerics) and numerics == self._numerics
        self._numerics = self._numerics or numerics

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
        if reason is FinishReason.CANCELLED and message:  # the group ended it on purpose, and says why
            return Overloaded(message, retry_after=RETRY_AFTER)
        if reason is FinishReason.CANCELLED:
            return Cancelled(message or "the worker group cancelled the request")
        # A group that fails ends its line; what it ends with an error is one request that asks for the impossible.
        return ClientError(message or "the request cannot be answered")

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
        kind = QueueFull if refusal.reason is RefusalReason.QUEUE_FULL else NoReadyGroup
        return kind(message, retry_after=retry_after if retry_after is not None else RETRY_AFTER)

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

"""The data plane's server half, in the engine process: one Exchange stream per gateway, token ids only.

The step thread's news are split by gateway with array operations; each session merges what its gateway has not been
sent and writes it when the previous write completed. Nothing waits for a clock, nothing is dropped: a gateway too far
behind loses its stream, and with it its sequences.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.plan import FinishNews, StartNews, StepDeltas
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import ClientError, ContextLengthExceeded, EngineFailure, NoriError, Overloaded
from nori_cluster.rpc.cache_events import CacheEventLog
from nori_cluster.rpc.dataplane_codec import LogprobLists, LogprobRows, add_logprobs, describe, sequence_request
from nori_cluster.rpc.engine_thread import EngineThread, Load, News, Submitted
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.options import server_options
from nori_cluster.types import GroupSpec

log = logging.getLogger(__name__)

_DEFAULT_UNSENT = 1 << 20  # tokens a session may owe its gateway before it is cut


class OtherWeights(NoriError):
    """A sequence that began with other weights than the group holds."""

    def __init__(self, wanted: str, held: str) -> None:
        super().__init__(f"the answer began with weights {wanted}, this group holds {held}")


class Session:
    """One gateway's stream: its place in the key space and what it has not been sent yet."""

    def __init__(self, number: int, max_unsent: int) -> None:
        self.number = number
        self.max_unsent = max_unsent or _DEFAULT_UNSENT
        self.live: set[int] = set()  # keys
        self._control: list[pb.ExchangeResponse] = []
        self._deltas: list[tuple[StepDeltas, NDArray[np.intp] | None]] = []
        self._news: list[tuple[list[StartNews], list[FinishNews]]] = []
        self._unsent = 0
        self._wake = asyncio.Event()
        self.failure: NoriError | None = None

    def key(self, handle: int) -> int:
        return self.number << 32 | handle

    def control(self, message: pb.ExchangeResponse) -> None:
        self._control.append(message)
        self._wake.set()

    def deliver(
        self,
        deltas: StepDeltas,
        index: NDArray[np.intp] | None,
        starts: list[StartNews],
        finishes: list[FinishNews],
    ) -> None:
        """News of one step; index: which of the deltas' keys are this session's (None = all)."""
        for finish in finishes:
            self.live.discard(finish.key)
        if self.failure is not None:
            return  # the stream ends, and with it all that is live
        self._deltas.append((deltas, index))
        self._news.append((starts, finishes))
        self._unsent += len(deltas.ids) if index is None else int(deltas.counts[index].sum())
        if self._unsent > self.max_unsent:
            self._control, self._deltas, self._news = [], [], []
            self.fail(Overloaded("the gateway reads too slowly; its sequences are dropped"))
        self._wake.set()

    def fail(self, error: NoriError) -> None:
        """Ends the stream with this error, after what is still to be sent."""
        self.failure = self.failure or error
        self._wake.set()

    async def next_messages(self) -> list[pb.ExchangeResponse]:
        """Waits until there is something; returns all of it, step outputs merged. Raises the failure if it broke."""
        await self._wake.wait()
        self._wake.clear()
        if self.failure is not None:
            if not (self._control or self._deltas):
                raise self.failure
            self._wake.set()
        messages, self._control = self._control, []
        output = self.take_step_output()
        if output is not None:
            messages.append(pb.ExchangeResponse(step_output=output))
        return messages

    def take_step_output(self) -> pb.StepOutput | None:
        """All unsent news of steps in one message."""
        deltas, self._deltas = self._deltas, []
        news, self._news = self._news, []
        self._unsent = 0
        return _step_output(deltas, news) if deltas else None


def _handles(keys: NDArray[np.int64]) -> list[int]:
    handles: list[int] = (keys & 0xFFFFFFFF).tolist()
    return handles


def _step_output(
    deltas: list[tuple[StepDeltas, NDArray[np.intp] | None]],
    news: list[tuple[list[StartNews], list[FinishNews]]],
) -> pb.StepOutput:
    """One message from the news of one or more consecutive steps."""
    output = pb.StepOutput(first_step=deltas[0][0].step, last_step=deltas[-1][0].step)
    shares = [(step, *_share(step, index)) for step, index in deltas]
    several = any((counts != 1).any() for _, _, counts, _, _ in shares)
    for step, keys, counts, ids, rows in shares:
        handles = _handles(keys)
        output.handles.extend(handles)
        output.token_ids.extend(ids.tolist())
        if several:
            output.token_counts.extend(counts.tolist())
        if step.logprobs is not None:
            LogprobRows(step.logprobs).add_to(output, rows.tolist(), handles, counts.tolist())
    for starts, finishes in news:
        for start in starts:
            message = output.starts.add(handle=start.key & 0xFFFFFFFF, cached_tokens=start.cached_tokens)
            message.queue_time.FromNanoseconds(int(start.queue_time * 1e9))
            if start.prompt_logprobs is not None:
                lists = LogprobLists(start.prompt_logprobs)
                add_logprobs(message.prompt_logprobs, lists, range(len(lists.chosen)))
        for finish in finishes:
            output.finishes.add(
                handle=finish.key & 0xFFFFFFFF,
                reason=finish.reason.value,
                matched_token_id=finish.matched_token_id,
                error_message=finish.error,
                accepted_draft_tokens=finish.accepted_drafts,
                proposed_draft_tokens=finish.proposed_drafts,
                retryable=finish.retryable,
            )
    return output


def _share(
    step: StepDeltas, index: NDArray[np.intp] | None
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Keys, counts, ids and rows of one session's part of a step."""
    if index is None:
        return step.keys, step.counts, step.ids, step.rows
    keys, counts, rows = step.keys[index], step.counts[index], step.rows[index]
    if (step.counts == 1).all():
        return keys, counts, step.ids[index], rows
    ids = np.split(step.ids, np.cumsum(step.counts)[:-1])
    return keys, counts, np.concatenate([ids[i] for i in index]) if len(index) else step.ids[:0], rows


class DataplaneServer(pb_grpc.WorkerGroupServiceServicer):
    """Serves one EngineCore. `on_failure` is called once, on the loop, when the engine is lost."""

    def __init__(
        self,
        core: EngineCore,
        spec: GroupSpec,
        group_id: str,
        incarnation: int,
        on_failure: Callable[[EngineFailure], None],
    ) -> None:
        self._spec = spec
        self._group_id = group_id
        self._incarnation = incarnation
        self._on_failure = on_failure
        self._sessions: dict[int, Session] = {}
        self._orphans: set[int] = set()  # keys whose stream ended before them; their abort is on its way
        self._next_session = 1
        self._max_num_seqs = core.scheduler.config.max_num_seqs
        self._description = describe(spec, self._max_num_seqs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: grpc.aio.Server | None = None
        self._engine = EngineThread(core, self._from_engine)
        self.cache_log = CacheEventLog()
        self.draining = False
        self.failure: EngineFailure | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the bound port. OSError when the port is taken."""
        self._loop = asyncio.get_running_loop()
        self._server = grpc.aio.server(options=server_options())
        pb_grpc.add_WorkerGroupServiceServicer_to_server(self, self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot bind the data plane to {host}:{port}: {error}") from error
        await self._server.start()
        self._engine.start()
        return int(bound)

    async def stop(self, grace: float = 0.0) -> None:
        if self._server is not None:
            await self._server.stop(grace)
        await asyncio.to_thread(self._engine.stop)

    @property
    def load(self) -> Load:
        return self._engine.load

    @property
    def open_sequences(self) -> int:
        """Sequences not yet reported as ended."""
        return len(self._orphans) + sum(len(session.live) for session in self._sessions.values())

    def hand_over(self) -> None:
        """Give up every open sequence; their gateways go on with them in other groups."""
        self._engine.abort(self._open(), retryable=True)

    def abort_all(self, reason: str) -> None:
        """End every open sequence; `reason` is the error its client sees."""
        self._engine.abort(self._open(), reason=reason)

    def _open(self) -> list[int]:
        return [key for session in self._sessions.values() for key in session.live]

    async def reload(self, load: Callable[[], GroupSpec]) -> GroupSpec:
        """Run `load` on the step thread, and serve what it returns. Only while draining, with no sequence open.

        Overloaded when some are; else what `load` raises: EngineFailure ends the group, others change nothing.
        """
        assert self.draining
        if left := self.open_sequences:
            raise Overloaded(f"{left} sequences of the group still run")
        if self.failure is not None:
            raise self.failure
        self._spec = await asyncio.wrap_future(self._engine.reload(load))
        self._description = describe(self._spec, self._max_num_seqs)
        for session in self._sessions.values():
            session.control(pb.ExchangeResponse(welcome=self._welcome()))
        return self._spec

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(group_id=self._group_id, group_incarnation=self._incarnation, description=self._description)

    # -- from the step thread ---------------------------------------------------------------------------------------

    def _from_engine(self, news: News) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:
            log.debug("news of a step after the event loop ended")

    def _deliver(self, news: News) -> None:
        if isinstance(news, Submitted):
            self._answer(news)
        elif isinstance(news, EngineFailure):
            self._fail(news)
        else:
            if news.cache_events is not None:
                self.cache_log.append(news.cache_events)
            self._split(news)

    def _fail(self, failure: EngineFailure) -> None:
        self.failure = failure
        for session in self._sessions.values():
            session.fail(failure)
        self._on_failure(failure)

    def _split(self, deltas: StepDeltas) -> None:
        """Each session's share of a step."""
        starts: dict[int, list[StartNews]] = {}
        finishes: dict[int, list[FinishNews]] = {}
        for start in deltas.starts:
            starts.setdefault(start.key >> 32, []).append(start)
        for finish in deltas.finishes:
            finishes.setdefault(finish.key >> 32, []).append(finish)
        numbers = deltas.keys >> 32
        touched = {*np.unique(numbers).tolist(), *starts, *finishes}
        for number in touched:
            session = self._sessions.get(number)
            if session is None:  # its gateway left
                self._orphans.difference_update(finish.key for finish in finishes.get(number, []))
                continue
            index = None if len(touched) == 1 else np.flatnonzero(numbers == number)
            session.deliver(deltas, index, starts.get(number, []), finishes.get(number, []))

    def _answer(self, news: Submitted) -> None:
        accepted: dict[int, list[int]] = {}
        for key in news.accepted:
            accepted.setdefault(key >> 32, []).append(key & 0xFFFFFFFF)
        for number, handles in accepted.items():
            if session := self._sessions.get(number):
                session.control(pb.ExchangeResponse(accepted=pb.Accepted(handles=handles)))
        for key, error in news.refused:
            self._orphans.discard(key)
            if session := self._sessions.get(key >> 32):
                session.live.discard(key)
                session.control(rejection([key & 0xFFFFFFFF], error))

    # -- from gateways ----------------------------------------------------------------------------------------------

    async def DescribeGroup(self, request: pb.DescribeGroupRequest, context: Any) -> pb.DescribeGroupResponse:
        load = self.load
        state = pb.GROUP_STATE_DRAINING if self.draining else pb.GROUP_STATE_READY
        return pb.DescribeGroupResponse(
            group_id=self._group_id,
            group_incarnation=self._incarnation,
            description=self._description,
            state=pb.GROUP_STATE_FAILED if self.failure else state,
            load=pb.GroupLoad(
                running_sequences=load.running,
                waiting_sequences=load.waiting,
                waiting_prefill_tokens=load.waiting_tokens,
                free_kv_blocks=load.free_blocks,
                tokens_per_second=load.tokens_per_second,
            ),
        )

    async def StreamCacheEvents(
        self, request: pb.StreamCacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.StreamCacheEventsResponse]:
        async for change in self.cache_log.follow(request.after_sequence):
            yield pb.StreamCacheEventsResponse(
                sequence=change.sequence,
                snapshot=change.snapshot,
                stored_block_hashes=change.stored,
                removed_block_hashes=change.removed,
            )

    async def Exchange(
        self, requests: AsyncIterator[pb.ExchangeRequest], context: Any
    ) -> AsyncIterator[pb.ExchangeResponse]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("command") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
            return
        if self.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(self.failure))
        session = Session(self._next_session, first.hello.max_unsent_tokens)
        self._next_session += 1
        self._sessions[session.number] = session
        reader = asyncio.create_task(self._read(session, requests))
        reader.add_done_callback(functools.partial(_reader_ended, session))
        try:
            yield pb.ExchangeResponse(welcome=self._welcome())
            while True:
                for message in await session.next_messages():
                    yield message
        except NoriError as failure:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(failure))
        finally:
            reader.cancel()
            del self._sessions[session.number]
            if session.live:
                self._orphans |= session.live
                self._engine.abort(list(session.live))

    async def _read(self, session: Session, requests: AsyncIterator[pb.ExchangeRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("command")
            if kind == "submit":
                self._submit(session, request.submit.sequences)
            elif kind == "abort":
                self._engine.abort([session.key(handle) for handle in request.abort.handles])
            elif kind == "ping":
                session.control(pb.ExchangeResponse(pong=pb.Pong(nonce=request.ping.nonce)))
            elif kind == "hello":
                session.fail(ClientError("Hello may come once only"))
            # an unset oneof is a newer peer's command: ignored on the stream

    def _submit(self, session: Session, messages: Sequence[pb.SequenceRequest]) -> None:
        requests: list[SequenceRequest] = []
        families = Counter(message.prompt_group for message in messages)
        for message in messages:
            several = families[message.prompt_group] > 1
            key = session.key(message.handle)
            try:
                if self.draining:
                    raise Overloaded("the group is draining", retry_after=1.0)
                if message.weights_id and message.weights_id != self._spec.weights_id:
                    raise OtherWeights(message.weights_id, self._spec.weights_id)
                if key in session.live:
                    raise ClientError(f"handle {message.handle} is in use", param="handle")
                siblings = session.key(message.prompt_group) if several else None
                requests.append(sequence_request(message, key, self._spec, siblings))
            except NoriError as error:
                session.control(rejection([message.handle], error, draining=self.draining))
            else:
                session.live.add(key)
        if requests:
            self._engine.submit(requests)


def _reader_ended(session: Session, reader: asyncio.Task[None]) -> None:
    """Nobody would read on: a bug there ends the stream, so that its gateway need not wait."""
    if session.failure is not None or reader.cancelled():
        return  # the stream was ended on purpose
    if (bug := reader.exception()) is not None:
        log.error("reading a gateway's stream failed", exc_info=bug)
        session.fail(EngineFailure(f"the group failed to read the stream: {type(bug).__name__}: {bug}"))


def rejection(handles: list[int], error: NoriError, draining: bool = False) -> pb.ExchangeResponse:
    """The refusal of sequences that were never scheduled."""
    reason = pb.REJECTION_REASON_INVALID
    if isinstance(error, OtherWeights):
        reason = pb.REJECTION_REASON_OTHER_WEIGHTS
    elif isinstance(error, Overloaded):
        reason = pb.REJECTION_REASON_DRAINING if draining else pb.REJECTION_REASON_QUEUE_FULL
    elif isinstance(error, ContextLengthExceeded) or error.code == "kv_capacity_exceeded":
        reason = pb.REJECTION_REASON_TOO_LONG
    message = pb.Rejection(handles=handles, reason=reason, message=str(error), param=error.param or "")
    if error.retry_after is not None:
        message.retry_after.FromNanoseconds(int(error.retry_after * 1e9))
    return pb.ExchangeResponse(rejection=message)

"""A gateway's line to one group: one Exchange stream; handles, batched Submits and Aborts, dispatch of StepOutputs.

Per token: one dict lookup and one method call of the TokenSink. When the stream breaks, every open handle is told so
exactly once, and a new stream is tried with backoff.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import grpc
import msgspec

from nori_cluster.frontend.backend import Started
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import EOF, StreamCall
from nori_cluster.rpc.options import client_options
from nori_cluster.types import TokenLogprob

log = logging.getLogger(__name__)

MAX_HANDLE = (1 << 32) - 1
MAX_SUBMIT_TOKENS = 1 << 20  # prompt tokens in one message
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 2.0


class DataPlaneTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. connect: from dialing to Welcome. A group silent for ping_interval is pinged, and lost ping_timeout
    after that."""

    connect: float = 3.0
    ping_interval: float = 1.0
    ping_timeout: float = 4.0


class LinkState(Enum):
    CONNECTING = "connecting"  # never open so far
    OPEN = "open"
    LOST = "lost"  # the last attempt failed or the stream broke; trying again
    CLOSED = "closed"


class Receiver(Protocol):
    """Told of one sequence: accepted, started, tokens*, then one of finished | rejected | lost. Must not raise."""

    def accepted(self) -> None: ...
    def started(self, start: Started) -> None: ...
    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None: ...
    def finished(self, finish: pb.SequenceFinish) -> None: ...
    def rejected(self, rejection: pb.Rejection) -> None: ...
    def lost(self, reason: str) -> None: ...


class _Nobody:
    """Receives what still comes for an abandoned sequence."""

    def accepted(self) -> None: ...
    def started(self, start: Started) -> None: ...
    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None: ...
    def finished(self, finish: pb.SequenceFinish) -> None: ...
    def rejected(self, rejection: pb.Rejection) -> None: ...
    def lost(self, reason: str) -> None: ...


_NOBODY = _Nobody()


class Entry:
    """A live handle. deliver: where tokens go. count: tokens received."""

    __slots__ = ("count", "deliver", "handle", "receiver")

    def __init__(
        self, handle: int, receiver: Receiver, deliver: Callable[[Sequence[int], Sequence[TokenLogprob] | None], None]
    ) -> None:
        self.handle = handle
        self.receiver = receiver
        self.deliver = deliver
        self.count = 0


class _ProtocolError(Exception):
    """The group sent what makes no sense; the stream is given up."""


class DataPlaneClient:
    """Belongs to one loop. on_state is called after every change of `state`."""

    def __init__(
        self,
        group_id: str,
        address: str,
        gateway_id: str,
        gateway_incarnation: int,
        on_state: Callable[["DataPlaneClient"], None],
        *,
        times: DataPlaneTimes = DataPlaneTimes(),
    ) -> None:
        self.group_id = group_id
        self.address = address
        self.state = LinkState.CONNECTING
        self.incarnation = 0
        self.description: pb.GroupDescription | None = None
        self.messages = 0
        self._hello = pb.Hello(
            gateway_id=gateway_id, gateway_incarnation=gateway_incarnation, features=[pb.FEATURE_LOGPROBS]
        )
        self._on_state = on_state
        self._times = times
        self._entries: dict[int, Entry] = {}
        self._free: list[int] = []
        self._next_handle = 1
        self._submits: list[pb.SequenceRequest] = []
        self._aborts: dict[int, None] = {}  # handles in order; none that came free since
        self._ping_due = False
        self._pings = 0
        self._wake = asyncio.Event()
        self._heard = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Open handles are told that they are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._set_state(LinkState.CLOSED)
        self._break("the connection was closed")

    @property
    def open_sequences(self) -> int:
        """Handles in use, abandoned ones the group has not yet confirmed included."""
        return len(self._entries)

    # -- commands ---------------------------------------------------------------------------------------------------

    def submit(self, sequences: Sequence[pb.SequenceRequest], receivers: Sequence[Receiver]) -> list[Entry]:
        """Start the sequences of one request (handles are filled in here). While the link connects they wait."""
        assert self.state in (LinkState.OPEN, LinkState.CONNECTING)
        handles = self._allocate(len(sequences))
        entries = []
        for handle, sequence, receiver in zip(handles, sequences, receivers, strict=True):
            sequence.handle = handle
            sequence.prompt_group = handles[0]
            entry = self._entries[handle] = Entry(handle, receiver, receiver.tokens)
            entries.append(entry)
        self._submits += sequences
        self._wake.set()
        return entries

    def abandon(self, entry: Entry) -> None:
        """Abort a sequence: its receiver hears nothing more. The handle stays taken until the group has confirmed."""
        if self._entries.get(entry.handle) is not entry:
            return
        entry.receiver, entry.deliver = _NOBODY, _NOBODY.tokens
        unsent = next((i for i, sequence in enumerate(self._submits) if sequence.handle == entry.handle), None)
        if unsent is None:
            self._aborts[entry.handle] = None
            self._wake.set()
        else:
            del self._submits[unsent]
            self._release(entry.handle)

    def _allocate(self, count: int) -> range | list[int]:
        """Consecutive handles for the candidates of a request."""
        if count == 1 and self._free:
            return [self._free.pop()]
        while True:
            if self._next_handle + count > MAX_HANDLE:
                self._next_handle = 1
                self._free.clear()
            handles = range(self._next_handle, self._next_handle + count)
            self._next_handle += count
            if not any(handle in self._entries for handle in handles):
                return handles

    def _release(self, handle: int) -> None:
        del self._entries[handle]
        self._aborts.pop(handle, None)  # its finish was faster; an Abort now would hit the handle's next owner
        self._free.append(handle)

    # -- the stream -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            was_open = False
            try:
                async with grpc.aio.insecure_channel(self.address, options=client_options()) as channel:
                    call: StreamCall = pb_grpc.WorkerGroupServiceStub(channel).Exchange()
                    await self._shake_hands(call)
                    was_open = True
                    reason = await self._serve(call)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
            except TimeoutError:
                reason = f"no Welcome in {self._times.connect:g} s"
            except (_ProtocolError, asyncio.InvalidStateError) as error:
                reason = str(error)
            level = logging.WARNING if was_open or self.state is LinkState.CONNECTING else logging.DEBUG
            log.log(level, "group %s at %s: %s", self.group_id, self.address, reason)
            self._set_state(LinkState.LOST)
            self._break(reason)
            backoff = FIRST_BACKOFF if was_open else min(2 * backoff, LAST_BACKOFF)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _shake_hands(self, call: StreamCall) -> None:
        async with asyncio.timeout(self._times.connect):
            await call.write(pb.ExchangeRequest(hello=self._hello))
            message: Any = await call.read()
        if message is EOF or message.WhichOneof("event") != "welcome":
            raise _ProtocolError("no Welcome")
        if message.welcome.group_id != self.group_id:
            raise _ProtocolError(f"group {message.welcome.group_id!r} answers at this address")
        self.incarnation = message.welcome.group_incarnation
        self.description = message.welcome.description
        self._heard = asyncio.get_running_loop().time()
        self._set_state(LinkState.OPEN)

    async def _serve(self, call: StreamCall) -> str:
        """Read and write until the stream ends; says why it did."""
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        watch = asyncio.create_task(self._watch())
        tasks = (reader, writer, watch)
        try:
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if watch.done() and isinstance(ends[2], str):
            return ends[2]
        if isinstance(ends[0], Exception):
            raise ends[0]
        return "the group ended the stream"

    async def _read(self, call: StreamCall) -> None:
        time = asyncio.get_running_loop().time
        while True:
            message: Any = await call.read()
            if message is EOF:
                return
            self._heard = time()
            self.messages += 1
            kind = message.WhichOneof("event")
            if kind == "step_output":
                self._step_output(message.step_output)
            elif kind == "accepted":
                for handle in message.accepted.handles:
                    entry = self._entries.get(handle)
                    if entry is not None:
                        entry.receiver.accepted()
            elif kind == "rejection":
                self._rejection(message.rejection)
            elif kind == "welcome":  # the group holds other weights
                self.description = message.welcome.description

    async def _write(self, call: StreamCall) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._submits:
                await call.write(pb.ExchangeRequest(submit=pb.Submit(sequences=self._next_submits())))
            if self._aborts:
                aborts, self._aborts = self._aborts, {}
                await call.write(pb.ExchangeRequest(abort=pb.Abort(handles=aborts)))
            if self._ping_due:
                self._ping_due = False
                self._pings += 1
                await call.write(pb.ExchangeRequest(ping=pb.Ping(nonce=self._pings)))

    def _next_submits(self) -> list[pb.SequenceRequest]:
        """All that waits, cut where a message would grow too long."""
        tokens = 0
        for count, sequence in enumerate(self._submits):
            tokens += len(sequence.prompt_token_ids)
            if tokens > MAX_SUBMIT_TOKENS and count:
                head, self._submits = self._submits[:count], self._submits[count:]
                return head
        head, self._submits = self._submits, []
        return head

    async def _watch(self) -> str:
        """Ping a silent group; returns when it stays silent."""
        times, loop = self._times, asyncio.get_running_loop()
        pinged = False
        while True:
            silent = loop.time() - self._heard
            if silent < times.ping_interval:
                pinged = False
            elif not pinged:
                pinged = self._ping_due = True
                self._wake.set()
            elif silent >= times.ping_interval + times.ping_timeout:
                return f"no answer to a ping in {times.ping_timeout:g} s"
            await asyncio.sleep(min(times.ping_interval, times.ping_timeout) / 4)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Only a bug ends the task by itself: its requests must still end."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the line to group %s failed", self.group_id, exc_info=task.exception())
            self._set_state(LinkState.LOST)
            self._break("internal error in the gateway")

    def _set_state(self, state: LinkState) -> None:
        if self.state is not state and self.state is not LinkState.CLOSED:
            self.state = state
            self._on_state(self)

    def _break(self, reason: str) -> None:
        entries, self._entries = self._entries, {}
        self._free, self._submits, self._aborts = [], [], {}
        for entry in entries.values():
            entry.receiver.lost(reason)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def _step_output(self, output: pb.StepOutput) -> None:
        entries = self._entries
        for start in output.starts:
            entry = entries.get(start.handle)
            if entry is not None:
                entry.receiver.started(convert.started_from_pb(start))
        if output.logprobs or output.token_counts:
            self._counted_tokens(output)
        else:
            if len(output.handles) != len(output.token_ids):
                raise _ProtocolError(f"{len(output.handles)} handles with {len(output.token_ids)} tokens")
            # zip of one iterable makes the 1-tuples without a line of Python; measured 0.2 us per token, sink included
            for entry, ids in zip(map(entries.get, output.handles), zip(output.token_ids, strict=True), strict=True):
                if entry is not None:
                    entry.count += 1
                    entry.deliver(ids, None)
        for finish in output.finishes:
            entry = entries.get(finish.handle)
            if entry is not None:
                self._release(finish.handle)
                entry.receiver.finished(finish)

    def _counted_tokens(self, output: pb.StepOutput) -> None:
        """Several tokens per handle, or logprobs beside them. A merged output may name a handle several times."""
        ids = list(output.token_ids)
        counts = output.token_counts or [1] * len(output.handles)
        if len(counts) != len(output.handles) or sum(counts) != len(ids):
            raise _ProtocolError(f"{len(output.handles)} handles, {len(counts)} counts, {len(ids)} tokens")
        logprobs: dict[int, list[TokenLogprob]] = {}
        for item in output.logprobs:
            logprobs.setdefault(item.handle, []).extend(convert.logprobs_from_pb(item.logprobs))
        start = 0
        for handle, count in zip(output.handles, counts, strict=True):
            entry = self._entries.get(handle)
            if entry is not None and count:
                entry.count += count
                waiting = logprobs.get(handle)
                taken = None
                if waiting is not None:
                    taken, logprobs[handle] = waiting[:count], waiting[count:]
                entry.deliver(ids[start : start + count], taken)
            start += count

    def _rejection(self, rejection: pb.Rejection) -> None:
        for handle in rejection.handles:
            entry = self._entries.get(handle)
            if entry is not None:
                self._release(handle)
                entry.receiver.rejected(rejection)

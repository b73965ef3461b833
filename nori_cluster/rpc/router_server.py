"""The router's edge: gateways' Coordinate and groups' Register streams in, routing.Router decides, answers go out.

Runs in any asyncio loop (a Ray async actor's too); all state belongs to that loop. Answers to a gateway merge while its
previous write is under way.
"""

import asyncio
import logging
import time
from typing import Any

import grpc
import msgspec

from nori_cluster.config import RouterConfig
from nori_cluster.errors import ClientError
from nori_cluster.routing import POLICIES
from nori_cluster.routing.base import GroupState, GroupView, Placement, Refusal, Restarts
from nori_cluster.routing.router import Router
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as pb
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import EOF, Context
from nori_cluster.rpc.options import server_options
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
TICK_SECONDS = 0.1
STOP_SECONDS = 0.5  # for streams to end by themselves
DISPLACED = "another registration of this group took over"


class RouterTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. report: a group silent for longer is dead; stalled: for longer, and it gets no new work. gateway_grace:
    how long the reservations of a gateway whose stream broke still count. load: least time between two tables that
    differ in load only. settle: after a start, places wait this long for groups to register. forget: dead groups leave
    the table."""

    report: float = 5.0
    stalled: float = 1.5
    gateway_grace: float = 10.0
    load: float = 0.5
    settle: float = 3.0
    forget: float = 60.0


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """silent_for: seconds since its last report."""

    view: GroupView
    reserved_requests: int
    silent_for: float


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """open_requests: placed and not finished. silent_for: seconds since its last message."""

    gateway_id: str
    open_requests: int
    connected: bool
    silent_for: float


class RouterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller reads. waiting: places without a group."""

    epoch: int
    groups: tuple[GroupStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    waiting: int


class _Session:
    """One gateway's stream. What is to be written lies here until the writer takes all of it."""

    def __init__(self, hello: pb.Hello) -> None:
        self.gateway_id = hello.gateway_id
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.placements: list[Placement] = []
        self.refusals: list[Refusal] = []
        self.table_due = True
        self.wake = asyncio.Event()
        self.heard = time.monotonic()

    def end(self) -> None:
        """A newer stream took over, or the server stops."""
        if not self.ended.done():
            self.ended.set_result(None)

    def take(self) -> tuple[list[Placement], list[Refusal], bool]:
        out = self.placements, self.refusals, self.table_due
        self.placements, self.refusals, self.table_due = [], [], False
        return out


class _Registration:
    """One group's stream."""

    def __init__(self, group_id: str, incarnation: int) -> None:
        self.group_id = group_id
        self.incarnation = incarnation
        self.heard = time.monotonic()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why, if not by the group

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class RouterServer(pb_grpc.RouterServiceServicer):
    """Servicer and owner of the Router. start and stop belong to one loop."""

    def __init__(self, config: RouterConfig = RouterConfig(), *, times: RouterTimes = RouterTimes()) -> None:
        self.times = times
        self.port = 0
        self._router = Router(
            POLICIES[config.policy],
            max_waiting=config.max_num_queued_reqs,
            max_waiting_tokens=config.max_num_queued_tokens,
            priority_aging=config.priority_aging,
            order_base=round((time.time() - time.monotonic()) * 1e6),
            settle_until=time.monotonic() + times.settle,
        )
        self._sessions: dict[str, _Session] = {}
        self._gone: dict[str, float] = {}  # gateways without a stream → since when
        self._registrations: dict[str, _Registration] = {}
        self._dead: dict[str, float] = {}  # groups → since when
        self._stopping = False
        self._told_epoch = 0
        self._told_full = False
        self._loads_changed = False
        self._loads_told = 0.0
        self._restarts: Restarts | None = None  # until the controller told
        self._table: pb.Table | None = None
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve; port 0 lets the system choose. Returns the bound port."""
        server = grpc.aio.server(options=server_options())
        pb_grpc.add_RouterServiceServicer_to_server(self, server)
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self._server, self.port = server, bound
        self._ticker = background(self._tick(), "the router's clock")
        log.info("router listens on %s:%d", host, bound)
        return bound

    async def stop(self) -> None:
        """Ends every stream; gateways go on with their last table."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._stopping = True
        for session in self._live():
            session.end()
        for stream in self._registrations.values():
            stream.end("the router stops")
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)

    def snapshot(self) -> RouterSnapshot:
        now = time.monotonic()
        table = self._router.table
        groups = []
        for view in self._router.views():
            entry = table.groups[view.group_id]
            stream = self._registrations.get(view.group_id)
            heard = stream.heard if stream is not None else self._dead.get(view.group_id, now)
            held = len(entry.running) + len(entry.waiting)
            groups.append(GroupStatus(view=view, reserved_requests=held, silent_for=now - heard))
        gateways = [
            GatewayStatus(
                gateway_id=gateway_id,
                open_requests=len(table.of_gateway(gateway_id)),
                connected=gateway_id in self._sessions,
                silent_for=now - heard,
            )
            for gateway_id, heard in sorted({**self._gone, **{s.gateway_id: s.heard for s in self._live()}}.items())
        ]
        waiting = len(self._router.queue)
        return RouterSnapshot(epoch=table.epoch, groups=tuple(groups), gateways=tuple(gateways), waiting=waiting)

    def set_draining(self, group_id: str, draining: bool) -> bool:
        """No new work for the group (or again). False when the group is not known."""
        found = self._router.set_draining(group_id, draining, time.monotonic())
        self._deliver()
        return found

    def set_restarts(self, restarts: Restarts) -> None:
        """What the controller counts; every gateway is told when it changed."""
        if restarts != self._restarts:
            self._restarts = restarts
            self._told_epoch = 0
            self._deliver()

    # -- gateways ---------------------------------------------------------------------------------------------------

    async def Coordinate(self, request_iterator: object, context: Context) -> None:
        first = await context.read()
        if first is EOF:
            return
        if not first.HasField("hello") or not first.hello.gateway_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello with a gateway_id")
        session = self._open(first.hello)
        reader = asyncio.create_task(self._read(session, first, context))
        writer = asyncio.create_task(self._write(session, context))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, session.ended}
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        finally:
            reader.cancel()
            writer.cancel()
            self._close(session)
            refused, failed = await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(failed, Exception):
            log.info("write to gateway %s failed: %s", session.gateway_id, failed)
        if isinstance(refused, str) and refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refused)
        if isinstance(refused, Exception):
            raise refused

    async def _read(self, session: _Session, first: pb.CoordinateRequest, context: Context) -> str:
        """Until the stream ends; the reason when the gateway breaks the protocol."""
        message: Any = first
        while message is not EOF:
            refused = self._take_in(session, message)
            if refused:
                return refused
            message = await context.read()
        return ""

    def _live(self) -> list[_Session]:
        return list(self._sessions.values())

    def _open(self, hello: pb.Hello) -> _Session:
        session = _Session(hello)
        old = self._sessions.get(hello.gateway_id)
        self._sessions[hello.gateway_id] = session
        self._gone.pop(hello.gateway_id, None)
        if old is not None:
            old.end()
        self._told_epoch = 0  # the number of gateways is part of the table
        log.info("gateway %s connected with %d open requests", hello.gateway_id, len(hello.open_requests))
        return session

    def _close(self, session: _Session) -> None:
        if self._sessions.get(session.gateway_id) is not session:
            return  # a newer stream of the same gateway took over
        now = time.monotonic()
        del self._sessions[session.gateway_id]
        self._gone[session.gateway_id] = now
        self._router.suspend_gateway(session.gateway_id, now)
        self._told_epoch = 0
        self._deliver()
        log.info("gateway %s disconnected", session.gateway_id)

    def _take_in(self, session: _Session, message: pb.CoordinateRequest) -> str:
        """Apply one message; the reason when it breaks the protocol. A cancel may be of a place beside it."""
        now = session.heard = time.monotonic()
        gateway_id, router = session.gateway_id, self._router
        if message.HasField("hello"):
            held = [convert.open_request_from_pb(item) for item in message.hello.open_requests]
            router.hello(gateway_id, held, now)
        if message.HasField("reach"):
            router.set_unreachable(gateway_id, frozenset(message.reach.unreachable_group_ids), now)
        for finished in message.finished:
            router.finish(gateway_id, convert.finished_from_pb(finished), now)
        for place in message.places:
            if router.holds(gateway_id, place.request):
                return f"request {place.request} is open already"
            router.place(gateway_id, convert.place_from_pb(place), now)
        for request in message.cancels:
            router.cancel(gateway_id, request, now)
        self._loads_changed = self._loads_changed or bool(message.places or message.finished or message.cancels)
        self._deliver()
        return ""

    async def _write(self, session: _Session, context: Context) -> None:
        while True:
            await session.wake.wait()
            session.wake.clear()
            placements, refusals, table_due = session.take()
            message = pb.CoordinateResponse(
                placements=[convert.placement_to_pb(p) for p in placements],
                refusals=[convert.refusal_to_pb(r) for r in refusals],
                table=self._current_table() if table_due else None,
            )
            await context.write(message)

    def _deliver(self) -> None:
        """Hand decisions to their sessions; tell every gateway when membership or states changed.

        A router that stops says nothing more: gateways shall keep the table as it was.
        """
        if self._stopping:
            return
        for gateway_id, decision in self._router.take():
            session = self._sessions.get(gateway_id)
            if session is None:
                self._router.cancel(gateway_id, decision.request, time.monotonic())
                continue
            if isinstance(decision, Placement):
                session.placements.append(decision)
            else:
                session.refusals.append(decision)
            session.wake.set()
        if self._told_epoch != self._router.table.epoch or self._told_full != self._router.queue.full:
            self._tell_table()

    def _tell_table(self) -> None:
        self._told_epoch, self._told_full = self._router.table.epoch, self._router.queue.full
        self._loads_told, self._loads_changed = time.monotonic(), False
        self._table = None
        for session in self._live():
            session.table_due = True
            session.wake.set()

    def _current_table(self) -> pb.Table:
        if self._table is None:
            now = time.monotonic()
            self._table = pb.Table(
                epoch=self._router.table.epoch,
                groups=[convert.view_to_pb(view) for view in self._router.views()],
                gateways=len(self._sessions),
                queue_full=self._router.queue.full,
                waiting=len(self._router.queue),
                drain_rate=self._router.drain.rate(now),
                retry_after=convert.duration(self._router.retry_after(now)),
                restarts=None if self._restarts is None else convert.restarts_to_pb(self._restarts),
            )
        return self._table

    # -- groups -----------------------------------------------------------------------------------------------------

    async def Register(self, request_iterator: object, context: Context) -> None:
        first = await context.read()
        if first is EOF:
            return
        try:
            facts = convert.registration_from_pb(first.registration)
        except ClientError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            raise
        stream = _Registration(facts.group_id, facts.incarnation)
        old = self._registrations.get(facts.group_id)
        self._registrations[facts.group_id] = stream
        if old is not None:
            old.end(DISPLACED)
        self._dead.pop(facts.group_id, None)
        state, report = convert.state_from_pb(first.state), convert.report_from_pb(first.report)
        self._router.register(facts, state, report, stream.heard)
        self._deliver()
        log.info("group %s registered at %s, %s", facts.group_id, facts.address, state.name.lower())
        reason = "its stream ended"
        try:
            await context.write(pb.RegisterResponse(epoch=self._router.table.epoch))
            reason = await self._follow(stream, context)
        finally:
            self._unregister(stream, reason)
        if reason == DISPLACED:
            await context.abort(grpc.StatusCode.ABORTED, DISPLACED)

    async def _follow(self, stream: _Registration, context: Context) -> str:
        """Apply reports until the stream ends, falls silent or is displaced; says which."""
        while True:
            read: asyncio.Future[Any] = asyncio.ensure_future(context.read())
            try:
                await asyncio.wait({read, stream.ended}, timeout=self.times.report, return_when="FIRST_COMPLETED")
            finally:
                if not read.done():
                    read.cancel()
            if stream.ended.done():
                return stream.ended.result()
            if read.cancelled() or not read.done():
                return f"no report for {self.times.report:g} s"
            message = read.result()
            if message is EOF:
                return "its stream ended"
            now = stream.heard = time.monotonic()
            state, report = convert.state_from_pb(message.state), convert.report_from_pb(message.report)
            if message.HasField("registration"):
                facts = convert.registration_from_pb(message.registration)
                if (facts.group_id, facts.incarnation) != (stream.group_id, stream.incarnation):
                    return "it named another group"
                self._router.register(facts, state, report, now)
            if not self._router.report(stream.group_id, stream.incarnation, state, report, now):
                return DISPLACED
            self._loads_changed = True
            self._deliver()

    def _unregister(self, stream: _Registration, reason: str) -> None:
        if self._registrations.get(stream.group_id) is not stream:
            return
        now = time.monotonic()
        del self._registrations[stream.group_id]
        if self._router.lose(stream.group_id, stream.incarnation, now) and not self._stopping:
            self._dead[stream.group_id] = now
            log.warning("group %s is dead: %s", stream.group_id, reason)
        self._deliver()

    # -- time -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._router.tick(now)
            for stream in self._registrations.values():
                if now - stream.heard > self.times.stalled:
                    self._router.silence(stream.group_id, stream.incarnation, now)
            for gateway_id in [g for g, since in self._gone.items() if now - since > self.times.gateway_grace]:
                del self._gone[gateway_id]
                self._router.forget_gateway(gateway_id, now)
            for group_id in [g for g, since in self._dead.items() if now - since > self.times.forget]:
                del self._dead[group_id]
                self._router.forget(group_id)
            self._deliver()
            if self._loads_changed and now - self._loads_told >= self.times.load:
                self._tell_table()


__all__ = ["GatewayStatus", "GroupState", "GroupStatus", "RouterServer", "RouterSnapshot", "RouterTimes"]

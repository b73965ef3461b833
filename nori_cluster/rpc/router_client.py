"""A gateway's line to the router: one Coordinate stream; what is ready goes out when the previous write completed.

While the router is lost, a routing.Router over the last table places in this process (`degraded`); on reconnection
Hello names what is open, and what still waits is asked again.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from nori_cluster.routing.base import (
    Finished,
    GroupView,
    OpenRequest,
    Place,
    Placement,
    Refusal,
    RefusalReason,
    Restarts,
)
from nori_cluster.routing.drain import UNKNOWN, spread
from nori_cluster.routing.least_loaded import LeastLoaded
from nori_cluster.routing.router import RETRY_NO_GROUP, Router
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as pb
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import EOF, StreamCall
from nori_cluster.rpc.options import client_options
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
FIRST_BACKOFF, LAST_BACKOFF = 0.05, 1.0
KEEPALIVE, KEEPALIVE_TIMEOUT = 5.0, 3.0  # a router that hangs is noticed within their sum
TICK_SECONDS = 0.1
MAX_ASKED = 8192  # places without an answer; the router's own queue is shorter, so this holds while it is away
EXPECTED_OUTPUT = 256  # tokens; bound of what Hello claims for an open request

Decided = Callable[[Placement | Refusal], None]


class RouterClientTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. lost_after: how long a broken stream may be away before this gateway places on its own."""

    lost_after: float = 1.0


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting queue as the router last told, or of this process while it places on its own.

    waiting: requests. drain_rate: of them leave per second, None = not known. retry_after: seconds.
    """

    full: bool = False
    waiting: int = 0
    drain_rate: float | None = None
    retry_after: float = UNKNOWN


class _Asked(msgspec.Struct, frozen=True):
    """A place without an answer. at: loop time of the question."""

    place: Place
    decided: Decided
    at: float

    def again(self, now: float) -> Place:
        """The same question with the time that is left."""
        if self.place.time_left is None:
            return self.place
        return msgspec.structs.replace(self.place, time_left=self.place.time_left - (now - self.at))


class RouterClient:
    """Belongs to one loop. on_table is called with every new table, before decisions of the same message.

    connected: the router answers. degraded: it does not, and this gateway places on its own.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        incarnation: int,
        on_table: Callable[[tuple[GroupView, ...]], None],
        *,
        times: RouterClientTimes = RouterClientTimes(),
    ) -> None:
        self.connected = False
        self.table: tuple[GroupView, ...] = ()
        self.gateways = 1
        self.restarts = Restarts()  # as the controller last told them
        self._told = QueueView()
        self._refused_full = 0
        self.local_placements = 0
        self._address = address
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._on_table = on_table
        self._times = times
        self._asked: dict[int, _Asked] = {}
        self._open: dict[int, OpenRequest] = {}
        self._unreachable: frozenset[str] = frozenset()
        self._local: Router | None = None
        self._outbox = pb.CoordinateRequest()
        self._wake = asyncio.Event()
        self._lost_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def degraded(self) -> bool:
        return self._local is not None

    @property
    def queue(self) -> QueueView:
        if self._local is None:
            return self._told
        router, now = self._local, self._now()
        return QueueView(
            full=router.queue.full,
            waiting=len(router.queue),
            drain_rate=router.drain.rate(now),
            retry_after=router.retry_after(now),
        )

    @property
    def queue_full(self) -> bool:
        """A new place would be refused now."""
        return len(self._asked) >= MAX_ASKED or self.queue.full

    def retry_after(self) -> float:
        """Seconds for one more that is refused because of it; not the same for all, so that they come one by one."""
        self._refused_full += 1
        return spread(self.queue.retry_after, self._refused_full)

    @property
    def waiting(self) -> int:
        """Places without an answer."""
        return len(self._asked)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def start(self) -> None:
        self._lost_at = self._now()
        self._tasks = [background(self._run(), "the line to the router"), background(self._tick(), "local placement")]
        self._tasks[0].add_done_callback(self._stopped)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._refuse_all("the gateway is shutting down")

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Closed, or a bug: then this gateway goes on by itself."""
        self.connected, self._lost_at = False, self._now()

    # -- what the backend asks and tells ----------------------------------------------------------------------------

    def place(self, place: Place, decided: Decided) -> None:
        """decided is called once, later, on the loop; never after cancel."""
        assert place.request not in self._asked and place.request not in self._open
        too_many = len(self._asked) >= MAX_ASKED
        self._asked[place.request] = _Asked(place, decided, self._now())
        if too_many:
            message = f"{MAX_ASKED} requests of this gateway wait already"
            refusal = Refusal(place.request, RefusalReason.QUEUE_FULL, message, self.retry_after())
            asyncio.get_running_loop().call_soon(self._decide, refusal)
        elif self._local is not None:
            self._local.place(self._gateway_id, place, self._now())
            asyncio.get_running_loop().call_soon(self._take_local)
        elif self.connected:
            self._outbox.places.append(convert.place_to_pb(place))
            self._wake.set()

    def cancel(self, request: int) -> None:
        """The place is no longer wanted. Not for one that was decided."""
        if self._asked.pop(request, None) is None:
            return
        if self._local is not None:
            self._local.cancel(self._gateway_id, request, self._now())
            self._take_local()
        elif self.connected:
            self._outbox.cancels.append(request)
            self._wake.set()

    def finish(self, finished: Finished) -> None:
        """Once per placement."""
        del self._open[finished.request]
        if self._local is not None:
            self._local.finish(self._gateway_id, finished, self._now())
            self._take_local()
        elif self.connected:
            self._outbox.finished.append(convert.finished_to_pb(finished))
            self._wake.set()

    def set_unreachable(self, group_ids: frozenset[str]) -> None:
        """The groups of the table that this gateway has no open stream to."""
        if group_ids == self._unreachable:
            return
        self._unreachable = group_ids
        if self._local is not None:
            self._local.set_unreachable(self._gateway_id, group_ids, self._now())
            self._take_local()
        elif self.connected:
            self._outbox.reach.CopyFrom(pb.Reach(unreachable_group_ids=sorted(group_ids)))
            self._wake.set()

    # -- the stream -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            reason = "the router ended the stream"
            try:
                await self._serve_once()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
            except asyncio.InvalidStateError as error:  # a write met a stream that had ended
                reason = str(error)
            if self.connected:
                log.warning("lost the router at %s: %s", self._address, reason)
                self.connected, self._lost_at, backoff = False, self._now(), FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def _serve_once(self) -> None:
        options = client_options(KEEPALIVE, KEEPALIVE_TIMEOUT)
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            call: StreamCall = pb_grpc.RouterServiceStub(channel).Coordinate()
            await call.write(self._hello())
            message: Any = await call.read()
            if message is EOF:
                return
            self._connected(message)
            writer = asyncio.create_task(self._write(call))
            try:
                while message is not EOF:
                    self._take_in(message)
                    message = await call.read()
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)  # a failed write is seen by the reader too

    def _hello(self) -> pb.CoordinateRequest:
        hello = pb.Hello(
            gateway_id=self._gateway_id,
            gateway_incarnation=self._incarnation,
            open_requests=[convert.open_request_to_pb(item) for item in self._open.values()],
            protocol_version=PROTOCOL_VERSION,
        )
        return pb.CoordinateRequest(hello=hello, reach=pb.Reach(unreachable_group_ids=sorted(self._unreachable)))

    def _connected(self, first: pb.CoordinateResponse) -> None:
        """The router is (back) there: Hello again, for what changed since the first, and all that waits."""
        now = self._now()
        self.connected, self._local = True, None
        self._outbox = self._hello()
        self._outbox.places.extend(convert.place_to_pb(asked.again(now)) for asked in self._asked.values())
        self._wake.set()
        log.info("router at %s answers; epoch %d", self._address, first.table.epoch)

    async def _write(self, call: StreamCall) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message, self._outbox = self._outbox, pb.CoordinateRequest()
            await call.write(message)

    def _take_in(self, message: pb.CoordinateResponse) -> None:
        if message.HasField("table"):
            self.gateways = max(1, message.table.gateways)
            self._told = _queue_view(message.table)
            if message.table.HasField("restarts"):  # a new router knows of none yet
                self.restarts = convert.restarts_from_pb(message.table.restarts)
            self.table = tuple(convert.view_from_pb(view) for view in message.table.groups)
            self._on_table(self.table)
        for placement in message.placements:
            self._decide(convert.placement_from_pb(placement))
        for refusal in message.refusals:
            self._decide(convert.refusal_from_pb(refusal))

    def _decide(self, decision: Placement | Refusal) -> None:
        asked = self._asked.pop(decision.request, None)
        if asked is None:
            return  # cancelled: the Cancel that crossed it releases the reservation
        if isinstance(decision, Placement):
            place = asked.place
            tokens = place.prompt_tokens + place.candidates * min(place.max_tokens, EXPECTED_OUTPUT)
            self._open[decision.request] = OpenRequest(
                decision.request, decision.group_id, place.tenant, tokens, place.prompt_tokens, place.candidates
            )
        asked.decided(decision)

    # -- without the router -----------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self._now()
            if self._local is not None:
                self._local.tick(now)
                for view in self.table:  # no group reports here: one that failed is tried again by and by
                    facts = view.registration
                    self._local.report(facts.group_id, facts.incarnation, view.state, view.report, now)
                self._take_local()
            elif not self.connected and now - self._lost_at >= self._times.lost_after:
                self._go_local(now)

    def _go_local(self, now: float) -> None:
        """From here on this process decides, with its share of each group, until the router answers."""
        if not self.table:
            self._refuse_all("the router cannot be reached")
            return
        log.warning("no router at %s: placing by the last table", self._address)
        local = Router(LeastLoaded, order_base=round((time.time() - now) * 1e6))
        own: dict[str, int] = {}
        for item in self._open.values():
            own[item.group_id] = own.get(item.group_id, 0) + item.outstanding_tokens
        for view in self.table:
            share = max(1, view.registration.max_running_sequences // self.gateways)
            facts = msgspec.structs.replace(view.registration, max_running_sequences=share)
            local.register(facts, view.state, view.report, now)
            local.set_foreign_load(view.group_id, max(0, view.outstanding_tokens - own.get(view.group_id, 0)))
        local.hello(self._gateway_id, list(self._open.values()), now)
        local.set_unreachable(self._gateway_id, self._unreachable, now)
        self._local = local
        for asked in list(self._asked.values()):
            local.place(self._gateway_id, asked.again(now), now)
        self._take_local()

    def _take_local(self) -> None:
        """Decisions may bring on further events, so look again until nothing is left."""
        while self._local is not None and (decisions := self._local.take()):
            for _, decision in decisions:
                self.local_placements += isinstance(decision, Placement)
                self._decide(decision)

    def _refuse_all(self, message: str) -> None:
        for request in list(self._asked):
            self._decide(Refusal(request, RefusalReason.NO_GROUP, message, RETRY_NO_GROUP))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _queue_view(table: pb.Table) -> QueueView:
    return QueueView(
        full=table.queue_full,
        waiting=table.waiting,
        drain_rate=table.drain_rate if table.HasField("drain_rate") else None,
        retry_after=convert.seconds(table.retry_after) if table.HasField("retry_after") else UNKNOWN,
    )

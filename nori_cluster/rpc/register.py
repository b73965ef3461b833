"""An engine process tells the router that its group exists, and how it fares: the client end of Register.

Runs on the loop of the process's edge; the engine thread is never waited for, it only fills what the callables read.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, cast

import grpc

from nori_cluster.routing.base import GroupRegistration, GroupReport, GroupState
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as pb
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import EOF, StreamCall
from nori_cluster.rpc.options import client_options
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 1.0  # a restarted router shall know every group within two seconds


class GroupRegistrar:
    """Keeps one Register stream open: a report every `interval` seconds and after `changed()`.

    registration: read at every (re)connection and after `registration_changed()`. report: read for every report; both
    must return at once.
    registered: the router has the group in its table. displaced: another process registered the same group_id, and this
    one gave up.
    """

    def __init__(
        self,
        router: str,
        registration: Callable[[], GroupRegistration],
        report: Callable[[], tuple[GroupState, GroupReport]],
        *,
        interval: float = 0.5,
    ) -> None:
        self.registered = False
        self.displaced = False
        self.epoch = 0
        self._registration_due = False
        self._router = router
        self._registration = registration
        self._report = report
        self._interval = interval
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Must run on the loop that will own the stream."""
        self._loop = asyncio.get_running_loop()
        self._task = background(self._run(), "the registrar")

    def registration_changed(self) -> None:
        """Register anew on the open stream, with a report. On the loop."""
        self._registration_due = True
        self.changed()

    def changed(self) -> None:
        """Report now. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    async def close(self) -> None:
        """Ends the stream: the router takes the group for dead at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            try:
                await self._serve_once()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ABORTED:
                    self.displaced = True
                    log.error("gave up registering: %s", error.details())
                    return
                log.info("register at %s: %s %s", self._router, error.code().name, error.details())
            except (TimeoutError, asyncio.InvalidStateError) as error:
                log.info("register at %s: %s", self._router, error or f"no answer in {ANSWER_SECONDS:g} s")
            backoff = FIRST_BACKOFF if self.registered else min(2 * backoff, LAST_BACKOFF)
            self.registered = False
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _serve_once(self) -> None:
        async with grpc.aio.insecure_channel(self._router, options=client_options()) as channel:
            call: StreamCall = pb_grpc.RouterServiceStub(channel).Register()
            self._registration_due = True
            first = self._next_report()
            async with asyncio.timeout(ANSWER_SECONDS):
                await call.write(first)
                answer: Any = await call.read()
            if answer is not EOF:
                self.epoch, self.registered = answer.epoch, True
                log.info("registered at %s", self._router)
                await self._report_until_end(call)

    async def _report_until_end(self, call: StreamCall) -> None:
        end = asyncio.ensure_future(call.read())
        try:
            while not end.done():
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({end, changed}, timeout=self._interval, return_when="FIRST_COMPLETED")
                changed.cancel()
                self._changed.clear()
                if not end.done():
                    await call.write(self._next_report())
        finally:
            end.cancel()
        end.result()  # raises what ended the stream

    def _next_report(self) -> pb.RegisterRequest:
        state, report = self._report()
        out = pb.RegisterRequest(state=cast("pb.GroupState", int(state)), report=convert.report_to_pb(report))
        if self._registration_due:
            self._registration_due = False
            out.registration.CopyFrom(convert.registration_to_pb(self._registration()))
        return out

"""The controller's hold on the router: started, watched, and started again on its port when it is lost.

Groups and gateways come back to a new router by themselves.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from nori_cluster.cluster.actors import ROUTER, expected, named_actor, pinned_to_this_node
from nori_cluster.cluster.router_actor import RouterActor
from nori_cluster.config import RouterConfig
from nori_cluster.errors import EngineFailure, NoriError
from nori_cluster.routing.base import Restarts
from nori_cluster.rpc.router_server import RouterSnapshot

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.5  # between two looks
SILENT_SECONDS = 10.0  # a router that does not answer for so long is replaced
START_SECONDS = 60.0
ADOPT_SECONDS = 3.0  # a router that runs answers sooner


class RouterHandle(Protocol):
    """A router process, new or found. Every call raises a NoriError when the process is lost. name: of its actor."""

    name: str

    async def start(self, host: str, port: int) -> int:
        """Serve; returns the bound port."""

    async def snapshot(self) -> RouterSnapshot: ...

    async def set_draining(self, group_id: str, draining: bool) -> bool: ...

    async def set_restarts(self, restarts: Restarts) -> None: ...

    async def pid(self) -> int: ...

    def kill(self) -> None: ...


class RouterProcess:
    """A RouterHandle on a Ray actor on this node, which outlives the controller that made it.

    name: of one that runs already; EngineFailure when there is none.
    """

    def __init__(self, config: RouterConfig, name: str = "") -> None:
        self.name = name or f"{ROUTER}{uuid.uuid4().hex[:8]}"
        if name:
            self._actor: Any = named_actor(name)
        else:
            options = {**pinned_to_this_node(), "name": self.name, "lifetime": "detached"}
            self._actor = ray.remote(RouterActor).options(**options, max_concurrency=100).remote(config)

    async def start(self, host: str, port: int) -> int:
        bound: int = await _answer(self._actor.start.remote(host, port))
        return bound

    async def snapshot(self) -> RouterSnapshot:
        snapshot: RouterSnapshot = await _answer(self._actor.snapshot.remote())
        return snapshot

    async def set_draining(self, group_id: str, draining: bool) -> bool:
        found: bool = await _answer(self._actor.set_draining.remote(group_id, draining))
        return found

    async def set_restarts(self, restarts: Restarts) -> None:
        await _answer(self._actor.set_restarts.remote(restarts))

    async def pid(self) -> int:
        number: int = await _answer(self._actor.pid.remote())
        return number

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayError as error:
        raise expected(error, "the router") from error


class RouterKeeper:
    """start or adopt, then keep for as long as the cluster lives. spawn: a RouterHandle of that name, "" a new one.
    on_start: another one serves. count: what it shall tell gateways of restarts."""

    def __init__(
        self,
        spawn: Callable[[str], RouterHandle],
        host: str,
        port: int,
        on_start: Callable[[], None] = lambda: None,
        count: Callable[[], Restarts] = Restarts,
    ) -> None:
        self._on_start = on_start
        self._count = count
        self._spawn = spawn
        self._host = host
        self._port = port
        self.restarts = 0
        self._served = False  # whether a router of this cluster ever did
        self._router: RouterHandle | None = None

    @property
    def address(self) -> str:
        """host:port; the same for every router that follows the first."""
        return f"{self._host}:{self._port}"

    @property
    def name(self) -> str:
        """Of the actor; "" while there is none."""
        return self._router.name if self._router is not None else ""

    @property
    def port(self) -> int:
        return self._port

    async def adopt(self, name: str, port: int) -> None:
        """Take over a router that runs, with its streams; start another on its port when it does not answer."""
        self._port, self._served = port, True
        try:
            self._router = self._spawn(name)
            async with asyncio.timeout(ADOPT_SECONDS):
                await self._router.snapshot()
        except (NoriError, TimeoutError) as error:
            log.error("the router is lost too: %s", str(error) or "it does not answer")
            self.kill()
            await self.start()

    async def start(self) -> None:
        """NoriError when it cannot be started."""
        router = self._spawn("")
        try:
            async with asyncio.timeout(START_SECONDS):
                self._port = await router.start(self._host, self._port)
        except TimeoutError:
            router.kill()
            raise EngineFailure(f"the router did not start within {START_SECONDS:g} s") from None
        except NoriError:
            router.kill()
            raise
        self._router = router
        self.restarts += self._served
        self._served = True
        self._on_start()

    async def keep(self) -> None:
        """Until cancelled: replace a router that is lost, as often as it takes. Each look tells it of restarts."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await self._running().set_restarts(self._count())
            except (NoriError, TimeoutError) as error:
                log.error("the router is lost, starting another: %s", str(error) or "it does not answer")
                self.kill()
                try:
                    await self.start()
                except NoriError as failure:
                    log.error("no router: %s", failure)

    async def snapshot(self) -> RouterSnapshot:
        return await self._running().snapshot()

    async def set_draining(self, group_id: str, draining: bool) -> bool:
        return await self._running().set_draining(group_id, draining)

    async def pid(self) -> int:
        return await self._running().pid()

    def kill(self) -> None:
        if self._router is not None:
            self._router.kill()
            self._router = None

    def _running(self) -> RouterHandle:
        if self._router is None:
            raise EngineFailure("the router is lost and another one starts")
        return self._router

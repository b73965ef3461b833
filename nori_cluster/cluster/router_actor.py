"""The router as a Ray actor pinned to the head: Ray starts and watches it, gateways and groups reach it by gRPC."""

import os

from nori_cluster import telemetry
from nori_cluster.config import RouterConfig
from nori_cluster.routing.base import Restarts
from nori_cluster.rpc.router_server import RouterServer, RouterSnapshot


class RouterActor:
    """A RouterServer on the actor's event loop."""

    def __init__(self, config: RouterConfig) -> None:
        telemetry.configure_logging("router")
        self._server = RouterServer(config)

    async def start(self, host: str, port: int) -> int:
        return await self._server.start(host, port)

    async def snapshot(self) -> RouterSnapshot:
        return self._server.snapshot()

    async def set_draining(self, group_id: str, draining: bool) -> bool:
        return self._server.set_draining(group_id, draining)

    async def set_restarts(self, restarts: Restarts) -> None:
        self._server.set_restarts(restarts)

    async def pid(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        await self._server.stop()

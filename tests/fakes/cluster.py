"""A cluster in one process and loop: real router server, fake groups, a real ClusterBackend, all over sockets."""

import asyncio
from collections.abc import Callable
from typing import Self

from fakes.group import FakeGroup
from fakes.sink import RecordingSink
from nori_cluster.config import RouterConfig
from nori_cluster.frontend.backend import Submission
from nori_cluster.rpc.cluster_backend import BackendTimes, ClusterBackend
from nori_cluster.rpc.dataplane_client import DataPlaneTimes
from nori_cluster.rpc.router_client import RouterClientTimes
from nori_cluster.rpc.router_server import RouterServer, RouterTimes
from nori_cluster.types import Request, SamplingParams

ROUTER_TIMES = RouterTimes(report=0.5, gateway_grace=0.5, load=0.1, settle=0.0, forget=5.0)
BACKEND_TIMES = BackendTimes(
    accept=0.4,
    router=RouterClientTimes(lost_after=0.2),
    dataplane=DataPlaneTimes(connect=0.3, ping_interval=0.2, ping_timeout=0.3),
)


async def until(condition: Callable[[], bool], timeout: float = 3.0) -> None:
    """Polls; AssertionError when it does not come true in time."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


class MiniCluster:
    """async with MiniCluster("g1", "g2") as cluster: … cluster.ask(…)"""

    def __init__(
        self,
        *groups: str,
        router_times: RouterTimes = ROUTER_TIMES,
        router_config: RouterConfig = RouterConfig(),
        **options: float,
    ) -> None:
        self.router_times = router_times
        self.router_config = router_config
        self.router = RouterServer(router_config, times=router_times)
        self.router_port = 0
        self.groups = {name: FakeGroup(name, **options) for name in groups}  # type: ignore[arg-type]
        self.backends: list[ClusterBackend] = []
        self.requests = 0

    @property
    def router_address(self) -> str:
        return f"127.0.0.1:{self.router_port}"

    @property
    def backend(self) -> ClusterBackend:
        return self.backends[0]

    async def __aenter__(self) -> Self:
        self.router_port = await self.router.start("127.0.0.1", 0)
        for group in self.groups.values():
            await group.start(self.router_address)
        await self.add_backend()
        if self.groups:
            await self.reachable(*self.groups)
        return self

    async def __aexit__(self, *_: object) -> None:
        for backend in self.backends:
            await backend.close()
        for group in self.groups.values():
            await group.stop()
        await self.router.stop()

    async def add_backend(self) -> ClusterBackend:
        backend = ClusterBackend(self.router_address, f"gw{len(self.backends)}", times=BACKEND_TIMES)
        await backend.start()
        self.backends.append(backend)
        return backend

    async def reachable(self, *names: str) -> None:
        """Every backend has an open stream to these groups, and the router knows it."""
        for backend in self.backends:
            await until(
                lambda b=backend: (
                    {g.view.group_id for g in b.groups() if g.link == "open" and g.view.placeable} >= set(names)
                )
            )
        await asyncio.sleep(0.05)

    async def restart_router(self, gap: float = 0.0) -> None:
        await self.router.stop()
        await asyncio.sleep(gap)
        self.router = RouterServer(self.router_config, times=self.router_times)
        assert await self.router.start("127.0.0.1", self.router_port) == self.router_port

    def ask(
        self, tokens: int = 5, *, n: int = 1, prompt: int = 10, model: str = "m", time_left: float | None = None
    ) -> tuple[list[RecordingSink], Submission]:
        self.requests += 1
        request = Request(
            id=f"r{self.requests}",
            model=model,
            prompt_token_ids=tuple(range(prompt)),
            sampling=SamplingParams(n=n, max_tokens=tokens),
            seed=(1 << 64) - 1,
            time_left=time_left,
        )
        sinks = [RecordingSink() for _ in range(n)]
        return sinks, self.backend.submit(request, sinks)

    async def answer(self, tokens: int = 5, timeout: float = 3.0, **rest: float) -> RecordingSink:
        """One request to its end."""
        (sink,), _ = self.ask(tokens, **rest)  # type: ignore[arg-type]
        async with asyncio.timeout(timeout):
            await sink.ended.wait()
        return sink

    def reserved(self) -> int:
        return sum(group.reserved_requests for group in self.router.snapshot().groups)

    async def idle(self) -> None:
        """Nothing is reserved, open or live anywhere: no handle and no reservation leaked."""
        await until(lambda: self.reserved() == 0)
        await until(lambda: not any(group.live for group in self.groups.values()))
        for backend in self.backends:
            await until(lambda b=backend: all(g.open_sequences == 0 for g in b.groups()))
            assert backend.router.open_requests == 0
            assert backend.router.waiting == 0

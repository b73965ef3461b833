"""The controller around fake groups and a fake router, in one loop: what they are told stands in World.journal."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.cluster import until
from nori_cluster.cluster.controller import Controller
from nori_cluster.cluster.reconcile import Phase
from nori_cluster.cluster.state import RunningGroup
from nori_cluster.config import ClusterConfig, GroupConfig, ModelConfig, Ports
from nori_cluster.errors import EngineFailure
from nori_cluster.routing.base import GroupView, Restarts
from nori_cluster.rpc.router_server import GatewayStatus, GroupStatus, RouterSnapshot
from nori_cluster.types import GroupSpec

PORTS = Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0)


class FakeRouter:
    """A router process in memory. World.port_taken: no router can start."""

    def __init__(self, world: "World", name: str = "") -> None:
        self.world = world
        self.name = name or f"router-{len(world.routers)}"
        self.dead = self.hangs = False
        if name:  # the one that runs, in another hand
            (found,) = (router for router in world.routers if router.name == name)
            self.dead, self.hangs = found.dead, found.hangs
        else:
            world.routers.append(self)

    async def start(self, host: str, port: int) -> int:
        if self.world.port_taken:
            raise EngineFailure("RuntimeError: the port is taken")
        return port or 4000 + len(self.world.routers)

    async def snapshot(self) -> RouterSnapshot:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise EngineFailure("the router died")
        groups = tuple(GroupStatus(view=v, reserved_requests=0, silent_for=0.0) for v in self.world.views)
        gateways = (GatewayStatus(gateway_id="gw", open_requests=2, connected=True, silent_for=1.0),)
        waiting = self.world.waiting.pop(0) if len(self.world.waiting) > 1 else self.world.waiting[0]
        return RouterSnapshot(epoch=1, groups=groups, gateways=gateways, waiting=waiting)

    async def pid(self) -> int:
        return 4

    async def set_draining(self, group_id: str, draining: bool) -> bool:
        await self.snapshot()
        self.world.journal.append(f"router {'drains' if draining else 'resumes'} {group_id}")
        return True

    async def set_restarts(self, restarts: Restarts) -> None:
        await self.snapshot()
        self.world.restarts = restarts

    def kill(self) -> None:
        self.dead = True
        self.world.journal.append("router killed")


class FakeGroup:
    """One incarnation. World.failures: name → what its next starts raise; World.slow: names that never come up.
    World.broken: names of which not every process is there at an adoption."""

    def __init__(self, world: "World", name: str, incarnation: int, model: ModelConfig, **rest: Any) -> None:
        self.world, self.name, self.incarnation, self.model = world, name, incarnation, model
        self.address = self.host = ""
        self.engine_pid, self.created = 0, 1.5
        self.pids: list[int] = []
        self.spec: GroupSpec | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.drains: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.rest = rest
        self.told: list[str] = []  # drains and reloads of this incarnation
        world.made.append(self)

    async def start(self) -> str:
        if failures := self.world.failures.get(self.name):
            raise failures.pop(0)
        if self.name in self.world.slow:
            await asyncio.Event().wait()
        self.address, self.engine_pid, self.pids = f"h:{self.incarnation}", 10, [11, 12]
        return self.address

    async def watch(self) -> str:
        return await self.lost

    def running(self) -> RunningGroup:
        return RunningGroup(
            name=self.name, incarnation=self.incarnation, address=self.address, engine_pid=self.engine_pid,
            pids=tuple(self.pids), created=self.created, spec=self.spec,
        )  # fmt: skip

    async def adopt(self, running: RunningGroup) -> bool:
        self.address, self.engine_pid, self.pids = running.address, running.engine_pid, list(running.pids)
        assert (running.name, running.incarnation) == (self.name, self.incarnation)
        self.model = self.world.holds.get(self.name, self.model)
        return self.name not in self.world.broken

    async def resume(self) -> ModelConfig:
        self.world.journal.append(f"resume {self.name}")
        return self.model

    async def gone(self, timeout: float) -> bool:
        return True

    async def drain(self, timeout: float, hand_over: bool = False) -> int:
        self.told.append("drain")
        self.world.journal.append(f"drain {self.name}" + " and hand over" * hand_over)
        if timeout < 1.0 or self.world.left is not None:
            return 3 if self.world.left is None else self.world.left
        return await self.drains

    async def abort(self, reason: str) -> int:
        self.world.journal.append(f"abort {self.name}")
        return 0

    async def reload(self, model: ModelConfig, timeout: float) -> None:
        self.told.append("reload")
        self.world.journal.append(f"reload {self.name} {model.weight_version}")
        if self.lost.done():
            raise EngineFailure("the engine process died")
        if errors := self.world.reloads.get(self.name):
            error = errors.pop(0)
            if isinstance(error, EngineFailure):
                self.lost.set_result(error.message)
            raise error
        self.model = model

    async def stop(self) -> None:
        self.world.journal.append(f"stop {self.name}")
        await asyncio.sleep(0)
        if not self.lost.done():
            self.lost.set_result("rank 0: ended by itself")

    def kill(self) -> None:
        self.world.journal.append(f"kill {self.name}")
        if self.world.kill_fails:
            raise ValueError("Ray is odd today")

    def die(self, reason: str = "rank 1: the process died") -> None:
        if not self.drains.done():
            self.drains.set_exception(EngineFailure("the engine process died"))
        self.lost.set_result(reason)


class World:
    def __init__(self) -> None:
        self.journal: list[str] = []
        self.routers: list[FakeRouter] = []
        self.made: list[FakeGroup] = []
        self.failures: dict[str, list[BaseException]] = {}
        self.slow: set[str] = set()
        self.broken: set[str] = set()
        self.kept: list[set[str]] = []  # what each sweep for strays left alive
        self.views: list[GroupView] = []
        self.port_taken = self.kill_fails = False
        self.restarts = Restarts()  # as the controller told the router last
        self.left: int | None = None  # what every drain leaves; None: 3 when short, else what FakeGroup.drains says
        self.waiting = [0]  # in the router, look after look
        self.holds: dict[str, ModelConfig] = {}  # name → what an adopted group serves, whatever its controller knew
        self.reloads: dict[str, list[Exception]] = {}  # name → what its next reloads raise

    def newest(self, name: str) -> FakeGroup:
        return [group for group in self.made if group.name == name][-1]


@asynccontextmanager
async def controller(
    world: World, *, wait: bool = True, state_file: Path | None = None, replicas: int = 2
) -> AsyncIterator[Controller]:
    config = ClusterConfig(group=GroupConfig(model=ModelConfig(name="m", path="/m")), replicas=replicas, ports=PORTS)

    def make_group(name: str, incarnation: int, config: GroupConfig, **rest: Any) -> Any:
        return FakeGroup(world, name, incarnation, config.model, **rest)

    def end_strays(keep: Collection[str]) -> list[str]:
        world.kept.append(set(keep))
        return []

    made = Controller(config, state_file, make_group, lambda config, name: FakeRouter(world, name), end_strays)
    try:
        await made.start()
        if wait:
            await until(ready(made, replicas))
        yield made
    finally:
        await made.stop(0.0)


@asynccontextmanager
async def lost_controller(world: World, state_file: Path, *, replicas: int = 2) -> AsyncIterator[Controller]:
    """One that ends as a killed process does when the block is left: nothing it watches is told."""
    async with controller(world, state_file=state_file, replicas=replicas) as made:
        yield made
        made._state_file = None  # what is left of it in this process says nothing any more
        for loop in made._loops:
            loop.cancel()
        tasks, groups = list(made._tasks.values()), made.groups
        made._tasks, made.groups = {}, {}
        ORPHANS.extend(tasks)
        made._router._router = None
    made.groups = groups


ORPHANS: list[asyncio.Task[None]] = []  # they wait for fake groups whose processes others hold now


def ready(made: Controller, count: int) -> Callable[[], bool]:
    return lambda: sum(record.phase is Phase.READY for record in made.records.values()) == count

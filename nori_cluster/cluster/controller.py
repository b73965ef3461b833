"""The controller, a Ray actor pinned to the head: keeps the wanted groups and the router alive, serves the admin plane.

Every group has one supervising task: start an incarnation, watch it, end all of it when anything is lost, start the
next after a backoff (reconcile.py decides when). Nothing here touches a request.
"""

import asyncio
import logging
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nori_cluster import telemetry
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.reconcile import GroupRecord, Phase, to_start
from nori_cluster.cluster.router_actor import RouterActor
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import ClusterConfig
from nori_cluster.errors import EngineFailure, NoriError, NotFound, Overloaded
from nori_cluster.rpc import admin
from nori_cluster.rpc.router_server import RouterSnapshot

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the pool as the controller knows it; load is the router's to tell."""

    record: GroupRecord
    address: str = ""
    engine_pid: int = 0
    pids: tuple[int, ...] = ()


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """first_error: why the first start of a group failed, before any was ready (launch gives up then)."""

    groups: tuple[GroupState, ...]
    ready: int
    first_error: NoriError | None = None


def pinned_to_this_node() -> dict[str, Any]:
    """Actor options: no CPU reserved, this node or none."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


class Controller:
    """start once; then it acts by itself until stop."""

    def __init__(self, config: ClusterConfig) -> None:
        telemetry.configure_logging("controller")
        self.config = config
        model = config.group.model.name
        self._names = [f"{model}-{index}" for index in range(config.replicas)]
        self.records = {name: GroupRecord(name=name) for name in self._names}
        self.groups: dict[str, WorkerGroup] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._admin: admin.AdminServer | None = None
        self._router: Any = None
        self._router_address = ""
        self._first_error: NoriError | None = None
        self._was_ready = False  # some group was, once
        self._changed = asyncio.Event()

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, str]:
        """Router and admin plane, then groups; returns both addresses at once, groups come up in their own time."""
        await self._start_router(self.config.ports.router)
        self._admin = await admin.serve(ControllerAdmin(self), self.config.internal_host, self.config.ports.admin)
        self._loop_task = asyncio.create_task(self._run())
        return self._router_address, f"{self.config.internal_host}:{self._admin.port}"

    async def _start_router(self, port: int) -> None:
        router = ray.remote(RouterActor).options(**pinned_to_this_node(), max_concurrency=100)
        self._router = router.remote(self.config.router)
        bound = await self._router.start.remote(self.config.internal_host, port)
        self._router_address = f"{self.config.internal_host}:{bound}"

    async def _run(self) -> None:
        while True:
            for name in to_start(self._names, self.records, time.monotonic()):
                self.records[name].started()
                self._tasks[name] = asyncio.create_task(self._supervise(name))
            await self._keep_router()
            await asyncio.sleep(TICK_SECONDS)

    async def _keep_router(self) -> None:
        """A dead router is started again on its port; groups and gateways come back to it by themselves."""
        try:
            await self._router.snapshot.remote()
        except RayError as error:
            log.error("the router is lost, starting another: %s", error)
            await self._start_router(int(self._router_address.rpartition(":")[2]))

    async def _supervise(self, name: str) -> None:
        """One incarnation from start to end."""
        record = self.records[name]
        port = self.config.ports.dataplane
        group = WorkerGroup(
            name,
            record.incarnation,
            self.config.group,
            host=self.config.internal_host,
            port=port + self._names.index(name) if port else 0,
            router=self._router_address,
        )
        self.groups[name] = group
        reason = "stopped"
        try:
            await group.start()
            record.became_ready(time.monotonic())
            self._was_ready = True
            self._changed.set()
            log.info("group %s is ready at %s", name, group.address)
            reason = await group.watch()
        except (NoriError, RayError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if not self._was_ready:
                expected = error if isinstance(error, NoriError) else EngineFailure(f"{name} did not start: {reason}")
                self._first_error = self._first_error or expected
        finally:
            record.failed(reason, time.monotonic())
            log.warning("group %s, incarnation %d, is lost: %s", name, record.incarnation, reason)
            await group.kill()
            del self.groups[name]
            record.gone()
            self._changed.set()

    async def stop(self, drain_timeout: float) -> None:
        """End everything: groups drained for at most so many seconds, then the router."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        ready = [g for n, g in self.groups.items() if self.records[n].phase is Phase.READY]
        await asyncio.gather(*(group.drain(drain_timeout) for group in ready), return_exceptions=True)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(group.stop() for group in ready), return_exceptions=True)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._admin is not None:
            await self._admin.stop()
        if self._router is not None:
            ray.kill(self._router, no_restart=True)

    # -- questions --------------------------------------------------------------------------------------------------

    async def state(self) -> ControllerState:
        groups = []
        for name, record in self.records.items():
            group = self.groups.get(name)
            groups.append(
                GroupState(
                    record=record,
                    address=group.address if group else "",
                    engine_pid=group.engine_pid if group else 0,
                    pids=tuple(group.pids) if group else (),
                )
            )
        ready = sum(record.phase is Phase.READY for record in self.records.values())
        return ControllerState(groups=tuple(groups), ready=ready, first_error=self._first_error)

    async def next_state(self, timeout: float) -> ControllerState:
        """The state after the next change, or after `timeout` seconds."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
        return await self.state()

    async def router_snapshot(self) -> RouterSnapshot:
        snapshot: RouterSnapshot = await self._router.snapshot.remote()
        return snapshot

    def check_drainable(self, name: str) -> None:
        """NotFound for a name without a group; Overloaded while the group is not up."""
        if name not in self.records:
            raise NotFound(f"no worker group {name!r}; there are: {', '.join(self._names)}", param="name")
        if self.records[name].phase is not Phase.READY:
            raise Overloaded(f"worker group {name!r} is {self.records[name].phase.value}; drain it when it is ready")

    async def drain(self, name: str, grace: float) -> int:
        """No new work for a group; returns the sequences left after `grace` seconds."""
        self.check_drainable(name)
        await self._router.set_draining.remote(name, True)
        return await self.groups[name].drain(grace)

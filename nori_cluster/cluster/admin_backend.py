"""What the controller and the router know, joined for the admin plane; drains, restarts and scaling as operations."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import grpc
import msgspec
from msgspec import structs

from nori_cluster.cluster.events import EventLog
from nori_cluster.cluster.operations import Operations, Progress
from nori_cluster.cluster.placement import check_replicas
from nori_cluster.cluster.reconcile import GroupRecord, Phase
from nori_cluster.cluster.reload import next_model
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import ClusterConfig, InFlightPolicy, ModelConfig
from nori_cluster.errors import ConfigError, DeadlineExceeded, NoriError, NotFound
from nori_cluster.routing.base import GroupReport, GroupState, GroupView
from nori_cluster.rpc.admin_types import (
    ClusterStatus,
    EventInfo,
    GatewayInfo,
    GroupInfo,
    LoadInfo,
    ModelInfo,
    OperationInfo,
    WorkerInfo,
)
from nori_cluster.rpc.router_server import RouterSnapshot
from nori_cluster.types import GroupSpec
from nori_cluster.version import __version__

log = logging.getLogger(__name__)

REMEMBERED_OPERATIONS = 256
ROLL_GRACE = 5.0  # seconds for running sequences to end by themselves, before they move

Work = Callable[[Progress], Awaitable[None]]


class Pool(Protocol):
    """What this needs of the controller."""

    config: ClusterConfig
    records: dict[str, GroupRecord]
    groups: dict[str, WorkerGroup]
    events: EventLog
    operations: Operations

    @property
    def desired(self) -> int: ...

    @property
    def restarts(self) -> tuple[int, int]: ...

    async def router_snapshot(self) -> RouterSnapshot: ...

    def wanted_model(self, name: str) -> ModelConfig: ...

    def check_drainable(self, name: str) -> None: ...

    async def drain(self, name: str, grace: float) -> int: ...

    async def resume(self, name: str) -> None: ...


class ControllerAdmin:
    """The AdminBackend of a controller."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._operations: dict[str, OperationInfo] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    async def get_status(self) -> ClusterStatus:
        groups = await self.list_groups()
        snapshot = await self._pool.router_snapshot()
        now = time.time()
        model = ModelInfo(
            model=self._pool.config.group.model.name,
            desired_groups=self._pool.desired,
            ready_groups=sum(g.state in (GroupState.READY, GroupState.BUSY) for g in groups),
            load=_total([group.load for group in groups]),
        )
        gateways = tuple(
            GatewayInfo(gateway_id=g.gateway_id, open_requests=g.open_requests, heartbeat=now - g.silent_for)
            for g in snapshot.gateways
        )
        controllers, routers = self._pool.restarts
        return ClusterStatus(
            models=(model,),
            gateways=gateways,
            version=__version__,
            controller_restarts=controllers,
            router_restarts=routers,
        )

    async def list_groups(self) -> Sequence[GroupInfo]:
        snapshot = await self._pool.router_snapshot()
        views = {status.view.group_id: status.view for status in snapshot.groups}
        return [self._group(record, views.get(name)) for name, record in self._pool.records.items()]

    def _group(self, record: GroupRecord, view: GroupView | None) -> GroupInfo:
        config = self._pool.config.group
        group = self._pool.groups.get(record.name)
        info = GroupInfo(
            name=record.name,
            model=config.model.name,
            state=GroupState.STARTING if record.phase in (Phase.STARTING, Phase.READY) else GroupState.DEAD,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            last_failure=f"no room: it {record.unplaceable}" if record.unplaceable else record.last_failure,
            weight_version=self._pool.wanted_model(record.name).weight_version,
            incarnation=record.incarnation,
            failures=record.lost,
            restarts=record.restarts,
        )
        if group is None:
            return info
        info = structs.replace(
            info,
            address=group.address,
            engine_pid=group.engine_pid,
            created=group.created,
            facts={} if group.spec is None else group_facts(self._pool.config, group.spec),
            workers=tuple(
                WorkerInfo(rank=rank, host=group.host, device=config.parallel.device, pid=pid)
                for rank, pid in enumerate(group.pids)
            ),
        )
        if record.phase is Phase.STARTING:
            return structs.replace(info, state=GroupState.LOADING if group.pids else GroupState.STARTING)
        if view is None or view.registration.incarnation != record.incarnation:
            return info  # ready for us, not yet seen by the router
        facts = view.registration
        return structs.replace(
            info,
            state=view.state,
            step=view.report.step,
            numerics_id=facts.numerics_id,
            load=_load(view.report, facts.kv_blocks),
        )

    async def drain(self, group: str, grace: float | None) -> OperationInfo:
        self._pool.check_drainable(group)
        self._pool.operations.check_free(group)
        seconds = self._pool.config.drain_timeout if grace is None else grace

        async def work(on_progress: Progress) -> None:
            if left := await self._pool.drain(group, seconds):
                raise DeadlineExceeded(f"{left} sequences still run after {seconds:g} s; the group takes no new ones")

        return self._start(f"drain-{group}", "DrainWorkerGroup", work)

    async def scale(self, model: str, count: int, validate_only: bool) -> OperationInfo:
        self._check_model(model)
        check_replicas(self._pool.config, count)
        if validate_only:
            now = time.time()
            return self._remember(
                OperationInfo(
                    name=self._name(f"scale-{model}"), method="ScaleModel", done=True, progress_percent=100,
                    created=now, ended=now,
                )
            )  # fmt: skip

        async def work(on_progress: Progress) -> None:
            await self._pool.operations.scale(count, ROLL_GRACE, on_progress)

        return self._start(f"scale-{model}", "ScaleModel", work)

    async def restart(self, model: str, max_unavailable: int, grace: float | None) -> OperationInfo:
        self._check_model(model)
        if max_unavailable < 1:
            raise ConfigError(f"max_unavailable must be at least 1, not {max_unavailable}", param="max_unavailable")

        async def work(on_progress: Progress) -> None:
            await self._pool.operations.restart_groups(
                max_unavailable, ROLL_GRACE if grace is None else grace, on_progress
            )

        return self._start(f"restart-{model}", "RestartModel", work)

    async def reload(
        self, model: str, folder: str, version: str, policy: InFlightPolicy, max_unavailable: int, grace: float | None
    ) -> OperationInfo:
        self._check_model(model)
        if max_unavailable < 1:
            raise ConfigError(f"max_unavailable must be at least 1, not {max_unavailable}", param="max_unavailable")
        wanted = next_model({name: self._pool.wanted_model(name) for name in self._pool.records}, folder, version)
        seconds = self._pool.config.drain_timeout if grace is None else grace

        async def work(on_progress: Progress) -> None:
            await self._pool.operations.reload(wanted, policy, max_unavailable, seconds, on_progress)

        return self._start(f"reload-{model}", "ReloadWeights", work)

    def _check_model(self, model: str) -> None:
        known = self._pool.config.group.model.name
        if model != known:
            raise NotFound(f"no model {model!r}; there is: {known}", param="model")

    def _name(self, what: str) -> str:
        return f"{what}-{next(self._numbers)}"

    def _start(self, what: str, method: str, work: Work) -> OperationInfo:
        """An operation that runs by itself; it ends whatever becomes of its groups."""
        operation = self._remember(OperationInfo(name=self._name(what), method=method, created=time.time()))
        task = asyncio.create_task(self._run(operation, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return operation

    async def _run(self, operation: OperationInfo, work: Work) -> None:
        code, message, percent = grpc.StatusCode.OK, "", 100

        def progress(value: int) -> None:
            nonlocal percent
            percent = value
            if operation.name in self._operations:  # nobody asks for one that is forgotten
                self._remember(structs.replace(operation, progress_percent=value))

        try:
            await work(progress)
            percent = 100
        except NoriError as error:
            code, message = grpc.StatusCode[error.grpc_code], error.message
        except Exception as bug:
            log.exception("operation %s failed", operation.name)
            code, message = grpc.StatusCode.INTERNAL, f"{type(bug).__name__}: {bug}"
        ended = structs.replace(
            operation,
            done=True,
            progress_percent=percent,
            error_code=code.value[0],
            error_message=message,
            ended=time.time(),
        )
        self._remember(ended)

    def _remember(self, operation: OperationInfo) -> OperationInfo:
        self._operations[operation.name] = operation
        while len(self._operations) > REMEMBERED_OPERATIONS:
            del self._operations[next(iter(self._operations))]
        return operation

    async def get_operation(self, name: str) -> OperationInfo | None:
        return self._operations.get(name)

    async def resume(self, group: str) -> GroupInfo:
        self._pool.operations.check_free(group)
        await self._pool.resume(group)
        return next(info for info in await self.list_groups() if info.name == group)

    def past_events(self, after: int) -> Sequence[EventInfo]:
        return self._pool.events.past(after)

    def follow_events(self, after: int) -> AsyncIterator[EventInfo]:
        return self._pool.events.follow(after)


def group_facts(config: ClusterConfig, spec: GroupSpec) -> dict[str, str]:
    """What decides the speed and the bits of a loaded group, for reports: precision, weights, and what it was told."""
    flags = structs.asdict(config.group) | {"replicas": config.replicas}
    del flags["model"]
    told = msgspec.json.encode(flags).decode()
    return {"revision": spec.weights_id.partition("@")[0], "weights": spec.dtype, "kv_cache": spec.dtype, "flags": told}


def _load(report: GroupReport, kv_blocks: int) -> LoadInfo:
    return LoadInfo(
        running_sequences=report.running_sequences,
        waiting_sequences=report.waiting_sequences,
        tokens_per_second=report.tokens_per_second,
        generated_tokens=report.generated_tokens,
        total_kv_blocks=kv_blocks,
        free_kv_blocks=report.free_kv_blocks,
    )


def _total(loads: list[LoadInfo]) -> LoadInfo:
    return LoadInfo(**{name: sum(getattr(load, name) for load in loads) for name in LoadInfo.__struct_fields__})

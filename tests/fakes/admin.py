"""A cluster as the admin plane shows it: two groups of one model, and drains that take a moment."""

from collections.abc import AsyncIterator

import msgspec

from nori_cluster.errors import NotFound
from nori_cluster.routing.base import GroupState
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


def load(running: int, rate: float) -> LoadInfo:
    return LoadInfo(running_sequences=running, tokens_per_second=rate, total_kv_blocks=100, free_kv_blocks=75)


def group(name: str, state: GroupState, rate: float, last_failure: str = "") -> GroupInfo:
    workers = tuple(WorkerInfo(rank=rank, host="127.0.0.1", device="cpu", pid=4000 + rank) for rank in range(2))
    return GroupInfo(
        name=name,
        model="tiny",
        state=state,
        address="127.0.0.1:50100",
        engine_pid=3999,
        step=12,
        tensor_parallel_size=2,
        workers=workers,
        load=load(3, rate),
        last_failure=last_failure,
        numerics_id="a1b2c3",
        weight_version="4",
        incarnation=2,
        failures=1,
        restarts=3,
        facts={"weights": "bfloat16", "kv_cache": "bfloat16", "revision": "0123abcd", "flags": "{}"},
    )


class FakeAdminBackend:
    """An AdminBackend. drains: (group, grace) in order; the operation is done at the second look at it."""

    def __init__(self) -> None:
        self.groups = [
            group("tiny-0", GroupState.BUSY, 40.0),
            group("tiny-1", GroupState.STALLED, 2.5, "rank 1 [cpu] was killed"),
        ]
        self.drains: list[tuple[str, float | None]] = []
        self.asked: list[tuple[object, ...]] = []  # scale and restart, in order
        self.looks = 0
        self.error_code = 0

    async def get_status(self) -> ClusterStatus:
        model = ModelInfo(model="tiny", desired_groups=2, ready_groups=1, load=load(6, 42.5))
        return ClusterStatus(models=(model,), gateways=(GatewayInfo(gateway_id="g1", open_requests=6),), version="9.9",
            controller_restarts=2, router_restarts=0,
        )  # fmt: skip

    async def list_groups(self) -> list[GroupInfo]:
        return self.groups

    async def drain(self, group: str, grace: float | None) -> OperationInfo:
        if group not in {known.name for known in self.groups}:
            raise NotFound(f"there is no group {group!r}")
        self.drains.append((group, grace))
        return OperationInfo(name=f"drain-{group}", method="DrainWorkerGroup")

    async def scale(self, model: str, count: int, validate_only: bool) -> OperationInfo:
        if model != "tiny":
            raise NotFound(f"no model {model!r}; there is: tiny")
        self.asked.append(("scale", model, count, validate_only))
        return OperationInfo(name=f"scale-{model}", method="ScaleModel", done=validate_only)

    async def restart(self, model: str, max_unavailable: int, grace: float | None) -> OperationInfo:
        if model != "tiny":
            raise NotFound(f"no model {model!r}; there is: tiny")
        self.asked.append(("restart", model, max_unavailable, grace))
        return OperationInfo(name=f"restart-{model}", method="RestartModel")

    async def reload(
        self, model: str, folder: str, version: str, policy: str, max_unavailable: int, grace: float | None
    ) -> OperationInfo:
        self.asked.append(("reload", model, folder, version, policy, max_unavailable, grace))
        return OperationInfo(name=f"reload-{model}", method="ReloadWeights")

    async def resume(self, group: str) -> GroupInfo:
        for known in self.groups:
            if known.name == group:
                return known
        raise NotFound(f"there is no group {group!r}")

    def past_events(self, after: int) -> list[EventInfo]:
        lost = EventInfo(
            sequence=1, time=1.0, kind="lost", group="tiny-1", incarnation=2, message="rank 1 (pid 7) is gone"
        )
        return [
            event
            for event in (lost, msgspec.structs.replace(lost, sequence=2, kind="starting", message=""))
            if event.sequence > after
        ]

    async def follow_events(self, after: int) -> AsyncIterator[EventInfo]:
        for event in self.past_events(after):
            yield event

    async def get_operation(self, name: str) -> OperationInfo | None:
        self.looks += 1
        operation = OperationInfo(name=name, method="DrainWorkerGroup", done=self.looks > 1)
        if operation.done and self.error_code:
            return msgspec.structs.replace(operation, error_code=self.error_code, error_message="lost while draining")
        return operation

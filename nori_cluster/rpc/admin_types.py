"""What the admin plane shows, as structs, and the AdminBackend that fills them (the controller, or a fake).

Names are bare here; the wire's resource names ("workerGroups/x") are made by convert_admin. Times are unix seconds.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from nori_cluster.config import InFlightPolicy
from nori_cluster.routing.base import GroupState


class LoadInfo(msgspec.Struct, frozen=True, kw_only=True):
    running_sequences: int = 0
    waiting_sequences: int = 0
    tokens_per_second: float = 0.0
    generated_tokens: int = 0
    total_kv_blocks: int = 0
    free_kv_blocks: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """0 to 1; 0 where the size is unknown."""
        return 1.0 - self.free_kv_blocks / self.total_kv_blocks if self.total_kv_blocks else 0.0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    device: str
    pid: int = 0
    heartbeat: float = 0.0


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group. last_failure: why its previous incarnation ended, or why there is no room for one. facts: see
    group_facts of the controller. failures, restarts: incarnations lost, and ended on purpose to start anew."""

    name: str
    model: str
    state: GroupState
    address: str = ""
    engine_pid: int = 0
    step: int = 0
    tensor_parallel_size: int = 1
    workers: tuple[WorkerInfo, ...] = ()
    load: LoadInfo = LoadInfo()
    numerics_id: str = ""
    weight_version: str = ""
    last_failure: str = ""
    created: float = 0.0
    facts: dict[str, str] = {}
    incarnation: int = 0
    failures: int = 0
    restarts: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    desired_groups: int
    ready_groups: int
    load: LoadInfo = LoadInfo()


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    gateway_id: str
    open_requests: int
    heartbeat: float = 0.0


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelInfo, ...]
    gateways: tuple[GatewayInfo, ...]
    version: str
    controller_restarts: int = 0
    router_restarts: int = 0


class OperationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Long-running work. error_code: a google.rpc.Code, 0 while running and after success."""

    name: str
    method: str
    done: bool = False
    progress_percent: int = 0
    error_code: int = 0
    error_message: str = ""
    created: float = 0.0
    ended: float = 0.0


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a group. kind: starting, ready, lost, given up, draining, drained, resumed, restarting,
    unplaceable, adopted, removed."""

    sequence: int
    time: float
    kind: str
    group: str
    incarnation: int
    message: str = ""


class AdminBackend(Protocol):
    """What the AdminServicer needs. Errors are NoriErrors (NotFound for an unknown group)."""

    async def get_status(self) -> ClusterStatus: ...

    async def list_groups(self) -> Sequence[GroupInfo]: ...

    async def drain(self, group: str, grace: float | None) -> OperationInfo:
        """Start a drain and return at once. grace: seconds for running sequences, None = the configured time."""

    async def scale(self, model: str, count: int, validate_only: bool) -> OperationInfo:
        """Start or end groups until there are `count`. validate_only: say whether it could be asked, and do nothing."""

    async def restart(self, model: str, max_unavailable: int, grace: float | None) -> OperationInfo:
        """Every group anew, at most max_unavailable (≥ 1) out of service at a time. grace: as for drain."""

    async def reload(
        self,
        model: str,
        folder: str,
        version: str,
        policy: InFlightPolicy,
        max_unavailable: int,
        grace: float | None,
    ) -> OperationInfo:
        """Start to put the weights of another folder in the place of those that are served. version: their label, empty
        = counted on. policy: what becomes of running sequences. grace: seconds for them, None = the configured time."""

    async def get_operation(self, name: str) -> OperationInfo | None: ...

    async def resume(self, group: str) -> GroupInfo:
        """Take new work again after a drain, or start again after a crash loop."""

    def past_events(self, after: int) -> Sequence[EventInfo]: ...

    def follow_events(self, after: int) -> AsyncIterator[EventInfo]:
        """Past ones, then new ones as they come."""

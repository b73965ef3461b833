"""protobuf ↔ our structs for the admin plane; resource names are added and taken off here."""

from google.protobuf.timestamp_pb2 import Timestamp

from nori_cluster.config import InFlightPolicy
from nori_cluster.errors import ClientError
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
from nori_cluster.rpc.generated.nori.admin.v1 import admin_service_pb2 as pb

GROUPS = "workerGroups/"
OPERATIONS = "operations/"
_STATES = {
    GroupState.STARTING: pb.WorkerGroup.STATE_STARTING,
    GroupState.LOADING: pb.WorkerGroup.STATE_LOADING,
    GroupState.READY: pb.WorkerGroup.STATE_READY,
    GroupState.BUSY: pb.WorkerGroup.STATE_BUSY,
    GroupState.STALLED: pb.WorkerGroup.STATE_STALLED,
    GroupState.DRAINING: pb.WorkerGroup.STATE_DRAINING,
    GroupState.DEAD: pb.WorkerGroup.STATE_FAILED,
}
POLICIES: dict[int, InFlightPolicy] = {
    pb.IN_FLIGHT_POLICY_UNSPECIFIED: "wait",
    pb.IN_FLIGHT_POLICY_WAIT: "wait",
    pb.IN_FLIGHT_POLICY_ABORT: "abort",
    pb.IN_FLIGHT_POLICY_CONTINUE: "continue",
}
_STATES_BACK: dict[int, GroupState] = {int(value): key for key, value in _STATES.items()}


def bare(name: str, collection: str) -> str:
    """The id in a resource name such as "workerGroups/x". Raises ClientError."""
    if not name.startswith(collection) or name == collection:
        raise ClientError(f"name must be {collection}ID, got {name[:200]!r}", param="name")
    return name.removeprefix(collection)


def timestamp(seconds: float) -> Timestamp | None:
    """None for an unknown time."""
    nanos = round(seconds * 1e9)
    return Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000) if seconds else None


def unix(value: Timestamp) -> float:
    return value.seconds + value.nanos / 1e9


def load_to_pb(value: LoadInfo) -> pb.Load:
    return pb.Load(
        running_sequences=value.running_sequences,
        waiting_sequences=value.waiting_sequences,
        kv_cache_usage=value.kv_cache_usage,
        tokens_per_second=value.tokens_per_second,
        total_kv_blocks=value.total_kv_blocks,
        free_kv_blocks=value.free_kv_blocks,
        generated_tokens=value.generated_tokens,
    )


def load_from_pb(value: pb.Load) -> LoadInfo:
    return LoadInfo(
        running_sequences=value.running_sequences,
        waiting_sequences=value.waiting_sequences,
        tokens_per_second=value.tokens_per_second,
        total_kv_blocks=value.total_kv_blocks,
        free_kv_blocks=value.free_kv_blocks,
        generated_tokens=value.generated_tokens,
    )


def group_to_pb(value: GroupInfo) -> pb.WorkerGroup:
    workers = [
        pb.Worker(rank=w.rank, host=w.host, device=w.device, pid=w.pid, last_heartbeat_time=timestamp(w.heartbeat))
        for w in value.workers
    ]
    return pb.WorkerGroup(
        name=GROUPS + value.name,
        model=value.model,
        state=_STATES[value.state],
        parallelism=pb.Parallelism(tensor=value.tensor_parallel_size, pipeline=1, expert=1),
        workers=workers,
        load=load_to_pb(value.load),
        create_time=timestamp(value.created),
        address=value.address,
        engine_pid=value.engine_pid,
        step=value.step,
        numerics_id=value.numerics_id,
        weight_version=value.weight_version,
        last_failure=value.last_failure,
        facts=value.facts,
        incarnation=value.incarnation,
        failures=value.failures,
        restarts=value.restarts,
    )


def group_from_pb(value: pb.WorkerGroup) -> GroupInfo:
    workers = tuple(
        WorkerInfo(rank=w.rank, host=w.host, device=w.device, pid=w.pid, heartbeat=unix(w.last_heartbeat_time))
        for w in value.workers
    )
    return GroupInfo(
        name=bare(value.name, GROUPS),
        model=value.model,
        state=_STATES_BACK.get(int(value.state), GroupState.STALLED),
        address=value.address,
        engine_pid=value.engine_pid,
        step=value.step,
        tensor_parallel_size=value.parallelism.tensor,
        workers=workers,
        load=load_from_pb(value.load),
        numerics_id=value.numerics_id,
        weight_version=value.weight_version,
        last_failure=value.last_failure,
        created=unix(value.create_time),
        facts=dict(value.facts),
        incarnation=value.incarnation,
        failures=value.failures,
        restarts=value.restarts,
    )


def status_to_pb(value: ClusterStatus) -> pb.GetClusterStatusResponse:
    models = [
        pb.ModelStatus(
            model=m.model, desired_groups=m.desired_groups, ready_groups=m.ready_groups, load=load_to_pb(m.load)
        )
        for m in value.models
    ]
    gateways = [
        pb.GatewayStatus(
            gateway_id=g.gateway_id, open_requests=g.open_requests, last_heartbeat_time=timestamp(g.heartbeat)
        )
        for g in value.gateways
    ]
    return pb.GetClusterStatusResponse(
        models=models,
        gateways=gateways,
        version=value.version,
        controller_restarts=value.controller_restarts,
        router_restarts=value.router_restarts,
    )


def status_from_pb(value: pb.GetClusterStatusResponse) -> ClusterStatus:
    models = tuple(
        ModelInfo(
            model=m.model, desired_groups=m.desired_groups, ready_groups=m.ready_groups, load=load_from_pb(m.load)
        )
        for m in value.models
    )
    gateways = tuple(
        GatewayInfo(gateway_id=g.gateway_id, open_requests=g.open_requests, heartbeat=unix(g.last_heartbeat_time))
        for g in value.gateways
    )
    return ClusterStatus(
        models=models,
        gateways=gateways,
        version=value.version,
        controller_restarts=value.controller_restarts,
        router_restarts=value.router_restarts,
    )


def operation_to_pb(value: OperationInfo) -> pb.Operation:
    return pb.Operation(
        name=OPERATIONS + value.name,
        done=value.done,
        method=value.method,
        progress_percent=value.progress_percent,
        error_code=value.error_code,
        error_message=value.error_message,
        create_time=timestamp(value.created),
        end_time=timestamp(value.ended),
    )


def operation_from_pb(value: pb.Operation) -> OperationInfo:
    return OperationInfo(
        name=bare(value.name, OPERATIONS),
        method=value.method,
        done=value.done,
        progress_percent=value.progress_percent,
        error_code=value.error_code,
        error_message=value.error_message,
        created=unix(value.create_time),
        ended=unix(value.end_time),
    )


def event_to_pb(value: EventInfo) -> pb.StreamClusterEventsResponse:
    event = pb.GroupEvent(
        name=GROUPS + value.group, incarnation=value.incarnation, kind=value.kind, message=value.message
    )
    return pb.StreamClusterEventsResponse(sequence=value.sequence, event_time=timestamp(value.time), group_event=event)


def event_from_pb(value: pb.StreamClusterEventsResponse) -> EventInfo:
    event = value.group_event
    return EventInfo(
        sequence=value.sequence,
        time=unix(value.event_time),
        kind=event.kind,
        group=event.name.removeprefix(GROUPS),
        incarnation=event.incarnation,
        message=event.message,
    )

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InFlightPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_POLICY_UNSPECIFIED: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_WAIT: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_ABORT: _ClassVar[InFlightPolicy]
    IN_FLIGHT_POLICY_CONTINUE: _ClassVar[InFlightPolicy]
IN_FLIGHT_POLICY_UNSPECIFIED: InFlightPolicy
IN_FLIGHT_POLICY_WAIT: InFlightPolicy
IN_FLIGHT_POLICY_ABORT: InFlightPolicy
IN_FLIGHT_POLICY_CONTINUE: InFlightPolicy

class WorkerGroup(_message.Message):
    __slots__ = ("name", "model", "state", "parallelism", "workers", "load", "weight_version", "adapters", "create_time", "etag", "address", "engine_pid", "step", "numerics_id", "last_failure", "facts", "incarnation", "failures", "restarts")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[WorkerGroup.State]
        STATE_STARTING: _ClassVar[WorkerGroup.State]
        STATE_READY: _ClassVar[WorkerGroup.State]
        STATE_DRAINING: _ClassVar[WorkerGroup.State]
        STATE_DRAINED: _ClassVar[WorkerGroup.State]
        STATE_RELOADING: _ClassVar[WorkerGroup.State]
        STATE_FAILED: _ClassVar[WorkerGroup.State]
        STATE_LOADING: _ClassVar[WorkerGroup.State]
        STATE_BUSY: _ClassVar[WorkerGroup.State]
        STATE_STALLED: _ClassVar[WorkerGroup.State]
    STATE_UNSPECIFIED: WorkerGroup.State
    STATE_STARTING: WorkerGroup.State
    STATE_READY: WorkerGroup.State
    STATE_DRAINING: WorkerGroup.State
    STATE_DRAINED: WorkerGroup.State
    STATE_RELOADING: WorkerGroup.State
    STATE_FAILED: WorkerGroup.State
    STATE_LOADING: WorkerGroup.State
    STATE_BUSY: WorkerGroup.State
    STATE_STALLED: WorkerGroup.State
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    state: WorkerGroup.State
    parallelism: Parallelism
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    load: Load
    weight_version: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    create_time: _timestamp_pb2.Timestamp
    etag: str
    address: str
    engine_pid: int
    step: int
    numerics_id: str
    last_failure: str
    facts: _containers.ScalarMap[str, str]
    incarnation: int
    failures: int
    restarts: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[WorkerGroup.State, str]] = ..., parallelism: _Optional[_Union[Parallelism, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., weight_version: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., etag: _Optional[str] = ..., address: _Optional[str] = ..., engine_pid: _Optional[int] = ..., step: _Optional[int] = ..., numerics_id: _Optional[str] = ..., last_failure: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., incarnation: _Optional[int] = ..., failures: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class Parallelism(_message.Message):
    __slots__ = ("tensor", "pipeline", "expert")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    pipeline: int
    expert: int
    def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., expert: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rank", "host", "device", "last_heartbeat_time", "pid")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    device: str
    last_heartbeat_time: _timestamp_pb2.Timestamp
    pid: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., last_heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_sequences", "waiting_sequences", "kv_cache_usage", "tokens_per_second", "total_kv_blocks", "free_kv_blocks", "generated_tokens")
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_sequences: int
    waiting_sequences: int
    kv_cache_usage: float
    tokens_per_second: float
    total_kv_blocks: int
    free_kv_blocks: int
    generated_tokens: int
    def __init__(self, running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., total_kv_blocks: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("name", "done", "method", "progress_percent", "error_code", "error_message", "create_time", "end_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    done: bool
    method: str
    progress_percent: int
    error_code: int
    error_message: str
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., done: _Optional[bool] = ..., method: _Optional[str] = ..., progress_percent: _Optional[int] = ..., error_code: _Optional[int] = ..., error_message: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterStatusResponse(_message.Message):
    __slots__ = ("models", "gateways", "version", "controller_restarts", "router_restarts")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    version: str
    controller_restarts: int
    router_restarts: int
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., version: _Optional[str] = ..., controller_restarts: _Optional[int] = ..., router_restarts: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model", "desired_groups", "ready_groups", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DESIRED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    READY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    desired_groups: int
    ready_groups: int
    load: Load
    def __init__(self, model: _Optional[str] = ..., desired_groups: _Optional[int] = ..., ready_groups: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "open_requests", "last_heartbeat_time")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    open_requests: int
    last_heartbeat_time: _timestamp_pb2.Timestamp
    def __init__(self, gateway_id: _Optional[str] = ..., open_requests: _Optional[int] = ..., last_heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListWorkerGroupsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "filter")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    filter: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ...) -> None: ...

class ListWorkerGroupsResponse(_message.Message):
    __slots__ = ("worker_groups", "next_page_token")
    WORKER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_groups: _containers.RepeatedCompositeFieldContainer[WorkerGroup]
    next_page_token: str
    def __init__(self, worker_groups: _Optional[_Iterable[_Union[WorkerGroup, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetWorkerGroupRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetWorkerGroupResponse(_message.Message):
    __slots__ = ("worker_group",)
    WORKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_group: WorkerGroup
    def __init__(self, worker_group: _Optional[_Union[WorkerGroup, _Mapping]] = ...) -> None: ...

class ScaleModelRequest(_message.Message):
    __slots__ = ("model", "group_count", "validate_only", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    group_count: int
    validate_only: bool
    request_id: str
    def __init__(self, model: _Optional[str] = ..., group_count: _Optional[int] = ..., validate_only: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class ScaleModelResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class RestartModelRequest(_message.Message):
    __slots__ = ("model", "max_unavailable", "grace_period", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_unavailable: int
    grace_period: _duration_pb2.Duration
    request_id: str
    def __init__(self, model: _Optional[str] = ..., max_unavailable: _Optional[int] = ..., grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class RestartModelResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class DrainWorkerGroupRequest(_message.Message):
    __slots__ = ("name", "grace_period", "etag", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_period: _duration_pb2.Duration
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DrainWorkerGroupResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class ResumeWorkerGroupRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeWorkerGroupResponse(_message.Message):
    __slots__ = ("worker_group",)
    WORKER_GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_group: WorkerGroup
    def __init__(self, worker_group: _Optional[_Union[WorkerGroup, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "base_model", "uri", "rank", "pinned", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    base_model: str
    uri: str
    rank: int
    pinned: bool
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., base_model: _Optional[str] = ..., uri: _Optional[str] = ..., rank: _Optional[int] = ..., pinned: _Optional[bool] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter", "adapter_id", "replace", "request_id")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    adapter_id: str
    replace: bool
    request_id: str
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., adapter_id: _Optional[str] = ..., replace: _Optional[bool] = ..., request_id: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "allow_missing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    name: str
    allow_missing: bool
    def __init__(self, name: _Optional[str] = ..., allow_missing: _Optional[bool] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ReloadWeightsRequest(_message.Message):
    __slots__ = ("model", "uri", "weight_version", "in_flight_policy", "max_unavailable", "request_id", "grace_period")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    model: str
    uri: str
    weight_version: str
    in_flight_policy: InFlightPolicy
    max_unavailable: int
    request_id: str
    grace_period: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., uri: _Optional[str] = ..., weight_version: _Optional[str] = ..., in_flight_policy: _Optional[_Union[InFlightPolicy, str]] = ..., max_unavailable: _Optional[int] = ..., request_id: _Optional[str] = ..., grace_period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReloadWeightsResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class RoutingPolicy(_message.Message):
    __slots__ = ("name", "algorithm", "cache_affinity_weight", "load_weight", "max_queue_time", "max_waiting_requests", "etag")
    class Algorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ALGORITHM_UNSPECIFIED: _ClassVar[RoutingPolicy.Algorithm]
        ALGORITHM_ROUND_ROBIN: _ClassVar[RoutingPolicy.Algorithm]
        ALGORITHM_LEAST_LOAD: _ClassVar[RoutingPolicy.Algorithm]
        ALGORITHM_POWER_OF_TWO: _ClassVar[RoutingPolicy.Algorithm]
        ALGORITHM_CACHE_AWARE: _ClassVar[RoutingPolicy.Algorithm]
        ALGORITHM_SESSION_AFFINITY: _ClassVar[RoutingPolicy.Algorithm]
    ALGORITHM_UNSPECIFIED: RoutingPolicy.Algorithm
    ALGORITHM_ROUND_ROBIN: RoutingPolicy.Algorithm
    ALGORITHM_LEAST_LOAD: RoutingPolicy.Algorithm
    ALGORITHM_POWER_OF_TWO: RoutingPolicy.Algorithm
    ALGORITHM_CACHE_AWARE: RoutingPolicy.Algorithm
    ALGORITHM_SESSION_AFFINITY: RoutingPolicy.Algorithm
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    CACHE_AFFINITY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LOAD_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    algorithm: RoutingPolicy.Algorithm
    cache_affinity_weight: float
    load_weight: float
    max_queue_time: _duration_pb2.Duration
    max_waiting_requests: int
    etag: str
    def __init__(self, name: _Optional[str] = ..., algorithm: _Optional[_Union[RoutingPolicy.Algorithm, str]] = ..., cache_affinity_weight: _Optional[float] = ..., load_weight: _Optional[float] = ..., max_queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_waiting_requests: _Optional[int] = ..., etag: _Optional[str] = ...) -> None: ...

class GetRoutingPolicyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetRoutingPolicyResponse(_message.Message):
    __slots__ = ("routing_policy",)
    ROUTING_POLICY_FIELD_NUMBER: _ClassVar[int]
    routing_policy: RoutingPolicy
    def __init__(self, routing_policy: _Optional[_Union[RoutingPolicy, _Mapping]] = ...) -> None: ...

class UpdateRoutingPolicyRequest(_message.Message):
    __slots__ = ("routing_policy", "update_mask")
    ROUTING_POLICY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    routing_policy: RoutingPolicy
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, routing_policy: _Optional[_Union[RoutingPolicy, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateRoutingPolicyResponse(_message.Message):
    __slots__ = ("routing_policy",)
    ROUTING_POLICY_FIELD_NUMBER: _ClassVar[int]
    routing_policy: RoutingPolicy
    def __init__(self, routing_policy: _Optional[_Union[RoutingPolicy, _Mapping]] = ...) -> None: ...

class GetOperationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class WaitOperationRequest(_message.Message):
    __slots__ = ("name", "timeout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WaitOperationResponse(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CancelOperationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamClusterEventsRequest(_message.Message):
    __slots__ = ("after_sequence", "past_only")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAST_ONLY_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    past_only: bool
    def __init__(self, after_sequence: _Optional[int] = ..., past_only: _Optional[bool] = ...) -> None: ...

class StreamClusterEventsResponse(_message.Message):
    __slots__ = ("sequence", "event_time", "worker_group_changed", "operation_changed", "routing_policy_changed", "group_event")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    WORKER_GROUP_CHANGED_FIELD_NUMBER: _ClassVar[int]
    OPERATION_CHANGED_FIELD_NUMBER: _ClassVar[int]
    ROUTING_POLICY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    GROUP_EVENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    event_time: _timestamp_pb2.Timestamp
    worker_group_changed: WorkerGroup
    operation_changed: Operation
    routing_policy_changed: RoutingPolicy
    group_event: GroupEvent
    def __init__(self, sequence: _Optional[int] = ..., event_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., worker_group_changed: _Optional[_Union[WorkerGroup, _Mapping]] = ..., operation_changed: _Optional[_Union[Operation, _Mapping]] = ..., routing_policy_changed: _Optional[_Union[RoutingPolicy, _Mapping]] = ..., group_event: _Optional[_Union[GroupEvent, _Mapping]] = ...) -> None: ...

class GroupEvent(_message.Message):
    __slots__ = ("name", "incarnation", "kind", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    kind: str
    message: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

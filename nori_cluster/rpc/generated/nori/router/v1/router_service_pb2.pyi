import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_STARTING: _ClassVar[GroupState]
    GROUP_STATE_LOADING: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_BUSY: _ClassVar[GroupState]
    GROUP_STATE_STALLED: _ClassVar[GroupState]
    GROUP_STATE_DRAINING: _ClassVar[GroupState]
    GROUP_STATE_DEAD: _ClassVar[GroupState]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_TENANT_LIMIT: _ClassVar[RefusalReason]
    REFUSAL_REASON_QUEUE_FULL: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_GROUP: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNKNOWN_MODEL: _ClassVar[RefusalReason]
    REFUSAL_REASON_DEADLINE_PASSED: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_LONG: _ClassVar[RefusalReason]
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_STARTING: GroupState
GROUP_STATE_LOADING: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_BUSY: GroupState
GROUP_STATE_STALLED: GroupState
GROUP_STATE_DRAINING: GroupState
GROUP_STATE_DEAD: GroupState
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_TENANT_LIMIT: RefusalReason
REFUSAL_REASON_QUEUE_FULL: RefusalReason
REFUSAL_REASON_NO_GROUP: RefusalReason
REFUSAL_REASON_UNKNOWN_MODEL: RefusalReason
REFUSAL_REASON_DEADLINE_PASSED: RefusalReason
REFUSAL_REASON_TOO_LONG: RefusalReason

class RegisterRequest(_message.Message):
    __slots__ = ("registration", "state", "report")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    registration: GroupRegistration
    state: GroupState
    report: GroupReport
    def __init__(self, registration: _Optional[_Union[GroupRegistration, _Mapping]] = ..., state: _Optional[_Union[GroupState, str]] = ..., report: _Optional[_Union[GroupReport, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class GroupRegistration(_message.Message):
    __slots__ = ("group_id", "group_incarnation", "model", "address", "max_context_tokens", "max_running_sequences", "kv_block_tokens", "kv_blocks", "hash_seed", "numerics_id", "max_batched_tokens", "weights_id", "weight_version")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    group_incarnation: int
    model: str
    address: str
    max_context_tokens: int
    max_running_sequences: int
    kv_block_tokens: int
    kv_blocks: int
    hash_seed: int
    numerics_id: str
    max_batched_tokens: int
    weights_id: str
    weight_version: str
    def __init__(self, group_id: _Optional[str] = ..., group_incarnation: _Optional[int] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., hash_seed: _Optional[int] = ..., numerics_id: _Optional[str] = ..., max_batched_tokens: _Optional[int] = ..., weights_id: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...

class GroupReport(_message.Message):
    __slots__ = ("step", "running_sequences", "waiting_sequences", "waiting_tokens", "free_kv_blocks", "tokens_per_second", "generated_tokens", "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evictions", "preemptions", "proposed_draft_tokens", "accepted_draft_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    running_sequences: int
    waiting_sequences: int
    waiting_tokens: int
    free_kv_blocks: int
    tokens_per_second: float
    generated_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_evictions: int
    preemptions: int
    proposed_draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, step: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., prefix_cache_evictions: _Optional[int] = ..., preemptions: _Optional[int] = ..., proposed_draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class CoordinateRequest(_message.Message):
    __slots__ = ("hello", "places", "cancels", "finished", "reach")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    places: _containers.RepeatedCompositeFieldContainer[Place]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    reach: Reach
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("unreachable_group_ids",)
    UNREACHABLE_GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    unreachable_group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unreachable_group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CoordinateResponse(_message.Message):
    __slots__ = ("placements", "refusals", "table")
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    table: Table
    def __init__(self, placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "gateway_incarnation", "open_requests", "protocol_version")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_incarnation: int
    open_requests: _containers.RepeatedCompositeFieldContainer[OpenRequest]
    protocol_version: int
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., open_requests: _Optional[_Iterable[_Union[OpenRequest, _Mapping]]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request", "group_id", "tenant", "outstanding_tokens", "prompt_tokens", "candidates")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    request: int
    group_id: str
    tenant: str
    outstanding_tokens: int
    prompt_tokens: int
    candidates: int
    def __init__(self, request: _Optional[int] = ..., group_id: _Optional[str] = ..., tenant: _Optional[str] = ..., outstanding_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., candidates: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("request", "model", "tenant", "session_id", "priority", "prompt_tokens", "max_tokens", "candidates", "block_hashes", "time_left", "ttft_target", "tpot_target", "continuation", "adapter")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request: int
    model: str
    tenant: str
    session_id: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    candidates: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    time_left: _duration_pb2.Duration
    ttft_target: _duration_pb2.Duration
    tpot_target: _duration_pb2.Duration
    continuation: Continuation
    adapter: str
    def __init__(self, request: _Optional[int] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., candidates: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tpot_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("lost_group_id", "numerics_id", "attempt", "weights_id")
    LOST_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    lost_group_id: str
    numerics_id: str
    attempt: int
    weights_id: str
    def __init__(self, lost_group_id: _Optional[str] = ..., numerics_id: _Optional[str] = ..., attempt: _Optional[int] = ..., weights_id: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("request", "group_id", "order_key", "waited", "candidates")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    request: int
    group_id: str
    order_key: int
    waited: _duration_pb2.Duration
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, request: _Optional[int] = ..., group_id: _Optional[str] = ..., order_key: _Optional[int] = ..., waited: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("group_id", "score", "matched_tokens", "outstanding_tokens")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    score: float
    matched_tokens: int
    outstanding_tokens: int
    def __init__(self, group_id: _Optional[str] = ..., score: _Optional[float] = ..., matched_tokens: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("request", "reason", "message", "retry_after")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    request: int
    reason: RefusalReason
    message: str
    retry_after: _duration_pb2.Duration
    def __init__(self, request: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request", "computed_prompt_tokens", "cached_prompt_tokens", "output_tokens", "failed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    failed: bool
    def __init__(self, request: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("epoch", "groups", "gateways", "queue_full", "waiting", "drain_rate", "retry_after", "restarts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FULL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupView]
    gateways: int
    queue_full: bool
    waiting: int
    drain_rate: float
    retry_after: _duration_pb2.Duration
    restarts: Restarts
    def __init__(self, epoch: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupView, _Mapping]]] = ..., gateways: _Optional[int] = ..., queue_full: _Optional[bool] = ..., waiting: _Optional[int] = ..., drain_rate: _Optional[float] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., restarts: _Optional[_Union[Restarts, _Mapping]] = ...) -> None: ...

class Restarts(_message.Message):
    __slots__ = ("controllers", "routers", "groups")
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    controllers: int
    routers: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupRestarts]
    def __init__(self, controllers: _Optional[int] = ..., routers: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupRestarts, _Mapping]]] = ...) -> None: ...

class GroupRestarts(_message.Message):
    __slots__ = ("group_id", "model", "lost", "on_purpose")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ON_PURPOSE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    model: str
    lost: int
    on_purpose: int
    def __init__(self, group_id: _Optional[str] = ..., model: _Optional[str] = ..., lost: _Optional[int] = ..., on_purpose: _Optional[int] = ...) -> None: ...

class GroupView(_message.Message):
    __slots__ = ("group_id", "model", "address", "state", "outstanding_tokens", "kv_block_tokens", "hash_seed", "numerics_id", "max_context_tokens", "report", "group_incarnation", "max_running_sequences", "max_batched_tokens", "kv_blocks", "weights_id", "weight_version")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    model: str
    address: str
    state: GroupState
    outstanding_tokens: int
    kv_block_tokens: int
    hash_seed: int
    numerics_id: str
    max_context_tokens: int
    report: GroupReport
    group_incarnation: int
    max_running_sequences: int
    max_batched_tokens: int
    kv_blocks: int
    weights_id: str
    weight_version: str
    def __init__(self, group_id: _Optional[str] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[GroupState, str]] = ..., outstanding_tokens: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., hash_seed: _Optional[int] = ..., numerics_id: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., report: _Optional[_Union[GroupReport, _Mapping]] = ..., group_incarnation: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., weights_id: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as _generation_pb2
from nori_cluster.rpc.generated.nori.common.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_LOGPROBS: _ClassVar[Feature]
    FEATURE_KV_TRANSFER: _ClassVar[Feature]
    FEATURE_HIDDEN_STATES: _ClassVar[Feature]

class GroupRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_ROLE_UNSPECIFIED: _ClassVar[GroupRole]
    GROUP_ROLE_UNIFIED: _ClassVar[GroupRole]
    GROUP_ROLE_PREFILL: _ClassVar[GroupRole]
    GROUP_ROLE_DECODE: _ClassVar[GroupRole]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_FIRST: _ClassVar[Pooling]

class RejectionReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_REASON_UNSPECIFIED: _ClassVar[RejectionReason]
    REJECTION_REASON_QUEUE_FULL: _ClassVar[RejectionReason]
    REJECTION_REASON_DRAINING: _ClassVar[RejectionReason]
    REJECTION_REASON_TOO_LONG: _ClassVar[RejectionReason]
    REJECTION_REASON_INVALID: _ClassVar[RejectionReason]
    REJECTION_REASON_ADAPTER_NOT_LOADED: _ClassVar[RejectionReason]
    REJECTION_REASON_DEADLINE_PASSED: _ClassVar[RejectionReason]
    REJECTION_REASON_OTHER_WEIGHTS: _ClassVar[RejectionReason]

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_STARTING: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_DRAINING: _ClassVar[GroupState]
    GROUP_STATE_PAUSED: _ClassVar[GroupState]
    GROUP_STATE_FAILED: _ClassVar[GroupState]
FEATURE_UNSPECIFIED: Feature
FEATURE_LOGPROBS: Feature
FEATURE_KV_TRANSFER: Feature
FEATURE_HIDDEN_STATES: Feature
GROUP_ROLE_UNSPECIFIED: GroupRole
GROUP_ROLE_UNIFIED: GroupRole
GROUP_ROLE_PREFILL: GroupRole
GROUP_ROLE_DECODE: GroupRole
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_SCORE: Task
POOLING_UNSPECIFIED: Pooling
POOLING_MEAN: Pooling
POOLING_LAST: Pooling
POOLING_FIRST: Pooling
REJECTION_REASON_UNSPECIFIED: RejectionReason
REJECTION_REASON_QUEUE_FULL: RejectionReason
REJECTION_REASON_DRAINING: RejectionReason
REJECTION_REASON_TOO_LONG: RejectionReason
REJECTION_REASON_INVALID: RejectionReason
REJECTION_REASON_ADAPTER_NOT_LOADED: RejectionReason
REJECTION_REASON_DEADLINE_PASSED: RejectionReason
REJECTION_REASON_OTHER_WEIGHTS: RejectionReason
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_STARTING: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_DRAINING: GroupState
GROUP_STATE_PAUSED: GroupState
GROUP_STATE_FAILED: GroupState

class ExchangeRequest(_message.Message):
    __slots__ = ("hello", "submit", "abort", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("welcome", "step_output", "rejection", "group_status", "pong", "accepted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    GROUP_STATUS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step_output: StepOutput
    rejection: Rejection
    group_status: GroupStatus
    pong: Pong
    accepted: Accepted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step_output: _Optional[_Union[StepOutput, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., group_status: _Optional[_Union[GroupStatus, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "gateway_incarnation", "features", "max_unsent_tokens")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_UNSENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_incarnation: int
    features: _containers.RepeatedScalarFieldContainer[Feature]
    max_unsent_tokens: int
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ..., max_unsent_tokens: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("group_id", "group_incarnation", "features", "description")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    group_incarnation: int
    features: _containers.RepeatedScalarFieldContainer[Feature]
    description: GroupDescription
    def __init__(self, group_id: _Optional[str] = ..., group_incarnation: _Optional[int] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ..., description: _Optional[_Union[GroupDescription, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupDescription(_message.Message):
    __slots__ = ("model", "tokenizer_sha256", "vocab_size", "max_context_tokens", "max_running_sequences", "kv_block_tokens", "kv_blocks", "eos_token_ids", "weight_version", "role", "numerics_id", "hash_seed", "protocol_version", "dtype", "quantization", "weights_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_sha256: bytes
    vocab_size: int
    max_context_tokens: int
    max_running_sequences: int
    kv_block_tokens: int
    kv_blocks: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    weight_version: str
    role: GroupRole
    numerics_id: str
    hash_seed: int
    protocol_version: int
    dtype: str
    quantization: str
    weights_id: str
    def __init__(self, model: _Optional[str] = ..., tokenizer_sha256: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., weight_version: _Optional[str] = ..., role: _Optional[_Union[GroupRole, str]] = ..., numerics_id: _Optional[str] = ..., hash_seed: _Optional[int] = ..., protocol_version: _Optional[int] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., weights_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceRequest]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceRequest, _Mapping]]] = ...) -> None: ...

class SequenceRequest(_message.Message):
    __slots__ = ("handle", "prompt_group", "trace_id", "prompt_token_ids", "resumed_tokens", "sampling", "adapter", "priority", "cache_salt", "time_left", "top_logprobs", "prompt_logprobs", "kv_source", "order_key", "candidate", "task", "pooling", "reasoning_end_ids", "starts_in_reasoning", "bad_words", "adapter_revision", "weights_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_GROUP_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ORDER_KEY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_group: int
    trace_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed_tokens: int
    sampling: _sampling_pb2.SamplingParams
    adapter: str
    priority: int
    cache_salt: bytes
    time_left: _duration_pb2.Duration
    top_logprobs: int
    prompt_logprobs: int
    kv_source: KvSource
    order_key: int
    candidate: int
    task: Task
    pooling: Pooling
    reasoning_end_ids: _containers.RepeatedScalarFieldContainer[int]
    starts_in_reasoning: bool
    bad_words: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenSequence]
    adapter_revision: int
    weights_id: str
    def __init__(self, handle: _Optional[int] = ..., prompt_group: _Optional[int] = ..., trace_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., resumed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., kv_source: _Optional[_Union[KvSource, _Mapping]] = ..., order_key: _Optional[int] = ..., candidate: _Optional[int] = ..., task: _Optional[_Union[Task, str]] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., reasoning_end_ids: _Optional[_Iterable[int]] = ..., starts_in_reasoning: _Optional[bool] = ..., bad_words: _Optional[_Iterable[_Union[_generation_pb2.TokenSequence, _Mapping]]] = ..., adapter_revision: _Optional[int] = ..., weights_id: _Optional[str] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("group_id", "descriptor_bytes")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    descriptor_bytes: bytes
    def __init__(self, group_id: _Optional[str] = ..., descriptor_bytes: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("first_step", "last_step", "handles", "token_counts", "token_ids", "starts", "finishes", "logprobs", "load", "engine_time_us", "vectors")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    last_step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    finishes: _containers.RepeatedCompositeFieldContainer[SequenceFinish]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    load: GroupLoad
    engine_time_us: int
    vectors: _containers.RepeatedCompositeFieldContainer[SequenceVector]
    def __init__(self, first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[SequenceFinish, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., load: _Optional[_Union[GroupLoad, _Mapping]] = ..., engine_time_us: _Optional[int] = ..., vectors: _Optional[_Iterable[_Union[SequenceVector, _Mapping]]] = ...) -> None: ...

class SequenceVector(_message.Message):
    __slots__ = ("handle", "values")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    values: bytes
    def __init__(self, handle: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("handle", "cached_tokens", "queue_time", "prefill_time", "prompt_logprobs", "kv_descriptor")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    queue_time: _duration_pb2.Duration
    prefill_time: _duration_pb2.Duration
    prompt_logprobs: _generation_pb2.TokenLogprobs
    kv_descriptor: bytes
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ..., kv_descriptor: _Optional[bytes] = ...) -> None: ...

class SequenceFinish(_message.Message):
    __slots__ = ("handle", "reason", "matched_token_id", "error_message", "retryable", "accepted_draft_tokens", "proposed_draft_tokens", "preemptions", "recomputed_tokens", "prefill_chunks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: _generation_pb2.FinishReason
    matched_token_id: int
    error_message: str
    retryable: bool
    accepted_draft_tokens: int
    proposed_draft_tokens: int
    preemptions: int
    recomputed_tokens: int
    prefill_chunks: int
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., error_message: _Optional[str] = ..., retryable: _Optional[bool] = ..., accepted_draft_tokens: _Optional[int] = ..., proposed_draft_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefill_chunks: _Optional[int] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("handle", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    logprobs: _generation_pb2.TokenLogprobs
    def __init__(self, handle: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("handles", "reason", "message", "retry_after", "param")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    reason: RejectionReason
    message: str
    retry_after: _duration_pb2.Duration
    param: str
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[RejectionReason, str]] = ..., message: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., param: _Optional[str] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("state", "weight_version", "load")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    state: GroupState
    weight_version: str
    load: GroupLoad
    def __init__(self, state: _Optional[_Union[GroupState, str]] = ..., weight_version: _Optional[str] = ..., load: _Optional[_Union[GroupLoad, _Mapping]] = ...) -> None: ...

class GroupLoad(_message.Message):
    __slots__ = ("running_sequences", "waiting_sequences", "waiting_prefill_tokens", "free_kv_blocks", "tokens_per_second")
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    running_sequences: int
    waiting_sequences: int
    waiting_prefill_tokens: int
    free_kv_blocks: int
    tokens_per_second: float
    def __init__(self, running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class DescribeGroupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeGroupResponse(_message.Message):
    __slots__ = ("group_id", "group_incarnation", "description", "state", "load")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    group_incarnation: int
    description: GroupDescription
    state: GroupState
    load: GroupLoad
    def __init__(self, group_id: _Optional[str] = ..., group_incarnation: _Optional[int] = ..., description: _Optional[_Union[GroupDescription, _Mapping]] = ..., state: _Optional[_Union[GroupState, str]] = ..., load: _Optional[_Union[GroupLoad, _Mapping]] = ...) -> None: ...

class StreamCacheEventsRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class StreamCacheEventsResponse(_message.Message):
    __slots__ = ("sequence", "snapshot", "stored_block_hashes", "removed_block_hashes", "cleared")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    stored_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    removed_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    cleared: bool
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored_block_hashes: _Optional[_Iterable[int]] = ..., removed_block_hashes: _Optional[_Iterable[int]] = ..., cleared: _Optional[bool] = ...) -> None: ...

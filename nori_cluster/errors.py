"""Errors of the world, as a tree: each leaf knows its HTTP and gRPC status, OpenAI `type`/`code`, and whether to retry.

`assert` is for our bugs; a NoriError is somebody's fault: the client's (4xx) or the cluster's (5xx).
Instances survive pickling between Ray actors (args rebuild them).
"""

from typing import Any, ClassVar


class NoriError(Exception):
    """Base of all expected errors.

    message: one line a newcomer can act on. param: dotted path of the offending field. retry_after: seconds.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(self, message: str, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, param, retry_after)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.message

    def envelope(self) -> dict[str, Any]:
        """The OpenAI error body: all four keys, `code` a string or null."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ClientError(NoriError):
    """The request is at fault; repeating it unchanged cannot help."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    type = "invalid_request_error"
    code = "invalid_value"


class MissingParameter(ClientError):
    code = "missing_required_parameter"


class UnsupportedParameter(ClientError):
    """A parameter that changes the meaning and is not served (yet)."""

    code = "unsupported_parameter"


class ContextLengthExceeded(ClientError):
    grpc_code = "OUT_OF_RANGE"
    code = "context_length_exceeded"


class CapacityExceeded(ClientError):
    """The request can never fit the group's KV cache."""

    grpc_code = "OUT_OF_RANGE"
    code = "kv_capacity_exceeded"


class Unauthenticated(ClientError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(ClientError):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"


class NotFound(ClientError):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class BodyTooLarge(ClientError):
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "request_too_large"


class RequestTimeout(ClientError):
    """The client stopped sending in the middle of its request."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "request_timeout"


class RateLimited(NoriError):
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Cancelled(NoriError):
    """The client went away; seen in logs only."""

    http_status = 499
    grpc_code = "CANCELLED"
    code = "cancelled"


class Overloaded(NoriError):
    """Queue full, draining, or no ready group: try again after `retry_after` seconds."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    type = "overloaded_error"
    code = "overloaded"


class QueueFull(Overloaded):
    """The router's queue is at its bound; retry_after comes from its drain rate."""

    code = "queue_full"


class NoReadyGroup(Overloaded):
    code = "no_ready_group"


class Draining(Overloaded):
    """This gateway shuts down."""

    code = "draining"


class GatewayFull(Overloaded):
    """This gateway holds as many calls or bytes as it may."""

    code = "gateway_full"


class NotReady(Overloaded):
    """What a readiness probe hears; no request was refused."""

    code = "not_ready"


class EngineFailure(NoriError):
    """A worker group failed while it held the request."""

    code = "engine_failure"


class DeadlineExceeded(NoriError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


class Unimplemented(NoriError):
    http_status = 501
    grpc_code = "UNIMPLEMENTED"
    code = "unimplemented"


class ConfigError(NoriError):
    """A flag, config file or combination of them that cannot work; raised before anything starts."""

    http_status = 400
    grpc_code = "FAILED_PRECONDITION"
    code = "invalid_config"


class CheckpointError(NoriError):
    """A model folder, shard or GGUF file that cannot be trusted or read; names the file and the reason."""

    http_status = 400
    grpc_code = "FAILED_PRECONDITION"
    code = "invalid_checkpoint"


class ModelUnavailable(NoriError):
    """A model source that cannot be fetched (offline, unknown repo); says what to do."""

    http_status = 400
    grpc_code = "FAILED_PRECONDITION"
    code = "model_unavailable"

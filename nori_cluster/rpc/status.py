"""NoriError ↔ gRPC status: code, message and google.rpc details (ErrorInfo, BadRequest, RetryInfo) as AIP-193 says."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from nori_cluster.errors import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    EngineFailure,
    NoriError,
    NotFound,
    Overloaded,
    RateLimited,
    Unauthenticated,
    Unimplemented,
)
from nori_cluster.rpc.convert import duration, seconds
from nori_cluster.rpc.grpc_types import Context

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "nori-cluster"
MAX_MESSAGE = 1000  # characters; HTTP/2 headers carry the message
_BY_CODE: dict[str, type[NoriError]] = {
    "INVALID_ARGUMENT": ClientError,
    "OUT_OF_RANGE": ClientError,
    "FAILED_PRECONDITION": ClientError,
    "UNAUTHENTICATED": Unauthenticated,
    "NOT_FOUND": NotFound,
    "RESOURCE_EXHAUSTED": RateLimited,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNIMPLEMENTED": Unimplemented,
}


def _leaves(kind: type[NoriError]) -> Iterator[type[NoriError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _leaves(child)


_BY_REASON = {kind.code: kind for kind in _leaves(NoriError) if kind.code is not None}


def details_of(error: NoriError) -> status_pb2.Status:
    """The google.rpc.Status that travels in the trailing metadata."""
    out = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_code), message=error.message[:MAX_MESSAGE])
    reason = (error.code or "error").upper()
    _pack(out, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata={"type": error.type}))
    if error.param is not None and isinstance(error, ClientError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=out.message)
        _pack(out, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        _pack(out, error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after)))
    return out


def _pack(
    out: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    out.details.append(packed)


async def abort(context: Context, error: NoriError) -> NoReturn:
    """End the call with this error."""
    status = details_of(error)
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.grpc_code], status.message, metadata)
    raise AssertionError("abort raises")


def error_of(code: grpc.StatusCode, message: str, trailing: Iterable[Any] | None) -> NoriError:
    """What a client makes of a failed call; the leaf is known from ErrorInfo, else guessed from the code."""
    kind = _BY_CODE.get(code.name, EngineFailure)
    param, retry_after = None, None
    for packed in _details(trailing):
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == DOMAIN:
            kind = _BY_REASON.get(info.reason.lower(), kind)
        elif packed.Unpack(bad) and bad.field_violations:
            param = bad.field_violations[0].field
        elif packed.Unpack(retry):
            retry_after = seconds(retry.retry_delay)
    return kind(message, param, retry_after)


def _details(trailing: Iterable[Any] | None) -> list[AnyMessage]:
    raw = next((value for key, value in trailing or () if key == DETAILS_KEY), b"")
    try:
        return list(status_pb2.Status.FromString(raw).details)
    except DecodeError:
        return []  # another server's idea of details; the code still says enough

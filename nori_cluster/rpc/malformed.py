"""Bytes that are no protobuf: the call ends with INVALID_ARGUMENT and one log line, not with gRPC's traceback."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from nori_cluster.errors import ClientError
from nori_cluster.rpc import status

log = logging.getLogger(__name__)


class _Malformed:
    """Stands where the request would: only inside a call can it be refused."""


_MALFORMED = _Malformed()
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For coroutines that take one request; a stream of requests is read by its handler."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, name)
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        return handler._replace(
            request_deserializer=_tolerant(handler.request_deserializer),
            **{name: _refusing(behaviour, str(details.method))},
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def wrapped(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return wrapped


def _refusing(behaviour: Callable[[Any, Any], Awaitable[Any]], method: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def wrapped(request: Any, context: Any) -> Any:
        if request is not _MALFORMED:
            return await behaviour(request, context)
        log.info("%s: the request is no valid protobuf message", method)
        await status.abort(context, ClientError("the request is not a valid message of this method"))

    return wrapped

"""Names of grpc.aio that its type stubs lack."""

from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

Context = grpc.aio.ServicerContext[Any, Any]
StreamCall = grpc.aio.StreamStreamCall[Any, Any]

__all__ = ["EOF", "Context", "StreamCall"]

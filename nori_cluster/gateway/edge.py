"""The outermost ASGI layer: request id, API key, response headers and counts, and errors as the envelope.

Pure ASGI: a stream's chunks pass through one plain function call.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, MutableMapping
from time import monotonic
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from nori_cluster.errors import Cancelled, NoriError, RequestTimeout, Unauthenticated
from nori_cluster.telemetry import GatewayMetrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/livez", "/ready", "/readyz"})
MAX_REQUEST_ID = 128
Headers = list[tuple[bytes, bytes]]


class Edge:
    """Wraps the application. scope["nori.request_id"] is set for everything inside.

    api_key: when given, every path but OPEN_PATHS needs `Authorization: Bearer <key>`.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, api_key: str | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._key_hash = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = monotonic()
        request_id = request_id_of(scope["headers"])
        scope["nori.request_id"] = request_id
        status = 0

        def send_with_headers(message: MutableMapping[str, Any]) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed = b"%d" % ((monotonic() - started_at) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("latin-1")),
                    (b"openai-processing-ms", elapsed),
                ]
            return send(message)

        try:
            if self._key_hash is not None and scope["path"] not in OPEN_PATHS:
                check_key(scope["headers"], self._key_hash)
            await self._app(scope, receive, send_with_headers)
        except Cancelled:
            status = status or Cancelled.http_status
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the last line of defence: logged, answered with the envelope
            if status or not isinstance(error, NoriError):
                log.exception("request %s to %s failed", request_id, scope["path"])
            if not status:
                await send_error(
                    error if isinstance(error, NoriError) else NoriError("internal error"), send_with_headers
                )
        finally:
            self._metrics.http[_route(scope), status] += 1


def check_key(headers: Headers, key_hash: bytes) -> None:
    """Raises Unauthenticated unless the right key is given; compares hashes in constant time."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and hmac.compare_digest(_digest(key.strip()), key_hash):
                return
    raise Unauthenticated("a valid API key is required: Authorization: Bearer <key>")


def request_id_of(headers: Headers) -> str:
    """The client's x-request-id when it is short and printable, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    return secrets.token_hex(16)


def error_response(error: NoriError) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error reply."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
        headers.append((b"retry-after-ms", b"%d" % (error.retry_after * 1000)))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, RequestTimeout):
        headers.append((b"connection", b"close"))
    return error.http_status, headers, msgspec.json.encode(error.envelope())


async def send_error(error: NoriError, send: Send) -> None:
    status, headers, body = error_response(error)
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _route(scope: Scope) -> str:
    """The route's template, which bounds the number of label values."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))

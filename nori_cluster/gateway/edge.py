"""The outermost ASGI layer: request id, API key, room for the body, response headers and counts, errors as envelope.

Pure ASGI: a stream's chunks pass through one plain function call.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Awaitable, MutableMapping
from time import monotonic
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from nori_cluster.config import GatewayConfig
from nori_cluster.errors import Cancelled, NoriError, RequestTimeout, Unauthenticated
from nori_cluster.frontend.gate import Held
from nori_cluster.frontend.service import Service
from nori_cluster.gateway.body import content_length

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/livez", "/ready", "/readyz"})
MAX_REQUEST_ID = 128
Headers = list[tuple[bytes, bytes]]


class Edge:
    """Wraps the application. scope["nori.request_id"] is set for everything inside.

    config.api_key: when given, every path but OPEN_PATHS needs `Authorization: Bearer <key>`. A POST is refused before
    its body is read when the service drains or the gateway holds as much as it may. HEAD is GET without a body. While
    the service drains, every connection is closed after its response.
    """

    def __init__(self, app: ASGIApp, service: Service, config: GatewayConfig) -> None:
        self._app = app
        self._service = service
        self._metrics = service.metrics
        self._max_body = config.max_body_bytes
        self._key_hash = None if config.api_key is None else _digest(config.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = monotonic()
        request_id = request_id_of(scope["headers"])
        scope["nori.request_id"] = request_id
        status, head = 0, scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if head else scope

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
                if self._service.draining:
                    message["headers"].append((b"connection", b"close"))
            elif head:
                message = {**message, "body": b""}
            return send(message)

        try:
            if self._key_hash is not None and scope["path"] not in OPEN_PATHS:
                check_key(scope["headers"], self._key_hash)
            if scope["method"] == "POST":
                self._service.check_open()
                with self._service.gate.hold(min(content_length(scope["headers"]), self._max_body)) as held:
                    await self._app(inner, _counted(receive, held), send_with_headers)
            else:
                await self._app(inner, receive, send_with_headers)
        except Cancelled:
            status = status or Cancelled.http_status
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the last line of defence: logged, answered with the envelope
            inner["nori.error"] = error
            if status or not isinstance(error, NoriError):
                log.exception("request %s to %s failed", request_id, scope["path"])
            if not status:
                await send_error(
                    error if isinstance(error, NoriError) else NoriError("internal error"), send_with_headers
                )
        finally:
            self._metrics.http[_route(inner), status] += 1
            if isinstance(refusal := inner.get("nori.error"), NoriError):
                self._metrics.refuse(refusal)


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
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
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


def _counted(receive: Receive, held: Held) -> Receive:
    """receive, with the bytes of the body held as they come: what is announced and not sent takes no room."""

    async def counted() -> MutableMapping[str, Any]:
        message = await receive()
        held.add(len(message.get("body", b"")))
        return message

    return counted


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _route(scope: Scope) -> str:
    """The route's template, which bounds the number of label values."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))

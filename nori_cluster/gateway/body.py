"""Bytes off the socket → a checked struct. Reads no more than the limit; every fault of the body is a 400 or 413."""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from nori_cluster.errors import BodyTooLarge, Cancelled, ClientError, MissingParameter, RequestTimeout

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")
BODY_SECONDS = 60.0  # of silence within a body: a client that vanished without a word holds no connection for ever

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")
_CONTENT = re.compile(r"messages\[\d+\]\.content")


async def read_body(headers: list[tuple[bytes, bytes]], receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises ClientError (content type or encoding), BodyTooLarge, RequestTimeout, Cancelled
    (client gone)."""
    content_type = b""
    for name, value in headers:
        if name == b"content-type":
            content_type = value
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ClientError("a compressed body is not accepted: send it without Content-Encoding")
    if content_length(headers) > limit:
        raise BodyTooLarge(f"the request body may have at most {limit} bytes")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise ClientError("the content type must be application/json")
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await receive()
        except TimeoutError as error:
            raise RequestTimeout(f"the rest of the body did not come within {BODY_SECONDS:g} s") from error
        if message["type"] == "http.disconnect":
            raise Cancelled("the client closed the connection while sending")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the request body may have at most {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def content_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Bytes that the body is announced to have; 0 when it does not say so (chunked)."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def decode_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises ClientError for anything else."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise ClientError("the body is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ClientError(f"the body is not valid JSON: {bounded(str(error))}") from error
    if not isinstance(value, dict):
        raise ClientError("the body must be a JSON object")
    return value


def convert(value: dict[str, Any], to: type[T]) -> T:
    """Strict conversion: no coercion of true, 1.5 or "5". Raises MissingParameter or ClientError naming the field."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        raise field_error(str(error)) from error
    except RecursionError as error:
        raise ClientError("the body is nested too deeply") from error


def field_error(text: str) -> ClientError:
    """msgspec's one-line report as an error with a dotted `param`."""
    found = _AT.search(text)
    path = found[1].removesuffix("[...]") if found else ""
    reason = bounded(text[: found.start()] if found else text)
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return MissingParameter(f"{bounded(path)} is required", param=bounded(path))
    content = _CONTENT.match(path)
    param = content[0] if content else bounded(path) or None
    return ClientError(f"{bounded(path)}: {reason}" if path else reason, param=param)


def bounded(text: str) -> str:
    """At most 200 characters of text from outside, valid as UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 200 else text[:200] + "…"

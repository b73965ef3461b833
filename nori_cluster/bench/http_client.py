"""A lean HTTP/1.1 client for streamed completions: protocols on the event loop, no task wakes up per event.

runner → HttpClient.send → one Answer per request. Connections are kept and used again; their number is the number of
requests in flight. httptools parses HTTP, EventScanner the events, msgspec each chunk.
"""

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from nori_cluster.bench.records import LoadSpec
from nori_cluster.bench.sse import EventScanner
from nori_cluster.bench.stream import Answer, RequestFailed, refusal_text
from nori_cluster.bench.workload import Ids, Planned, Workload
from nori_cluster.errors import ConfigError

MAX_REFUSAL = 64 << 10  # bytes of a refusal's body that are kept
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_encode = msgspec.json.encode


def parse_url(url: str) -> SplitResult:
    """Raises ConfigError for what is no http(s) address. A trailing /v1 is dropped: paths here begin with it."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        port_ok = False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_ok or not url.isprintable():
        raise ConfigError(
            f"--url {url!r} is not an address like http://127.0.0.1:8000 (or host:port for --endpoint grpc)"
        )
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"), query="", fragment="")


class RequestWriter:
    """Prompt → the bytes of a POST. What all requests of a run have in common is encoded once."""

    def __init__(self, url: SplitResult, model: str, spec: LoadSpec, api_key: str | None, with_ids: bool) -> None:
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {url.path}{PATHS[spec.endpoint]} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{key}Content-Length: "
        ).encode()
        fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **spec.sampling}
        if spec.ignore_eos:
            fields["ignore_eos"] = True
        if with_ids:
            fields["return_token_ids"] = True
        self._fields = _encode(fields)[:-1]

    def completion(self, prompt: Ids, output: int) -> bytes:
        return self._request(b',"prompt":' + _encode(prompt.tolist()), output)

    def chat(self, text: str, output: int) -> bytes:
        return self._request(b',"messages":' + _encode([{"role": "user", "content": text}]), output)

    def _request(self, prompt: bytes, output: int) -> bytes:
        body = b'%b%b,"max_tokens":%d}' % (self._fields, prompt, output)
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. `ended` resolves when the response is over, with None or why it is not."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.used = False  # a response has come over it before
        self.heard = False  # a byte of the current response has come
        self._answer = Answer()
        self._ended: asyncio.Future[RequestFailed | None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._scanner = EventScanner()
        self._status = 0
        self._refusal = b""
        self._event_stream = False
        self._keep = False
        self._now = 0.0

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Write the request, fill the answer. Raises RequestFailed; the connection is of no more use then."""
        assert self.transport is not None
        self._reset()
        self._answer, self.heard = answer, False
        self._ended = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            raise RequestFailed("broken_stream", "the connection was closed before the request was sent")
        answer.sent = time.monotonic()
        self.transport.write(request)
        failed = await self._ended
        if failed is not None:
            raise failed
        self.used = True

    @property
    def reusable(self) -> bool:
        """The response came to its end (nobody gave up waiting for it) and the server keeps the connection."""
        over = self._ended is not None and self._ended.done() and not self._ended.cancelled()
        return over and self._keep and self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        self.heard = True
        if self._ended is None or self._ended.done():
            self._keep = False  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, RequestFailed) else RequestFailed("protocol", f"{cause or error}"))
        except httptools.HttpParserError as error:
            text = data[:60].decode(errors="replace")
            self._end(RequestFailed("protocol", f"the answer is not HTTP/1.1 ({error}): {text!r}"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if not self.heard:
            what = f"the connection was closed before any answer{f' ({error})' if error else ''}"
            self._end(RequestFailed("broken_stream", what))
        elif self._event_stream and self._answer.done:
            self._end(None)  # a body without length or chunks ends with its connection
        else:
            events = len(self._answer.times)
            self._end(RequestFailed("broken_stream", f"the connection was lost after {events} events before [DONE]"))
        self._keep = False

    # -- httptools --------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._event_stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._status == 200 and self._event_stream:
            take, now = self._answer.take, self._now
            for payload in self._scanner.feed(body):
                take(payload, now)
        elif len(self._refusal) < MAX_REFUSAL:
            self._refusal += body

    def on_message_complete(self) -> None:
        if self._status // 100 == 1:
            return
        if self._status != 200:
            self._end(RequestFailed("status", refusal_text(self._status, self._refusal)))
        elif not self._event_stream:
            text = self._refusal[:80].decode(errors="replace")
            self._end(RequestFailed("protocol", f"the answer is no event stream (is stream=true served?): {text!r}"))
        else:
            self._end(None)

    def _end(self, failed: RequestFailed | None) -> None:
        if failed is not None:
            self._keep = failed.kind == "status" and self._keep
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(failed)


class HttpClient:
    """The connections of one client process to one server. A client.Client."""

    def __init__(self, url: str, model: str, workload: Workload, api_key: str | None, with_ids: bool) -> None:
        parts = parse_url(url)
        secure = parts.scheme == "https"
        self._ssl = ssl.create_default_context() if secure else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._idle: list[_Connection] = []
        self._workload = workload
        self._writer = RequestWriter(parts, model, workload.spec, api_key, with_ids)

    def prepare(self, plan: Planned) -> bytes:
        prompt = self._workload.prompt(plan)
        if self._workload.spec.endpoint == "chat":
            return self._writer.chat(self._workload.text(prompt), plan.output)
        return self._writer.completion(prompt, plan.output)

    async def send(self, request: bytes, answer: Answer) -> None:
        """One request and its answer. Raises RequestFailed. A kept connection found closed is replaced."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                await connection.exchange(request, answer)
                break
            except RequestFailed as failed:
                if failed.kind == "broken_stream" and connection.used and not connection.heard:
                    connection.close()
                    continue
                raise
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
        answer.check_end()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._ssl, server_hostname=self._host if self._ssl else None
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestFailed("connect", f"{self._host}:{self._port}: {reason}") from None
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

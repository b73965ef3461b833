"""Listening sockets and uvicorn servers whose life the gateway's main function decides."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nori_cluster.errors import ConfigError

BACKLOG = 2048
FLUSH_TIMEOUT = 1  # seconds a response may take once the server is told to stop
MAX_HEAD = 64 << 10  # bytes of request line and headers (one read more may pass)
LINGER_SECONDS = 1.0  # of silence
UNDELIMITED = 1 << 62  # bytes that a body of unknown length may have
HEAD_SECONDS = 20.0  # for a request's head, from its first byte or the connection's start


def bind(host: str, port: int, what: str) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Raises ConfigError with one clear line."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port} for {what}: {reason.lower()}") from error


class Cycle(RequestResponseCycle):
    """A response to HTTP/1.0 ends with its connection, never in chunks. A connection that shall close while the client
    still sends its body is kept for a moment (`linger`): closed at once, it would be reset and the answer lost."""

    linger: Callable[[], None]

    async def send(self, message: Any) -> None:
        undelimited = self.scope["http_version"] == "1.0" and self.chunked_encoding is None
        if message["type"] == "http.response.start" and undelimited:
            names = {name.lower() for name, _ in message.get("headers", ())}
            if not names & {b"content-length", b"transfer-encoding"}:
                self.chunked_encoding, self.expected_content_length = False, UNDELIMITED
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            if self.expected_content_length > UNDELIMITED // 2:
                self.expected_content_length = len(message.get("body", b""))
            if self.more_body and not self.keep_alive and not self.transport.is_closing():
                self.keep_alive = True
                self.linger()
        await super().send(message)


class BoundedHttp(HttpToolsProtocol):
    """Bounds size and time of a request's head: the parser takes any, and its time grows with the square of the size.

    A connection that keeps its head to itself is closed; between requests uvicorn's keep-alive timeout holds.
    """

    _head: int | None = 0  # bytes so far, from the first whole read on; None from the end of the head on
    _border = False  # the read at hand held the end of a head or of a body
    _head_timer: asyncio.TimerHandle | None = None
    _lingers = False
    _linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None and self._head_timer is None:
            self._start_head_timer()
        self._border = False
        if self._lingers:
            self._linger()
        super().data_received(data)
        if self._head is not None and not self._border and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._head, self._border = None, True
        self._stop_head_timer()
        super().on_headers_complete()
        # uvicorn has no hook for the class; the task that will run this cycle has not begun.
        self.cycle.__class__ = Cycle
        cast(Cycle, self.cycle).linger = self._linger

    def on_message_complete(self) -> None:
        self._head, self._border = 0, True
        super().on_message_complete()
        if self._lingers:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head is None and self._head_timer is None and not self.transport.is_closing():
            self._start_head_timer()  # refused before its body had come: the rest is not waited for much longer

    def _linger(self) -> None:
        """Until the body is complete or the client falls silent; HEAD_SECONDS bound it too."""
        self._lingers = True
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def _head_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # bytes that came after a request whose response still runs
            self._start_head_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer(uvicorn.Server):
    """One ASGI application on one bound socket. Signals are the main function's business."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=BoundedHttp,
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=FLUSH_TIMEOUT,
            )
        )
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    async def start(self) -> None:
        """Return when it accepts connections."""
        self._task = asyncio.ensure_future(self.serve(sockets=[self._sock]))
        while not self.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close idle connections, let running responses end."""
        self.should_exit = True
        if self._task is not None:
            await self._task

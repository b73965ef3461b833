"""Listening sockets and uvicorn servers whose life the gateway's main function decides."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from nori_cluster.errors import ConfigError

BACKLOG = 2048
FLUSH_TIMEOUT = 1  # seconds a response may take once the server is told to stop


def bind(host: str, port: int, what: str) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Raises ConfigError with one clear line."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port} for {what}: {reason.lower()}") from error


class HttpServer(uvicorn.Server):
    """One ASGI application on one bound socket. Signals are the main function's business."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http="httptools",
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

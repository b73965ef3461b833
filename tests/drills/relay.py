"""A TCP relay in the way of a connection: it delays, stalls or cuts what passes."""

import asyncio
import contextlib
import socket
import struct
from typing import Self

CHUNK = 64 << 10  # bytes
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Relay:
    """Listens on `port`, forwards to the target. delay: seconds each way. An async context manager of one loop."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = 0
        self.delay = 0.0
        self.connections = 0  # ever taken
        self._target = (target_host, target_port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> Self:
        self._server = await asyncio.start_server(self._taken, host, 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aenter__(self) -> Self:
        assert self._server is not None, "start was not called"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """Nothing passes any more; connections stay open."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Every connection ends with a reset at both ends; new ones are taken."""
        for writer in list(self._writers):
            if not writer.transport.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        ways = [self._carry(reader, far_writer), self._carry(far_reader, writer)]
        tasks = {asyncio.create_task(way) for way in ways}
        self._tasks |= tasks
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks -= tasks
        self._writers -= {writer, far_writer}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way. What was read waits for its time without keeping back the reading of what follows."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._flows.wait()
                writer.write(data)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(CHUNK):
                    await under_way.put((loop.time() + self.delay, data))
                while not under_way.empty() and not delivery.done():
                    await asyncio.sleep(0.01)
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)
            writer.close()

"""The relay does to a connection what the drills say it does."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from drills.relay import Relay

pytestmark = pytest.mark.unit


@pytest_asyncio.fixture
async def relay() -> AsyncIterator[Relay]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with await Relay("127.0.0.1", server.sockets[0].getsockname()[1]).start("127.0.0.1") as relay:
        yield relay
    server.close()


async def test_what_is_sent_comes_back(relay: Relay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_delay_counts_each_way(relay: Relay) -> None:
    relay.delay = 0.1
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    begin = time.monotonic()
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    assert 0.2 <= time.monotonic() - begin < 1.0
    writer.close()


async def test_a_stalled_connection_is_silent_and_goes_on(relay: Relay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    relay.stall()
    writer.write(b"hello")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(5), 0.2)
    relay.flow()
    assert await reader.readexactly(5) == b"hello"
    writer.close()


async def test_a_cut_connection_is_reset(relay: Relay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"hello")
    await reader.readexactly(5)
    relay.cut()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()

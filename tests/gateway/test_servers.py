"""What a socket may send before a request exists: heads too large or too slow, over a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fakes.backend import Script
from fakes.gateway import FakeGateway
from fakes.text import EOS, HELLO

from nori_cluster.gateway import body as body_module
from nori_cluster.gateway import servers
from nori_cluster.gateway.servers import MAX_HEAD, HttpServer, bind

pytestmark = pytest.mark.unit

HEAD = b"GET /health HTTP/1.1\r\nhost: g\r\n"
POST = b"POST %s HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def connected(script: Script | None = None) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = HttpServer(FakeGateway(script).app, bind("127.0.0.1", 0, "HTTP"))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.wait_for(server.stop(), 10)


async def status_after(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readline(), 5)).split()[1]


@pytest.mark.parametrize("line", [b"a" * 1000, b"x: a\r\n" * 200], ids=["one header", "many headers"])
async def test_a_head_without_end_is_cut_off(line: bytes) -> None:
    async with connected() as (_, writer):
        writer.write(HEAD + b"x: ")
        sent = 0
        try:
            while sent < 64 * MAX_HEAD:
                writer.write(line)
                await writer.drain()
                sent += len(line)
                if sent > MAX_HEAD:
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert sent < 64 * MAX_HEAD, "all of it was taken"


async def test_a_large_head_is_told_so_and_an_ordinary_one_is_served() -> None:
    async with connected() as (reader, writer):
        writer.write(HEAD + b"x: " + b"a" * (MAX_HEAD // 2) + b"\r\n\r\n")
        assert await status_after(reader) == b"200"
    async with connected() as (reader, writer):
        for start in (HEAD, b"", b""):
            writer.write(start + b"x: " + b"a" * (MAX_HEAD // 2) + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        assert await status_after(reader) == b"400"


async def test_bodies_and_later_requests_do_not_count_as_head() -> None:
    async with connected() as (reader, writer):
        for _ in range(3):
            body = b'{"prompt": "%s"}' % (b"x" * 2 * MAX_HEAD)
            writer.write(POST % (b"/tokenize", len(body)))
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(body)
            await writer.drain()
            assert await status_after(reader) == b"400"
            assert b"context_length_exceeded" in await reader.readuntil(b"}}")


async def test_a_slow_head_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_SECONDS", 0.1)
    async with connected() as (reader, writer):
        writer.write(b"GET /heal")
        assert await asyncio.wait_for(reader.read(), 5) == b""
    async with connected() as (reader, writer):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    async with connected() as (reader, writer):
        for _ in range(2):  # in time, twice on one connection
            writer.write(HEAD + b"\r\n")
            assert await status_after(reader) == b"200"
            await reader.readuntil(b'"ok"}')
            await asyncio.sleep(0.15)


async def test_a_stray_line_end_behind_a_body_does_not_end_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_SECONDS", 0.05)
    body = b'{"prompt": "x", "stream": true}'
    async with connected(Script(tokens=[*[HELLO] * 8, EOS], step=0.03)) as (reader, writer):
        writer.write(POST % (b"/v1/completions", len(body)) + body + b"\r\nGE")
        assert await status_after(reader) == b"200"
        assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)


async def test_a_body_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.1)
    async with connected() as (reader, writer):
        writer.write(POST % (b"/tokenize", 100) + b'{"prompt"')
        assert await status_after(reader) == b"408"
        assert b"request_timeout" in await asyncio.wait_for(reader.read(), 5)  # and closed


async def test_the_rest_of_a_refused_body_is_dropped_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    post = POST.replace(b"application/json", b"text/plain") % (b"/tokenize", 100)
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(post + b"x" * 50)
            assert await status_after(reader) == b"400"
            assert b"content type" in await reader.readuntil(b"}}")
            writer.write(b"x" * 50)
    monkeypatch.setattr(servers, "HEAD_SECONDS", 0.1)
    async with connected() as (reader, writer):
        writer.write(post + b"x" * 50)
        assert await status_after(reader) == b"400"
        await asyncio.sleep(0.05)
        writer.write(b"x")  # uvicorn's keep-alive timer stops here
        assert b"content type" in await asyncio.wait_for(reader.read(), 3)


async def test_http_1_0_is_answered_without_chunks_and_ends_with_its_connection() -> None:
    body = b'{"prompt": "x", "stream": true}'
    post = POST.replace(b"HTTP/1.1", b"HTTP/1.0") % (b"/v1/completions", len(body))
    async with connected(Script(tokens=[*[HELLO] * 8, EOS], step=0.01)) as (reader, writer):
        writer.write(post + body)
        head, _, rest = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        assert head.split()[1] == b"200"
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
    async with connected() as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\nhost: g\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b"content-length: 15" in answer.lower()
        assert answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_a_body_that_is_too_large_is_told_so_and_not_reset(connection: bytes) -> None:
    size = 17 << 20
    head = POST.replace(b"host: g", b"host: g\r\nconnection: " + connection) % (b"/v1/completions", size)
    async with connected() as (reader, writer):
        writer.write(head)
        for _ in range(17):  # all of it is sent before anything is read, as many clients do
            writer.write(b"x" * (1 << 20))
            await writer.drain()
        assert await status_after(reader) == b"413"
        assert b"request_too_large" in await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        if connection == b"close":
            assert await asyncio.wait_for(reader.read(), 5) == b""
        else:
            writer.write(HEAD + b"\r\n")
            assert await status_after(reader) == b"200"


async def test_a_client_that_stops_within_a_refused_body_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LINGER_SECONDS", 0.1)
    head = POST.replace(b"host: g", b"host: g\r\nconnection: close") % (b"/v1/completions", 17 << 20)
    async with connected() as (reader, writer):
        writer.write(head + b"x" * 1000)
        assert await status_after(reader) == b"413"
        assert b"request_too_large" in await asyncio.wait_for(reader.read(), 2)


async def test_head_is_get_without_a_body() -> None:
    async with connected() as (reader, writer):
        for path, code in ((b"/health", b"200"), (b"/v1/models", b"200"), (b"/nope", b"404"), (b"/tokenize", b"405")):
            writer.write(b"HEAD %s HTTP/1.1\r\nhost: g\r\n\r\n" % path)
            assert await status_after(reader) == code
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert b"content-length: " in head.lower()
        writer.write(HEAD + b"\r\n")
        assert await status_after(reader) == b"200"  # the next bytes are the next response


async def test_a_draining_server_closes_kept_connections_after_their_answer() -> None:
    """F46: kept-alive connections move on to another gateway; a body is not waited for."""
    gateway = FakeGateway()
    server = HttpServer(gateway.app, bind("127.0.0.1", 0, "HTTP"))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"\r\n")
    assert await status_after(reader) == b"200"
    assert b"connection: close" not in (await reader.readuntil(b'"ok"}')).lower()
    gateway.service.drain()
    writer.write(POST % (b"/v1/completions", 1000))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.split()[1] == b"503"
    assert b"connection: close" in answer.lower()
    assert b"retry-after: 1\r\n" in answer.lower()
    assert b'"code":"draining"' in answer
    writer.close()
    await asyncio.wait_for(server.stop(), 10)


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_a_client_that_leaves_within_its_body_gives_its_room_back(framing: bytes) -> None:
    gateway = FakeGateway()
    gate = gateway.service.gate
    server = HttpServer(gateway.app, bind("127.0.0.1", 0, "HTTP"))
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n" + framing
    writer.write(head + b"\r\n\r\n5\r\n12345\r\n")  # of a chunk 5 bytes are body, else all 10
    async with asyncio.timeout(5):
        while not gate.held_bytes:
            await asyncio.sleep(0.005)
        assert (gate.calls, gate.held_bytes) == (1, 5 if b"chunked" in framing else 10)
        writer.close()
        while gate.calls:
            await asyncio.sleep(0.005)
    assert gate.held_bytes == 0
    assert not gateway.service.metrics.refused
    await asyncio.wait_for(server.stop(), 10)

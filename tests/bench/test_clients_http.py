"""What the HTTP client writes, and how it treats its connections."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import trustme

from nori_cluster.bench.http_client import HttpClient, RequestWriter, parse_url
from nori_cluster.bench.null_server import NullServerProcess, Reply, Script
from nori_cluster.bench.records import Lengths, LoadSpec
from nori_cluster.bench.stream import Answer, RequestFailed
from nori_cluster.bench.workload import Workload
from nori_cluster.errors import ConfigError

SPEC = LoadSpec(requests=4, input=Lengths(median=3), output=Lengths(median=2), sampling={"top_p": 0.5})


def parsed(request: bytes) -> tuple[str, dict[str, str], Any]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body)
    return first, headers, json.loads(body)


@pytest.mark.unit
def test_a_completion_request() -> None:
    writer = RequestWriter(parse_url("http://host:81/v1"), "m", SPEC, "secret", with_ids=True)
    first, headers, body = parsed(writer.completion(np.array([5, 6, 7], np.int32), 9))
    assert first == "POST /v1/completions HTTP/1.1"
    assert headers["host"] == "host:81"
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.5,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@pytest.mark.unit
def test_a_chat_request_asks_for_nothing_that_only_some_servers_know() -> None:
    spec = LoadSpec(requests=1, endpoint="chat", ignore_eos=False)
    first, headers, body = parsed(RequestWriter(parse_url("h:1"), "m", spec, None, with_ids=False).chat('a "b"', 9))
    assert first == "POST /v1/chat/completions HTTP/1.1"
    assert "authorization" not in headers
    assert body["messages"] == [{"role": "user", "content": 'a "b"'}]
    assert not {"ignore_eos", "return_token_ids", "prompt"} & body.keys()


@pytest.mark.unit
def test_addresses() -> None:
    for url in ("http://h:1", "h:1", "http://h:1/", "http://h:1/v1/"):
        assert parse_url(url).geturl() == "http://h:1"
    assert parse_url("https://h/proxy/v1").geturl() == "https://h/proxy"
    assert parse_url("http://[::1]:5").hostname == "::1"
    for url in ("ftp://h", "http://", "http://h:99999", "", "http://h:x", "http://a\nb"):
        with pytest.raises(ConfigError, match="--url"):
            parse_url(url)


@pytest.mark.contract
async def test_connections_are_used_again_and_replaced_when_the_server_closed_them() -> None:
    replies = (Reply(), Reply(first=0.001), Reply(fault="hang_up"), Reply())
    with NullServerProcess(Script(replies=replies)) as server:
        client = HttpClient(server.url, "null", Workload(SPEC), None, False)
        plans = [Workload(SPEC).plan(number) for number in range(3)]
        for plan in plans:  # the third meets a connection that closes at once, and is sent again
            answer = Answer()
            await client.send(client.prepare(plan), answer)
            assert len(answer.times) == 2
        await client.close()


@pytest.mark.contract
async def test_a_fresh_connection_that_closes_is_a_failure() -> None:
    with NullServerProcess(Script(replies=(Reply(fault="hang_up"),))) as server:
        client = HttpClient(server.url, "null", Workload(SPEC), None, False)
        with pytest.raises(RequestFailed) as caught:
            await client.send(client.prepare(Workload(SPEC).plan(0)), Answer())
        assert caught.value.kind == "broken_stream"
        await client.close()


@asynccontextmanager
async def tls_before(url: str, authority: trustme.CA) -> AsyncIterator[str]:
    """A TLS end in front of the server at `url`, with a certificate for localhost."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer), return_exceptions=True)

    async with await asyncio.start_server(joined, "127.0.0.1", 0, ssl=context) as outer:
        yield f"https://localhost:{outer.sockets[0].getsockname()[1]}"


@pytest.mark.contract
async def test_https_with_a_known_and_an_unknown_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = trustme.CA()
    known.cert_pem.write_to_path(tmp_path / "authority.pem")
    with NullServerProcess(Script(replies=(Reply(),))) as server:
        async with tls_before(server.url, known) as url:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
            client = HttpClient(url, "null", Workload(SPEC), None, False)
            for number in range(2):
                answer = Answer()
                await client.send(client.prepare(Workload(SPEC).plan(number)), answer)
                assert len(answer.times) == 2
            await client.close()
        async with tls_before(server.url, trustme.CA()) as url:
            client = HttpClient(url, "null", Workload(SPEC), None, False)
            with pytest.raises(RequestFailed, match=r"self-signed certificate|unable to get local issuer") as caught:
                await client.send(client.prepare(Workload(SPEC).plan(0)), Answer())
            assert caught.value.kind == "connect"
            await client.close()

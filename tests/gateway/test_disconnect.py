"""F25 and F06 over real sockets: a client that hangs up ends its sequences at once, wherever they are."""

import asyncio
import json
import random
from itertools import cycle
from typing import Any

import openai
import pytest
from fakes.backend import Script
from fakes.gateway import CHAT, COMPLETIONS, USER, FakeGateway
from fakes.text import EOS, HELLO

from nori_cluster.errors import EngineFailure

pytestmark = pytest.mark.unit

ENDLESS = Script(tokens=cycle([HELLO]), step=0.005)
LONG = {"max_tokens": 2000, "ignore_eos": True}


class Client:
    """One request over a raw connection that can be cut at any moment."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    async def send(self, path: str, body: dict[str, Any]) -> None:
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=1 << 24)
        content = json.dumps({"model": "smol", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        self.writer.write(f"{head}\r\n\r\n".encode() + content)
        await self.writer.drain()

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def settled(gateway: FakeGateway, open_sequences: int, within: float = 1.0) -> None:
    async with asyncio.timeout(within):
        while len(gateway.backend.open) != open_sequences:
            await asyncio.sleep(0.005)


async def opened(gateway: FakeGateway, count: int) -> None:
    await settled(gateway, count, 2.0)


SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "A whole reply": (COMPLETIONS, {"prompt": "x", **LONG}, 1),
    "A whole chat reply": (CHAT, {"messages": USER, **LONG}, 1),
    "B stream": (CHAT, {"messages": USER, "stream": True, **LONG}, 1),
    "C n=4": (COMPLETIONS, {"prompt": "x", "n": 4, **LONG}, 4),
    "C n=4 stream": (COMPLETIONS, {"prompt": "x", "n": 4, "stream": True, **LONG}, 4),
    "D three prompts": (COMPLETIONS, {"prompt": ["x", "y", "z"], **LONG}, 3),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_f25_client_gone(shape: str) -> None:
    path, body, sequences = SHAPES[shape]
    gateway = FakeGateway(ENDLESS, max_model_len=4096)
    async with gateway.listening() as address:
        client = Client(address)
        await client.send(path, body)
        await opened(gateway, sequences)
        if body.get("stream"):
            assert b"200 OK" in await client.reader.readuntil(b"\n\n")
        await asyncio.sleep(0.05)
        await client.close()
        await settled(gateway, 0)
        generated = gateway.backend.generated
        await asyncio.sleep(0.03)
        assert gateway.backend.generated == generated
        assert sorted(number for _, number in gateway.backend.aborts) == sorted(
            number for _ in range(sequences // body.get("n", 1)) for number in range(body.get("n", 1))
        )
        assert gateway.service.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_f25_client_gone_while_queued(stream: bool) -> None:
    gateway = FakeGateway(ENDLESS, max_model_len=4096, max_num_seqs=2)
    async with gateway.listening() as address:
        clients = [Client(address) for _ in range(3)]
        for number, client in enumerate(clients):
            await client.send(COMPLETIONS, {"prompt": "x", "stream": stream, **LONG})
            await opened(gateway, number + 1)
        await asyncio.sleep(0.02)
        await clients[2].close()
        await settled(gateway, 2)
        await clients[0].close()
        await settled(gateway, 1)
        await clients[1].close()
        await settled(gateway, 0)
        assert [sequence.prefilled for sequence in gateway.backend.sequences] == [True, True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_f25_client_gone_before_it_was_accepted(stream: bool) -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), accept_after=5.0), max_model_len=4096)
    async with gateway.listening() as address:
        client = Client(address)
        await client.send(COMPLETIONS, {"prompt": "x", "stream": stream, **LONG})
        await opened(gateway, 1)
        await client.close()
        await settled(gateway, 0)


async def test_f25_random_hang_ups_leave_nothing() -> None:
    rng = random.Random(5)
    gateway = FakeGateway(
        lambda request, number: Script(tokens=[*[HELLO] * rng.randrange(1, 40), EOS], step=0.001), max_num_seqs=4
    )
    async with gateway.listening() as address:
        before = len(asyncio.all_tasks())

        async def one() -> None:
            path, body, _ = SHAPES[rng.choice(list(SHAPES))]
            client = Client(address)
            await client.send(path, {**body, "max_tokens": 100, "ignore_eos": False})
            await asyncio.sleep(rng.random() * 0.05)
            await client.close()

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(5)))
        await settled(gateway, 0, 5.0)
        async with asyncio.timeout(2):
            while len(asyncio.all_tasks()) > before or gateway.service.running:
                await asyncio.sleep(0.01)
        ended, aborts = gateway.service.metrics.model("smol"), len(gateway.backend.aborts)
        assert ended.running == 0
        assert ended.aborted > 0
        assert aborts > 0
        client = Client(address)
        await client.send(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        assert b"200 OK" in await client.reader.readline()
        await client.close()


async def test_f06_fault_over_a_socket_ends_the_stream() -> None:
    script = Script(tokens=cycle([HELLO]), fault=EngineFailure("worker 0 died"), fault_after=2)
    gateway = FakeGateway(script)
    async with gateway.listening() as address:
        client = Client(address)
        await client.send(CHAT, {"messages": USER, "stream": True, "max_tokens": 50})
        async with asyncio.timeout(1):
            reply = await client.reader.readuntil(b"0\r\n\r\n")
        assert b'data: {"error":{"message":"worker 0 died"' in reply
        assert b"data: [DONE]" in reply
        assert b'"finish_reason":"stop"' not in reply
        await client.close()


async def test_a_client_that_reads_late_gets_all_the_text() -> None:
    gateway = FakeGateway(Script(tokens=[*[HELLO] * 3000, EOS]), max_model_len=8192)
    async with gateway.listening() as address:
        client = Client(address)
        await client.send(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 4000})
        await settled(gateway, 0, 5.0)
        reply = (await client.reader.readuntil(b"[DONE]")).decode()
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in reply.splitlines() if line.startswith("data: {")
        )
        assert text == "hello" * 3000
        await client.close()


async def test_the_openai_client_reads_our_streams_and_errors() -> None:
    gateway = FakeGateway(config={"api_key": "secret"})
    async with gateway.listening() as (host, port):
        url = f"http://{host}:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            async with client.chat.completions.stream(model="smol", messages=USER) as stream:  # type: ignore[arg-type]
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "hello" * 3
            assert (await client.models.retrieve("smol")).id == "smol"
            parts = [part async for part in await client.completions.create(model="smol", prompt="x", stream=True)]
            assert "".join(part.choices[0].text for part in parts) == "hello" * 3
            with pytest.raises(openai.NotFoundError) as caught:
                await client.chat.completions.create(model="nope", messages=USER)  # type: ignore[arg-type]
            assert caught.value.code == "model_not_found"
            assert caught.value.request_id
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

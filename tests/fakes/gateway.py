"""A gateway application over a FakeBackend, reached in process (httpx) or through a real socket (uvicorn, port 0)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn

from fakes.backend import FakeBackend, Script
from fakes.text import EOS, HELLO, served_model
from nori_cluster.config import GatewayConfig
from nori_cluster.frontend.service import ServedModel, Service
from nori_cluster.gateway.app import build_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


class FakeGateway:
    """service, backend and app of one gateway that serves `smol`."""

    def __init__(
        self,
        script: Any = None,
        *,
        config: dict[str, Any] | None = None,
        served: ServedModel | None = None,
        **backend: Any,
    ) -> None:
        self.backend = FakeBackend(script or Script(tokens=[*[HELLO] * 3, EOS]), **backend)
        self.config = GatewayConfig(gateway_id="g", router="127.0.0.1:0", models={"smol": ""}, **(config or {}))
        self.service = Service(self.backend, {"smol": served or served_model()})
        self.app = build_app(self.service, self.config)

    @property
    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """body: a JSON value, or bytes sent as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        async with self.client as client:
            return await client.post(path, content=content, headers=headers, **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        async with self.client as client:
            return await client.get(path, **more)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post(CHAT, {"model": "smol", "messages": USER, **fields})

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post(COMPLETIONS, {"model": "smol", "prompt": "hi", **fields})

    async def quiet(self) -> None:
        """Let aborted sequences go; then nothing may be open."""
        for _ in range(4):
            await asyncio.sleep(0)
        assert not self.backend.open
        assert self.service.running == 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[str, int]]:
        """Serve on a free port of the loopback interface."""
        server = uvicorn.Server(uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        server.install_signal_handlers = lambda: None
        server.capture_signals = contextlib.nullcontext
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        try:
            yield host, port
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every data line; checks the framing and the final [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def text_by_index(chunks: list[Any]) -> dict[int, str]:
    text: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            text[choice["index"]] = text.get(choice["index"], "") + piece
    return text


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The envelope, checked for its four keys and its size."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= 1024
    body = json.loads(response.content.decode("utf-8"))
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    return error

"""A real gateway process between a real router and fake groups: SIGTERM (F46), health by progress (F40, F45)."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.cluster import MiniCluster, until
from fakes.text import TEMPLATE, definition
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nori_cluster.config import GatewayConfig, Ports, encode
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.router_server import RouterTimes

pytestmark = pytest.mark.e2e

TIMES = RouterTimes(report=5.0, gateway_grace=0.5, load=0.1, settle=0.0)  # the product's own times for silence
FREE = Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0)
FIRST = 68


class Gateway:
    def __init__(self, process: asyncio.subprocess.Process, ports: dict[str, Any]) -> None:
        self.process = process
        self.ports = ports
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http']}", timeout=20)

    async def stream(self, tokens: int, heard: asyncio.Event) -> list[Any]:
        """Events of one streamed completion; heard is set by the first."""
        out: list[Any] = []
        body = {"prompt": "hi", "max_tokens": tokens, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    out.append(data if data == "[DONE]" else json.loads(data))
                    heard.set()
        return out

    async def status(self, path: str) -> int:
        return (await self.client.get(path)).status_code

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, within: float) -> int:
        return await asyncio.wait_for(self.process.wait(), within)


@asynccontextmanager
async def gateway(cluster: MiniCluster, folder: Path, drain: float = 10.0) -> AsyncIterator[Gateway]:
    (folder / "tokenizer.json").write_text(definition())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    config = GatewayConfig(
        gateway_id="gw", router=cluster.router_address, models={"m": str(folder)}, ports=FREE, drain_timeout=drain
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nori_cluster.gateway", "--config", encode(config)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    ports = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
    running = Gateway(process, ports)
    try:
        yield running
    finally:
        await running.client.aclose()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ready(running: Gateway, wanted: int = 200, within: float = 3.0) -> float:
    """Seconds until /ready answers so."""
    began = time.monotonic()
    while await running.status("/ready") != wanted:
        assert time.monotonic() - began < within, f"/ready did not become {wanted} in {within} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_f46_running_and_queued_requests_finish_and_new_ones_are_told_to_go(tmp_path: Path) -> None:
    """50 tokens at 50 ms and one queued; SIGTERM after the first tokens, a new request 0.5 s later; exit 0."""
    cluster = MiniCluster("g1", router_times=TIMES, step=0.05, slots=1, first=FIRST)
    async with cluster, gateway(cluster, tmp_path) as running:
        await ready(running)
        heard, later = asyncio.Event(), asyncio.Event()
        stream = asyncio.create_task(running.stream(50, heard))
        await heard.wait()
        queued = asyncio.create_task(running.stream(5, later))
        await until(lambda: len(cluster.groups["g1"].submitted) == 2)
        running.terminate()
        assert await ready(running, 503, 0.5) < 0.3
        assert await running.status("/health") == 200
        await asyncio.sleep(0.5)
        refused = await running.client.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        for task, tokens in ((stream, 50), (queued, 5)):
            events = await task
            assert events[-1] == "[DONE]"
            text = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
            assert text == "".join(chr(FIRST + n - 3) for n in range(tokens)).encode("latin-1").decode()
        assert await running.ended(3.0) == 0


async def test_f46_what_is_left_at_the_end_of_the_drain_time_gets_a_precise_error(tmp_path: Path) -> None:
    cluster = MiniCluster("g1", router_times=TIMES, step=0.05, first=FIRST)
    async with cluster, gateway(cluster, tmp_path, drain=0.5) as running:
        await ready(running)
        heard = asyncio.Event()
        stream = asyncio.create_task(running.stream(50, heard))
        await heard.wait()
        running.terminate()
        events = await asyncio.wait_for(stream, 3)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "draining"
        assert "its drain time of 0.5 s is over" in events[-2]["error"]["message"]
        assert await running.ended(3.0) == 0
        await until(lambda: not cluster.groups["g1"].live)  # the group does not work on for nobody


async def test_f46_a_second_signal_ends_at_once_and_an_idle_or_loading_gateway_soon(tmp_path: Path) -> None:
    cluster = MiniCluster("g1", router_times=TIMES, step=0.05, first=FIRST)
    async with cluster:
        async with gateway(cluster, tmp_path) as running:
            await ready(running)
            heard = asyncio.Event()
            stream = asyncio.create_task(running.stream(50, heard))
            await heard.wait()
            running.terminate()
            await ready(running, 503)
            running.terminate()
            assert await running.ended(0.5) == 130
            await asyncio.gather(stream, return_exceptions=True)
        for state in (GroupState.READY, GroupState.LOADING):
            cluster.groups["g1"].state = state
            async with gateway(cluster, tmp_path) as running:
                await ready(running, 200 if state is GroupState.READY else 503)
                running.terminate()
                assert await running.ended(2.0) == 0


async def test_f40_health_follows_progress_within_two_seconds(tmp_path: Path) -> None:
    """F40, F45: loading, ready, stalled, frozen, drained, lost: /ready and grpc.health.v1 say so; /health stays 200."""
    cluster = MiniCluster("g1", router_times=TIMES, first=FIRST)
    took: dict[str, float] = {}
    async with cluster, gateway(cluster, tmp_path) as running:
        group = cluster.groups["g1"]
        assert group.registrar is not None
        async with aio.insecure_channel(f"127.0.0.1:{running.ports['grpc']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def becomes(what: str, serves: bool) -> None:
                began = time.monotonic()
                await ready(running, 200 if serves else 503, 2.0)
                wanted = (
                    health_pb2.HealthCheckResponse.SERVING if serves else health_pb2.HealthCheckResponse.NOT_SERVING
                )
                while (await stub.Check(health_pb2.HealthCheckRequest(service="models/m"))).status != wanted:
                    assert time.monotonic() - began < 2.0, f"grpc.health.v1 did not follow: {what}"
                    await asyncio.sleep(0.01)
                took[what] = time.monotonic() - began
                assert took[what] < 2.0
                assert await running.status("/health") == 200
                reply = await running.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
                assert reply.status_code == (200 if serves else 503), reply.text
                if not serves:
                    assert int(reply.headers["retry-after"]) >= 1

            await becomes("ready", True)
            for state in (GroupState.LOADING, GroupState.STALLED):
                group.state = state
                group.registrar.changed()
                await becomes(state.name.lower(), False)
                group.state = GroupState.READY
                group.registrar.changed()
                await becomes(f"ready after {state.name.lower()}", True)
            cluster.router.set_draining("g1", True)
            await becomes("drained", False)
            cluster.router.set_draining("g1", False)
            await becomes("resumed", True)
            group.registrar._interval = 60.0  # as frozen by SIGSTOP: streams open, nothing said
            await asyncio.sleep(0.2)
            await becomes("frozen", False)
            group.registrar._interval = 0.1
            group.registrar.changed()
            await becomes("thawed", True)
            await cluster.router.stop()  # streams go on and so does the gateway, by its last table
            await asyncio.sleep(1.5)
            await becomes("router gone", True)
            await group.stop()
            await becomes("router gone and the group lost", False)
        metrics = await running.client.get(f"http://127.0.0.1:{running.ports['metrics']}/metrics")
        assert 'nori_group_failures_total{group="g1",model_name="m",reason="stalled"} 2.0' in metrics.text
        assert "nori_router_connected 0.0" in metrics.text
        assert "nori_num_requests_waiting 0.0" in metrics.text
    print({what: round(seconds, 2) for what, seconds in took.items()})

"""The router's process is killed and started again under two gateways' streams; how long its state takes to be back."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import router_process
from fakes.cluster import BACKEND_TIMES, until
from fakes.group import FIRST_TOKEN, FakeGroup
from fakes.sink import RecordingSink

from nori_cluster.rpc.cluster_backend import ClusterBackend
from nori_cluster.types import Request, SamplingParams

pytestmark = pytest.mark.e2e

REBUILD_SECONDS = 2.0
STREAMS, TOKENS = 20, 400  # each lasts about 4 s


class RouterProcess:
    def __init__(self, port: int) -> None:
        self.port = port
        self.process: asyncio.subprocess.Process

    async def start(self) -> float:
        """Returns when it serves; the time of that, unix seconds."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(router_process.__file__)), str(self.port)), stdout=asyncio.subprocess.PIPE
        )
        return float((await self.state())["at"])

    async def state(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        state: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 30))
        return state

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[RouterProcess, list[ClusterBackend]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        router = RouterProcess(probe.getsockname()[1])
    await router.start()
    address = f"127.0.0.1:{router.port}"
    groups = [FakeGroup(name, step=0.01) for name in ("g1", "g2")]
    for group in groups:
        await group.start(address)
    backends = [ClusterBackend(address, f"gw{n}", times=BACKEND_TIMES) for n in range(2)]
    for backend in backends:
        await backend.start()
    try:
        for backend in backends:
            await until(lambda b=backend: sum(g.link == "open" for g in b.groups()) == 2, 10)
        yield router, backends
    finally:
        for backend in backends:
            await backend.close()
        for group in groups:
            await group.stop()
        await router.kill()


def ask(backend: ClusterBackend, number: int, tokens: int) -> RecordingSink:
    sink = RecordingSink()
    sampling = SamplingParams(max_tokens=tokens)
    backend.submit(Request(id=f"r{number}", model="m", prompt_token_ids=(1,) * 10, sampling=sampling, seed=1), [sink])
    return sink


async def test_a_killed_router_is_back_with_all_it_knew_in_under_two_seconds_and_no_stream_ends() -> None:
    async with cluster() as (router, backends):
        streams = [ask(backends[n % 2], n, TOKENS) for n in range(STREAMS)]
        await asyncio.gather(*(sink.admitted.wait() for sink in streams))
        await router.kill()
        await until(lambda: all(backend.degraded for backend in backends), 5)
        alone = [ask(backend, 100 + n, 5) for n, backend in enumerate(backends)]
        async with asyncio.timeout(3):
            await asyncio.gather(*(sink.ended.wait() for sink in alone))
        assert all(sink.error is None and len(sink.ids) == 5 for sink in alone), "gateways serve on"
        serving = await router.start()
        while (state := await router.state()) and not (
            state["groups"] == 2 and state["gateways"] == 2 and state["open"] == STREAMS
        ):
            pass
        rebuilt = state["at"] - serving
        assert rebuilt < REBUILD_SECONDS
        await until(lambda: all(backend.router.connected and not backend.degraded for backend in backends))
        later = [ask(backend, 200 + n, 5) for n, backend in enumerate(backends)]
        async with asyncio.timeout(20):
            await asyncio.gather(*(sink.ended.wait() for sink in [*streams, *later]))
        for sink, tokens in [*((sink, TOKENS) for sink in streams), *((sink, 5) for sink in later)]:
            assert sink.error is None, sink.error
            assert sink.ids == list(range(FIRST_TOKEN, FIRST_TOKEN + tokens)), "a token was lost or doubled"
        assert all(backend.counts.lost == 0 for backend in backends)
        print(f"router rebuilt {rebuilt:.2f} s after it served, with {STREAMS} streams of two gateways")

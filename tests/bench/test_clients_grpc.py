"""The gRPC client against the public service over a fake backend: tokens, usage, refusals, faults, discovery."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.backend import FakeBackend, Script
from fakes.text import EOS, HELLO, WORLD, served_model

from nori_cluster.bench.client import TargetError
from nori_cluster.bench.grpc_client import parse_target, sampling_of
from nori_cluster.bench.records import Lengths, LoadSpec
from nori_cluster.bench.runner import LoadResult, run_load
from nori_cluster.errors import ConfigError, EngineFailure, Overloaded
from nori_cluster.frontend.service import Service
from nori_cluster.rpc import public

pytestmark = pytest.mark.contract


@asynccontextmanager
async def serving(script: Script, api_key: str | None = None, **backend: Any) -> AsyncIterator[str]:
    service = Service(FakeBackend(script, **backend), {"smol": served_model()})
    server = await public.serve(service, "127.0.0.1", 0, api_key=api_key)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


def load(**fields: Any) -> LoadSpec:
    small = {"endpoint": "grpc", "requests": 3, "concurrency": 1, "warmup": 0, "ignore_eos": False, "vocab_size": 101}
    return LoadSpec(**{**small, "input": Lengths(median=4), "output": Lengths(median=8), "timeout": 10.0, **fields})


async def run(url: str, spec: LoadSpec, **more: Any) -> LoadResult:
    return await asyncio.to_thread(run_load, url, None, spec, **more)


async def test_tokens_usage_and_the_end() -> None:
    script = Script(tokens=[HELLO, WORLD, HELLO, EOS], cached_tokens=2)
    async with serving(script, api_key="secret") as url:
        result = await run(f"grpc://{url}", load(), api_key="secret")
    assert result.model == "smol"
    assert len(result.records) == 3
    for record in result.records:
        assert record.failure is None, record.message
        assert record.finish_reason == "stop"
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 4, 2)
        assert record.token_ids[:3] == (HELLO, WORLD, HELLO)
        assert sum(record.event_tokens) == len(record.token_ids)
        assert len(record.events) == len(record.event_tokens)


async def test_several_tokens_of_one_event_are_counted() -> None:
    async with serving(Script(tokens=[HELLO] * 20, chunk=4, step=0.1)) as url:
        (record,) = (await run(url, load(requests=1, ignore_eos=True))).records
    assert record.finish_reason == "length"
    assert record.event_tokens == (4, 4)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (Script(refusal=Overloaded("the queue is full", retry_after=1.0)), "status", "UNAVAILABLE: the queue is full"),
        (Script(tokens=[HELLO] * 9, fault=EngineFailure("it broke"), fault_after=3), "broken_stream", "it broke"),
    ],
)
async def test_failures_by_kind(script: Script, kind: str, words: str) -> None:
    async with serving(script) as url:
        records = (await run(url, load())).records
    assert {record.failure for record in records} == {kind}
    assert all(words in record.message for record in records)


async def test_a_silent_stream_times_out() -> None:
    async with serving(Script(tokens=[HELLO], start_after=30.0)) as url:
        (record,) = (await run(url, load(requests=1, timeout=0.3))).records
    assert record.failure == "timeout"


async def test_discovery() -> None:
    with pytest.raises(TargetError, match=r"no gRPC server answers at 127\.0\.0\.1:9 "):
        await run("127.0.0.1:9", load())
    async with serving(Script(tokens=[EOS]), api_key="secret") as url:
        with pytest.raises(TargetError, match="UNAUTHENTICATED"):
            await run(url, load())
        with pytest.raises(TargetError, match="does not serve 'other'; it serves smol"):
            await asyncio.to_thread(run_load, url, "other", load(), api_key="secret")


def test_addresses_and_sampling_fields() -> None:
    assert parse_target("grpc://host:1/") == parse_target("host:1") == "host:1"
    for url in ("host", "http://host:1", "host:port"):
        with pytest.raises(ConfigError, match="host:port"):
            parse_target(url)
    assert sampling_of({"temperature": 0.5, "top_k": 3}).top_k == 3
    with pytest.raises(ConfigError, match=r"--sampling: .*nonsense"):
        sampling_of({"nonsense": 1})

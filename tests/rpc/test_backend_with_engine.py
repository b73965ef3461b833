"""Both halves of the data plane together: ClusterBackend and router against a real EngineCore, fake executor."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from engine.walk import make_spec
from fakes.cluster import MiniCluster, until
from fakes.executor import FakeExecutor, next_token
from fakes.sink import RecordingSink

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.errors import ClientError, DeadlineExceeded
from nori_cluster.routing.base import GroupRegistration, GroupReport, GroupState
from nori_cluster.rpc.dataplane_server import DataplaneServer
from nori_cluster.rpc.register import GroupRegistrar
from nori_cluster.types import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.contract


class SlowExecutor(FakeExecutor):
    def collect(self):  # type: ignore[no-untyped-def]
        time.sleep(0.002)
        return super().collect()


class EngineGroup:
    def __init__(self) -> None:
        self.spec = make_spec(num_blocks=40, max_model_len=200)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), self.spec)
        core = EngineCore(self.scheduler, SlowExecutor(self.spec, 4))
        self.server = DataplaneServer(core, self.spec, "engine", 7, lambda failure: None)
        self.address = ""

    async def start(self, router: str) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"
        self.registrar = GroupRegistrar(router, self.registration, self.report, interval=0.05)
        self.registrar.start()

    async def stop(self) -> None:
        await self.registrar.close()
        await self.server.stop()

    def registration(self) -> GroupRegistration:
        return GroupRegistration(
            group_id="engine",
            incarnation=7,
            model="m",
            address=self.address,
            max_context_tokens=self.spec.max_model_len,
            max_running_sequences=4,
            max_batched_tokens=64,
            kv_block_tokens=self.spec.block_size,
            kv_blocks=self.spec.num_blocks,
        )

    def report(self) -> tuple[GroupState, GroupReport]:
        load = self.server.load
        return GroupState.READY, GroupReport(waiting_sequences=load.waiting, waiting_tokens=load.waiting_tokens)


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[MiniCluster, EngineGroup]]:
    async with MiniCluster() as mini:
        group = EngineGroup()
        await group.start(mini.router_address)
        await mini.reachable("engine")
        yield mini, group
        await mini.backend.close()
        mini.backends.clear()
        await group.stop()


def ask(mini: MiniCluster, prompt: tuple[int, ...], tokens: int, seed: int = 3, **rest: float) -> list[RecordingSink]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, n=int(rest.pop("n", 1)))
    request = Request(id="r", model="m", prompt_token_ids=prompt, sampling=sampling, seed=seed, **rest)  # type: ignore[arg-type]
    sinks = [RecordingSink() for _ in range(sampling.n)]
    mini.backend.submit(request, sinks)
    return sinks


def said(prompt: tuple[int, ...], tokens: int, seed: int, vocab: int) -> list[int]:
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(np.array(known), seed, vocab))
    return known[len(prompt) :]


async def test_a_burst_larger_than_the_group_comes_back_whole(cluster: tuple[MiniCluster, EngineGroup]) -> None:
    mini, group = cluster
    prompts = [tuple(k % 61 for k in range(1, 10 + i % 90)) for i in range(60)]
    asked = [(prompt, ask(mini, prompt, 12)[0]) for prompt in prompts]
    for prompt, sink in asked:
        async with asyncio.timeout(20):
            await sink.ended.wait()
        assert sink.error is None
        assert sink.finish is not None
        assert sink.finish.reason is FinishReason.LENGTH
        assert sink.ids == said(prompt, 12, 3, group.spec.vocab_size)
    await mini.idle()
    assert group.scheduler.pool.free == 40


async def test_f56_deadlines_and_aborts_reach_the_engine(cluster: tuple[MiniCluster, EngineGroup]) -> None:
    mini, group = cluster
    (sink,) = ask(mini, (1, 2, 3), 190, time_left=0.1)
    async with asyncio.timeout(2):
        await sink.ended.wait()
    assert isinstance(sink.error, DeadlineExceeded)
    assert sink.ids
    sampling = SamplingParams(max_tokens=190, ignore_eos=True, n=3)
    sinks = [RecordingSink() for _ in range(3)]
    request = Request(id="r", model="m", prompt_token_ids=(1, 2), sampling=sampling, seed=1)
    submission = mini.backend.submit(request, sinks)
    await sinks[2].heard.wait()
    for number, one in enumerate(sinks):
        one.aborted = True
        submission.abort(number)
    async with asyncio.timeout(1.0):
        await until(lambda: not group.server.open_sequences and group.scheduler.pool.free == 40)
    await mini.idle()


async def test_a_refusal_of_the_engine_names_what_is_wrong(cluster: tuple[MiniCluster, EngineGroup]) -> None:
    mini, group = cluster
    (sink,) = ask(mini, (1, group.spec.vocab_size), 1)
    await sink.ended.wait()
    assert type(sink.error) is ClientError
    assert sink.error.param == "prompt"
    await mini.idle()


async def test_drafts_and_prompt_logprobs_come_through(cluster: tuple[MiniCluster, EngineGroup]) -> None:
    """Several tokens a step, merged or not, in order; one prompt logprob per token but the first; drafts counted."""
    mini, group = cluster
    group.scheduler.config = msgspec.structs.replace(group.scheduler.config, draft_tokens=3)
    asked = []
    for length in (1, 2, 9, 40):
        prompt = tuple(range(5, 5 + length))
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=1, n=2)
        sinks = [RecordingSink(), RecordingSink()]
        mini.backend.submit(Request(id="r", model="m", prompt_token_ids=prompt, sampling=sampling, seed=3), sinks)
        asked.append((prompt, sinks))
    drafts = 0
    for prompt, sinks in asked:
        for number, sink in enumerate(sinks):
            async with asyncio.timeout(20):
                await sink.ended.wait()
            assert sink.error is None
            assert sink.ids == said(prompt, 30, 3, group.spec.vocab_size)
            assert sink.start is not None
            told = [entry.logprob for entry in sink.start.prompt_logprobs or ()]
            assert told == (list(prompt[1:]) if number == 0 else [])
            assert sink.finish is not None
            assert 0 <= sink.finish.accepted_drafts <= sink.finish.proposed_drafts
            drafts += sink.finish.accepted_drafts
    load = group.server.load
    assert 0 < drafts <= load.accepted_drafts <= load.proposed_drafts
    await mini.idle()

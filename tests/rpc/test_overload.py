"""Twenty times more than fits: refusals are quick and say when to come back, what was accepted ends whole."""

import asyncio
import time
import tracemalloc

import pytest
from fakes.cluster import MiniCluster, until
from fakes.group import FIRST_TOKEN
from fakes.sink import RecordingSink

from nori_cluster.config import RouterConfig
from nori_cluster.errors import QueueFull
from nori_cluster.frontend.backend import Submission
from nori_cluster.rpc import router_client
from nori_cluster.rpc.router_server import RouterServer

pytestmark = pytest.mark.contract

SLOTS, QUEUE, TOKENS = 4, 16, 5
FITS = 2 * SLOTS + QUEUE  # running in two groups, waiting in the router; the groups' own waiting room comes on top
PROMPT = 400  # longer than two step budgets of the fake: one such prompt at most waits in a group


def flooded(**more: int) -> MiniCluster:
    return MiniCluster("g1", "g2", router_config=RouterConfig(max_num_queued_reqs=QUEUE, **more), slots=SLOTS)


async def timed(sink: RecordingSink, began: float) -> float:
    await sink.ended.wait()
    return time.monotonic() - began


async def test_a_flood_of_twenty_times_what_fits_loses_nothing() -> None:
    async with flooded() as cluster:
        tracemalloc.start()
        asked: list[tuple[RecordingSink, asyncio.Task[float]]] = []
        for _ in range(20):
            for _ in range(FITS):
                (sink,), _ = cluster.ask(TOKENS, prompt=PROMPT)
                asked.append((sink, asyncio.create_task(timed(sink, time.monotonic()))))
            await asyncio.sleep(0.01)
            assert cluster.backend.router.waiting <= FITS * 20
            assert len(cluster.router._router.queue) <= QUEUE
        async with asyncio.timeout(20):
            times = await asyncio.gather(*(task for _, task in asked))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        refused = [(sink, took) for (sink, _), took in zip(asked, times, strict=True) if sink.error is not None]
        served = [sink for sink, _ in asked if sink.error is None]
        assert len(refused) + len(served) == 20 * FITS
        assert len(served) >= FITS
        assert len(refused) >= 10 * FITS
        for sink, took in refused:
            assert isinstance(sink.error, QueueFull), sink.error
            assert not sink.was_accepted
            assert sink.error.retry_after is not None
            assert 1.0 <= sink.error.retry_after <= 120.0
            assert took < 1.0, "a refusal waited"
        assert all(sink.ids == list(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)) for sink in served)
        assert peak < 64 << 20
        await cluster.idle()
        print(f"flood: {len(asked)} asked, {len(served)} served, slowest refusal {max(t for _, t in refused):.3f} s")


async def test_a_gateway_knows_that_the_queue_is_full_before_it_tokenizes_and_for_how_long() -> None:
    async with flooded() as cluster:
        for group in cluster.groups.values():
            group.step = 0.2  # the queue is busy for longer than a rate needs
        asked = [cluster.ask(TOKENS, prompt=PROMPT)[0][0] for _ in range(3 * FITS)]
        await until(lambda: any(sink.error is not None for sink in asked))
        info = cluster.backend.model("m")
        assert info is not None
        assert info.queue_full
        first, second = (cluster.backend.model("m") for _ in range(2))
        assert first is not None
        assert second is not None
        assert first.retry_after != second.retry_after, "the refused would all come back at once"
        await until(lambda: (cluster.backend.router.queue.drain_rate or 0) > 0, 10)
        queue = cluster.backend.router.queue
        assert queue.retry_after == pytest.approx(max(1.0, queue.waiting / queue.drain_rate), rel=0.5)
        async with asyncio.timeout(20):
            await asyncio.gather(*(sink.ended.wait() for sink in asked))
        await until(lambda: not cluster.backend.router.queue_full)
        info = cluster.backend.model("m")
        assert info is not None
        assert info.retry_after is None


async def test_while_the_router_is_away_a_gateway_holds_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "MAX_ASKED", 8)
    async with MiniCluster("g1") as cluster:
        await cluster.router.stop()
        await until(lambda: not cluster.backend.router.connected)
        asked: list[tuple[RecordingSink, Submission]] = []
        for _ in range(20):
            (sink,), submission = cluster.ask(TOKENS)
            asked.append((sink, submission))
        asked[-1][1].abort(0)  # its refusal is on the way
        asked[-1][0].aborted = True
        assert cluster.backend.model("m").queue_full  # type: ignore[union-attr]
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.ended.wait() for sink, _ in asked[:-1]))
        full = [sink for sink, _ in asked if isinstance(sink.error, QueueFull)]
        assert len(full) == 11
        assert all(sink.ids for sink, _ in asked[:8]), "placed by the last table"
        cluster.router = RouterServer(times=cluster.router_times)
        await cluster.router.start("127.0.0.1", cluster.router_port)
        await cluster.idle()

"""No request ever mixes two versions of the weights: continuations while groups reload, crash and come back."""

import asyncio
import random

import pytest
from fakes.cluster import MiniCluster, until
from fakes.group import base
from fakes.sink import RecordingSink

from nori_cluster.errors import DeadlineExceeded, Overloaded

pytestmark = pytest.mark.contract


async def cluster_of(cluster: MiniCluster, **weights: str) -> None:
    for name, value in weights.items():
        await cluster.groups[name].reload(value)
    await until(lambda: {g.view.group_id: g.view.registration.weights_id for g in cluster.backend.groups()} == weights)
    await cluster.reachable(*weights)


def said_by(sink: RecordingSink) -> str:
    """The weights that said all of it. AssertionError when no version alone did."""
    assert sink.start is not None
    first = base(sink.start.weights_id)
    assert sink.ids == list(range(first, first + len(sink.ids))), (sink.start.weights_id, sink.ids)
    return sink.start.weights_id


async def ended(*sinks: RecordingSink, timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        for sink in sinks:
            await sink.ended.wait()


async def test_a_request_goes_on_with_its_weights_only() -> None:
    """Two groups of the new ones are idle; the one of the old ones takes it all."""
    async with MiniCluster("g1", "g2", "g3", "g4") as cluster:
        await cluster_of(cluster, g1="w1", g2="w1", g3="w2", g4="w2")
        asked = [cluster.ask(200, n=1 + index % 2)[0] for index in range(12)]
        for sinks in asked:
            await sinks[0].heard.wait()
        before = {name: len(group.submitted) for name, group in cluster.groups.items()}
        await cluster.groups["g1"].reload("w2", hand_over=True)
        for sinks in asked:
            await ended(*sinks)
            assert all(sink.finish is not None and len(sink.ids) == 200 for sink in sinks)
            assert len({said_by(sink) for sink in sinks}) == 1
        moved = cluster.groups["g2"].submitted[before["g2"] :]
        assert moved
        assert {(s.weights_id, s.resumed_tokens > 0) for s in moved} == {("w1", True)}
        assert not [s for name in ("g3", "g4") for s in cluster.groups[name].submitted[before[name] :]]
        await cluster.idle()


async def test_without_a_group_of_its_weights_it_waits_for_one() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        await cluster_of(cluster, g1="w1", g2="w2")
        await cluster.groups["g2"].stop()
        await until(lambda: not cluster.backend.groups()[1].view.placeable)
        (sink,), _ = cluster.ask(100)
        await sink.heard.wait()
        await cluster.groups["g2"].start(cluster.router_address)
        await cluster.reachable("g2")
        await cluster.groups["g1"].reload("w2", hand_over=True)
        await asyncio.sleep(0.5)
        assert not sink.ended.is_set()
        count = len(sink.ids)
        assert (await cluster.answer(3)).ids == [base("w2") + k for k in range(3)], "others need not wait"
        assert len(sink.ids) == count
        await cluster.groups["g2"].reload("w1")
        await ended(sink)
        assert said_by(sink) == "w1"
        assert len(sink.ids) == 100
        await cluster.idle()


@pytest.mark.parametrize("time_left", [None, 0.8])
async def test_then_it_ends_with_an_error_that_says_why(time_left: float | None) -> None:
    async with MiniCluster("g1") as cluster:
        cluster.backend.patience = 0.8
        await cluster_of(cluster, g1="w1")
        (sink,), _ = cluster.ask(300, time_left=time_left)
        await sink.heard.wait()
        await cluster.groups["g1"].reload("w2", hand_over=True)
        await ended(sink)
        assert said_by(sink) == "w1"
        assert isinstance(sink.error, Overloaded if time_left is None else DeadlineExceeded)
        assert "no ready worker group of model 'm' holds the weights that began this answer (w1)" in str(sink.error)
        await cluster.idle()


async def test_what_has_said_nothing_may_begin_with_any_weights() -> None:
    async with MiniCluster("g1", "g2", slots=1) as cluster:
        await cluster_of(cluster, g1="w1", g2="w2")
        asked = [cluster.ask(20)[0][0] for _ in range(8)]
        await until(lambda: all(sink.was_accepted for sink in asked))
        await cluster.groups["g1"].reload("w2", hand_over=True)
        await cluster.groups["g2"].reload("w1")
        await ended(*asked)
        silent = [sink for sink in asked if sink.error is None]
        assert len(silent) >= 7, "only what had spoken may have to wait"
        assert {said_by(sink) for sink in silent} <= {"w1", "w2"}, "each of one version"


async def test_a_group_refuses_what_began_with_other_weights_though_router_and_gateway_do_not_know() -> None:
    """The table is old: the request is set back, not mixed, and goes on where its weights are."""
    async with MiniCluster("g1", "g2", "g3") as cluster:
        await cluster_of(cluster, g1="w1", g2="w1", g3="w1")
        asked = [cluster.ask(150)[0][0] for _ in range(9)]
        for sink in asked:
            await sink.heard.wait()
        for name in ("g2", "g3"):  # known to nobody: as if the news were under way
            cluster.groups[name].hand_off = True
        await until(lambda: not cluster.groups["g3"].live and not cluster.groups["g2"].live)
        cluster.groups["g3"].weights = "w2"
        for name in ("g2", "g3"):
            cluster.groups[name].hand_off = False
        await ended(*asked)
        assert {said_by(sink) for sink in asked} == {"w1"}
        assert all(len(sink.ids) == 150 for sink in asked)
        await cluster.idle()


async def test_what_a_group_ends_on_purpose_ends_with_its_reason_and_does_not_move() -> None:
    """Never as if the client had gone, which would end a stream without a word."""
    async with MiniCluster("g1", "g2") as cluster:
        await cluster_of(cluster, g1="w1", g2="w1")
        asked = [cluster.ask(300)[0][0] for _ in range(2)]
        for sink in asked:
            await sink.heard.wait()
        cluster.groups["g1"].ends_all = cluster.groups["g2"].ends_all = "the weights are being replaced"
        await ended(*asked)
        for sink in asked:
            assert isinstance(sink.error, Overloaded)
            assert sink.error.message == "the weights are being replaced"
        assert cluster.backend.counts.continued == 0
        await cluster.idle()


@pytest.mark.parametrize("seed", range(3))
async def test_a_walk_of_reloads_and_losses_mixes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    names = ("g1", "g2", "g3")
    async with MiniCluster(*names) as cluster:
        await cluster_of(cluster, **dict.fromkeys(names, "w1"))
        cluster.backend.patience = 1.5
        asked: list[RecordingSink] = []
        version = 1

        async def ask() -> None:
            asked.extend(cluster.ask(rng.randint(1, 120), n=rng.choice((1, 1, 2)))[0])

        async def roll() -> None:
            """Every group in turn, as Operations.roll does; sometimes it stops half-way."""
            nonlocal version
            version += 1
            for name in rng.sample(names, rng.randint(1, 3)):
                group = cluster.groups[name]
                alike = [g for g in cluster.groups.values() if g is not group and g.weights == group.weights]
                await group.reload(f"w{version}", hand_over=bool(alike) or rng.random() < 0.2)

        async def crash() -> None:
            group = cluster.groups[rng.choice(names)]
            await group.stop()
            group.incarnation += 1
            if rng.random() < 0.3:
                group.weights = f"w{rng.randint(1, version)}"
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await group.start(cluster.router_address)

        for _ in range(60):
            await rng.choice((ask, ask, ask, ask, ask, ask, roll, crash))()
            await asyncio.sleep(rng.uniform(0.0, 0.04))
        await ended(*asked, timeout=20.0)
        for sink in asked:
            if sink.start is not None:
                said_by(sink)
            if sink.error is not None:
                assert "holds the weights that began this answer" in str(sink.error), sink.error
        assert sum(sink.finish is not None for sink in asked) > len(asked) / 2
        assert cluster.backend.counts.continued > 3
        await cluster.idle()

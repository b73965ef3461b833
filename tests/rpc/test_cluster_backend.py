"""Router server, router client, data-plane client and backend together, over sockets, with fake groups and faults."""

import asyncio
import random
import time

import pytest
from fakes.cluster import MiniCluster, until
from fakes.group import FIRST_TOKEN, FakeGroup
from fakes.sink import RecordingSink

from nori_cluster.errors import (
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    ModelNotFound,
    Overloaded,
)
from nori_cluster.frontend.backend import Finish
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.router_server import RouterTimes
from nori_cluster.types import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.contract


def expected(tokens: int) -> list[int]:
    return [FIRST_TOKEN + k for k in range(tokens)]


async def test_a_request_goes_there_and_back() -> None:
    async with MiniCluster("g1") as cluster:
        sink = await cluster.answer(5)
        assert sink.ids == expected(5)
        assert sink.finish == Finish(FinishReason.LENGTH)
        assert sink.start is not None
        assert sink.start.cached_tokens == 3
        info = cluster.backend.model("m")
        assert info is not None
        assert (info.max_model_len, info.ready_groups) == (512, 1)
        assert cluster.backend.model("x") is None
        assert not cluster.backend.degraded
        await cluster.idle()


async def test_candidates_have_consecutive_handles_and_one_prompt_group() -> None:
    async with MiniCluster("g1") as cluster:
        sinks, _ = cluster.ask(3, n=4)
        for sink in sinks:
            await sink.ended.wait()
        sent = cluster.groups["g1"].submitted
        assert [s.candidate for s in sent] == [0, 1, 2, 3]
        assert [s.handle - sent[0].handle for s in sent] == [0, 1, 2, 3]
        assert {s.prompt_group for s in sent} == {sent[0].handle}
        assert {s.sampling.seed for s in sent} == {-1}  # 2**64 - 1 as int64
        await cluster.idle()


async def test_logprobs_come_with_their_tokens() -> None:
    async with MiniCluster("g1") as cluster:
        sink = RecordingSink()
        sampling = SamplingParams(max_tokens=4, logprobs=0)
        cluster.backend.submit(Request(id="r", model="m", prompt_token_ids=(1,), sampling=sampling, seed=1), [sink])
        await sink.ended.wait()
        assert sink.ids == expected(4)
        assert [value.logprob for value in sink.logprobs] == [-0.5] * 4


async def test_load_spreads_over_groups_and_bursts_end() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        asked = [cluster.ask(20) for _ in range(100)]
        for (sink,), _ in asked:
            async with asyncio.timeout(10):
                await sink.ended.wait()
            assert sink.ids == expected(20)
        counts = [len(group.submitted) for group in cluster.groups.values()]
        assert min(counts) >= 30
        await cluster.idle()


# -- F41: bad groups ------------------------------------------------------------------------------------------------


async def test_f41_r_and_l_requests_go_to_the_good_group() -> None:
    async with MiniCluster("good") as cluster:
        refusing, loading = FakeGroup("refusing"), FakeGroup("loading")
        cluster.groups |= {"refusing": refusing, "loading": loading}
        loading.loading = True
        await refusing.start()
        await refusing.stop_serving()
        refusing.register(cluster.router_address)  # it says it is ready, but nothing listens
        await loading.start(cluster.router_address)
        await until(lambda: len(cluster.router.snapshot().groups) == 3)
        asked = [cluster.ask(3) for _ in range(100)]
        for (sink,), _ in asked:
            await sink.ended.wait()
            assert sink.ids == expected(3)
        assert not loading.submitted
        loading.loading = False  # loaded now: within one probe it takes its share
        await cluster.reachable("loading")
        assert await chosen(cluster, "loading")
        await cluster.idle()


async def test_f41_h_a_hanging_group_delays_nobody() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        hanging = FakeGroup("hanging")
        hanging.hang = True
        cluster.groups["hanging"] = hanging
        await hanging.start(cluster.router_address)
        await until(lambda: len(cluster.router.snapshot().groups) == 3)
        start = time.monotonic()
        asked = [cluster.ask(3) for _ in range(20)]
        for (sink,), _ in asked:
            await sink.ended.wait()
            assert sink.ids == expected(3)
        assert time.monotonic() - start < 0.25
        await cluster.idle()


async def test_f41_h_a_group_that_starts_to_hang_is_lost_by_ping_and_its_streams_go_on_elsewhere() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        bad = cluster.groups["g1"]
        asked = [cluster.ask(400) for _ in range(8)]
        for (sink,), _ in asked:
            await sink.heard.wait()
        bad.hang = True
        async with asyncio.timeout(8.0):
            for (sink,), _ in asked:
                await sink.ended.wait()
                assert sink.ids == expected(400)
                assert sink.finish is not None
        assert cluster.backend.counts.lost == 4
        assert cluster.backend.counts.continued == 4
        before = len(bad.submitted)
        for _ in range(6):
            assert (await cluster.answer(2)).ids == expected(2)
        assert len(bad.submitted) == before
        bad.hang = False
        await cluster.reachable("g1")
        await cluster.idle()


async def test_f41_a_group_that_never_accepts_loses_the_request_to_another() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        for group in cluster.groups.values():
            group.silent = True
        (sink,), _ = cluster.ask(3)
        await until(lambda: any(group.submitted for group in cluster.groups.values()))
        for group in cluster.groups.values():
            if not group.submitted:
                group.silent = False
        await sink.ended.wait()
        assert sink.ids == expected(3)
        assert cluster.backend.counts.moved == 1
        await until(lambda: cluster.reserved() == 0)


async def test_f41_d_a_reset_after_three_tokens_goes_on_where_it_was() -> None:
    """Both candidates of a request lose their only group, wait for it, and hear each token once."""
    async with MiniCluster("g1") as cluster:
        group = cluster.groups["g1"]
        group.reset_after = 3
        sinks, _ = cluster.ask(10, n=2)
        await until(lambda: len(sinks[0].ids) == 3)
        group.reset_after = None
        for sink in sinks:
            await sink.ended.wait()
            assert sink.ids == expected(10)
            assert sink.finish == Finish(FinishReason.LENGTH)
        assert [sequence.resumed_tokens for sequence in group.submitted] == [0, 0, 3, 3]
        assert [sequence.candidate for sequence in group.submitted] == [0, 1, 0, 1]
        assert cluster.backend.counts.continued == 1
        await cluster.reachable("g1")
        assert (await cluster.answer(4)).ids == expected(4)
        await cluster.idle()


async def test_streams_survive_groups_that_break_again_and_again() -> None:
    async with MiniCluster("g1", "g2", "g3", step=0.001) as cluster:
        asked = [cluster.ask(300, n=1 + k % 3) for k in range(12)]
        rng = random.Random(1)
        for _ in range(10):
            await asyncio.sleep(0.05)
            group = cluster.groups[rng.choice(("g1", "g2", "g3"))]
            group.reset_after = 1
            await asyncio.sleep(0.01)
            group.reset_after = None
        async with asyncio.timeout(20.0):
            for sinks, _ in asked:
                for sink in sinks:
                    await sink.ended.wait()
                    assert sink.ids == expected(300), sink.error
        assert cluster.backend.counts.continued > 3
        await cluster.idle()


async def test_a_drained_group_hands_its_streams_over() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        asked = [cluster.ask(200, n=2) for _ in range(4)]
        for sinks, _ in asked:
            await sinks[0].heard.wait()
        first = cluster.groups["g1"]
        first.hand_off, first.state = True, GroupState.DRAINING
        for sinks, _ in asked:
            for sink in sinks:
                await sink.ended.wait()
                assert sink.ids == expected(200)
        assert not first.live
        await cluster.idle()


async def test_a_continuation_waits_for_a_group_until_its_deadline() -> None:
    async with MiniCluster("g1") as cluster:
        (patient,), _ = cluster.ask(500)
        (hasty,), _ = cluster.ask(500, time_left=1.0)
        (leaving,), leave = cluster.ask(500)
        await until(lambda: bool(patient.ids and hasty.ids and leaving.ids))
        await cluster.groups["g1"].stop()
        await until(lambda: cluster.backend.counts.lost == 3)
        leave.abort(0)
        leaving.aborted = True
        await hasty.ended.wait()
        assert isinstance(hasty.error, DeadlineExceeded)
        assert hasty.ids == expected(len(hasty.ids))
        assert not patient.ended.is_set()
        again = FakeGroup("g2")
        cluster.groups["g2"] = again
        await again.start(cluster.router_address)
        async with asyncio.timeout(5.0):
            await patient.ended.wait()
        assert patient.ids == expected(500)
        assert len(again.submitted) == 1
        await until(lambda: cluster.reserved() == 0)


async def test_a_request_that_asks_for_the_impossible_fails_alone_and_is_not_replayed() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        for group in cluster.groups.values():
            group.fault = "nothing is left to say"
        sink = await cluster.answer(5)
        assert isinstance(sink.error, ClientError)
        assert sink.error.message == "nothing is left to say"
        assert sum(len(group.submitted) for group in cluster.groups.values()) == 1
        await cluster.idle()


async def test_patience_ends() -> None:
    async with MiniCluster("g1") as cluster:
        cluster.backend.patience = 0.5
        (sink,), _ = cluster.ask(500)
        await sink.heard.wait()
        await cluster.groups["g1"].stop()
        async with asyncio.timeout(5.0):
            await sink.ended.wait()
        assert isinstance(sink.error, Overloaded)


async def test_f41_only_a_refusing_group_is_503_in_under_a_second_until_a_good_one_starts() -> None:
    async with MiniCluster() as cluster:
        refusing = FakeGroup("refusing")
        await refusing.start()
        await refusing.stop_serving()
        refusing.register(cluster.router_address)
        cluster.groups["refusing"] = refusing
        await until(lambda: bool(cluster.backend.groups()))
        start = time.monotonic()
        sink = await cluster.answer(3)
        assert isinstance(sink.error, Overloaded)
        assert sink.error.retry_after
        assert time.monotonic() - start < 1.0
        good = FakeGroup("good")
        cluster.groups["good"] = good
        await good.start(cluster.router_address)
        await cluster.reachable("good")
        assert (await cluster.answer(3)).ids == expected(3)


async def test_a_group_that_refuses_everything_ends_in_overloaded_after_bounded_attempts() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        for group in cluster.groups.values():
            group.reject = pb.REJECTION_REASON_QUEUE_FULL
        sink = await cluster.answer(3)
        assert isinstance(sink.error, Overloaded)
        assert sum(len(group.submitted) for group in cluster.groups.values()) == 3
        await cluster.idle()


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (pb.REJECTION_REASON_INVALID, ClientError),
        (pb.REJECTION_REASON_DEADLINE_PASSED, DeadlineExceeded),
        (pb.REJECTION_REASON_ADAPTER_NOT_LOADED, ModelNotFound),
    ],
)
async def test_final_rejections_are_not_retried(reason: int, error: type[Exception]) -> None:
    async with MiniCluster("g1", "g2") as cluster:
        for group in cluster.groups.values():
            group.reject = reason
        sink = await cluster.answer(3)
        assert type(sink.error) is error
        assert sum(len(group.submitted) for group in cluster.groups.values()) == 1
        await cluster.idle()


async def test_unknown_models_and_long_prompts_are_the_clients_fault() -> None:
    async with MiniCluster("g1") as cluster:
        assert isinstance((await cluster.answer(3, model="x")).error, ModelNotFound)
        assert isinstance((await cluster.answer(3, prompt=512)).error, ContextLengthExceeded)
        await cluster.idle()


# -- F56: ends and races --------------------------------------------------------------------------------------------


async def test_f56_abort_at_every_stage_leaves_nothing() -> None:
    async with MiniCluster("g1", slots=1, step=0.005) as cluster:
        group = cluster.groups["g1"]
        (running,), first = cluster.ask(10_000, prompt=100)
        await running.heard.wait()
        held = [cluster.ask(10_000, prompt=510)]  # waits in the group
        await held[0][0][0].admitted.wait()
        held += [cluster.ask(10_000) for _ in range(3)]  # wait in the router
        await until(lambda: cluster.router.snapshot().waiting == 3)
        immediately, submission = cluster.ask(5)  # aborted before the router can have heard of it
        submission.abort(0)
        immediately[0].aborted = True
        for sinks, submission in held[::-1]:
            sinks[0].aborted = True
            submission.abort(0)
            submission.abort(0)
        await until(lambda: cluster.router.snapshot().waiting == 0)
        running.aborted = True
        first.abort(0)
        async with asyncio.timeout(1.0):  # F56: within 1 s the group has dropped it
            await cluster.idle()
        assert group.aborted == 2
        assert (await cluster.answer(3)).ids == expected(3)


async def test_f56_a_deadline_that_passes_in_a_full_queue_never_reaches_a_group() -> None:
    async with MiniCluster("g1", slots=1) as cluster:
        (running,), submission = cluster.ask(10_000)
        _, second = cluster.ask(10_000, prompt=510)
        await until(lambda: len(cluster.groups["g1"].submitted) == 2)
        start = time.monotonic()
        sink = await cluster.answer(5, time_left=0.05)
        assert isinstance(sink.error, DeadlineExceeded)
        assert time.monotonic() - start < 0.5
        running.aborted = True
        submission.abort(0)
        second.abort(0)
        await asyncio.sleep(0.05)
        assert len(cluster.groups["g1"].submitted) == 2
        late = await cluster.answer(5, time_left=-1.0)
        assert isinstance(late.error, DeadlineExceeded)


async def test_f56_cancel_and_finish_race_200_times_without_a_leak() -> None:
    async with MiniCluster("g1", step=0.001) as cluster:
        rng = random.Random(1)
        for round_ in range(200):
            (sink,), submission = cluster.ask(2)
            if round_ % 2:
                await sink.heard.wait()
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(rng.uniform(0.0, 0.006))
            if not sink.ended.is_set():
                sink.aborted = True
                submission.abort(0)
            submission.abort(0)
        await cluster.idle()
        link = cluster.backend.links["g1"]
        assert link._next_handle <= 200
        assert len(link._free) == len(set(link._free)) == link._next_handle - 1
        assert (await cluster.answer(3)).ids == expected(3)


async def test_f56_a_closed_gateway_frees_what_it_ran() -> None:
    async with MiniCluster("g1") as cluster:
        backend = await cluster.add_backend()
        await cluster.reachable("g1")
        sinks = [RecordingSink() for _ in range(10)]
        for sink in sinks:
            sampling = SamplingParams(max_tokens=10_000)
            backend.submit(Request(id="r", model="m", prompt_token_ids=(1,), sampling=sampling, seed=1), [sink])
        for sink in sinks:
            await sink.heard.wait()
        await backend.close()
        assert all(isinstance(sink.error, EngineFailure) for sink in sinks)
        async with asyncio.timeout(1.0):
            await until(lambda: not cluster.groups["g1"].live)
        await until(lambda: cluster.reserved() == 0)


# -- states, drain, the router itself -------------------------------------------------------------------------------


async def test_a_lost_registration_takes_the_group_out_within_a_second() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        (sink,), submission = cluster.ask(100_000)
        await sink.heard.wait()
        where = next(name for name, group in cluster.groups.items() if group.live)
        start = time.monotonic()
        registrar = cluster.groups[where].registrar
        assert registrar is not None
        await registrar.close()
        await until(
            lambda: {g.view.group_id for g in cluster.backend.groups() if g.view.placeable} != {"g1", "g2"}, 1.0
        )
        assert time.monotonic() - start < 1.0
        sink.heard.clear()
        await asyncio.wait_for(sink.heard.wait(), 1.0)  # the data plane is well: the stream goes on
        for _ in range(4):
            await cluster.answer(2)
        assert len(cluster.groups[where].submitted) == 1
        sink.aborted = True
        submission.abort(0)


async def test_a_silent_registration_is_dead_after_the_report_time() -> None:
    async with MiniCluster("g1") as cluster:
        registrar = cluster.groups["g1"].registrar
        assert registrar is not None
        registrar._interval = 60.0
        await until(lambda: not cluster.backend.ready("m"), 1.5)
        assert cluster.router.snapshot().groups[0].view.state.name == "DEAD"


async def test_drain_moves_new_work_and_reported_states_count() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        assert cluster.router.set_draining("g1", True)
        assert not cluster.router.set_draining("nobody", True)
        for _ in range(4):
            await cluster.answer(2)
        assert not cluster.groups["g1"].submitted
        await until(lambda: cluster.backend.model("m").ready_groups == 1)  # type: ignore[union-attr]
        cluster.router.set_draining("g1", False)
        assert await chosen(cluster, "g1")


async def chosen(cluster: MiniCluster, name: str) -> bool:
    asked = [cluster.ask(3) for _ in range(8)]
    for (sink,), _ in asked:
        await sink.ended.wait()
    return bool(cluster.groups[name].submitted)


async def test_a_reborn_group_at_another_address_is_used() -> None:
    async with MiniCluster("g1") as cluster:
        (sink,), _ = cluster.ask(400)
        await sink.heard.wait()
        await cluster.groups["g1"].stop()
        again = FakeGroup("g1")
        again.incarnation = 2
        cluster.groups["g1"] = again
        await again.start(cluster.router_address)
        await cluster.reachable("g1")
        assert (await cluster.answer(3)).ids == expected(3)
        await asyncio.wait_for(sink.ended.wait(), 3.0)
        assert sink.ids == expected(400)
        await cluster.idle()


async def test_without_the_router_the_gateway_places_by_its_last_table_and_says_so() -> None:
    async with MiniCluster("g1", "g2") as cluster:
        (stream,), submission = cluster.ask(100_000)
        await stream.heard.wait()
        await cluster.router.stop()
        asked = [cluster.ask(3, prompt=200) for _ in range(12)]
        for (sink,), _ in asked:
            async with asyncio.timeout(2):
                await sink.ended.wait()
            assert sink.ids == expected(3)
        assert cluster.backend.degraded
        assert cluster.backend.router.local_placements == 12
        assert min(len(group.submitted) for group in cluster.groups.values()) >= 4
        assert isinstance((await cluster.answer(3, model="x")).error, ModelNotFound)
        cluster.router = type(cluster.router)(times=cluster.router_times)
        await cluster.router.start("127.0.0.1", cluster.router_port)
        await until(lambda: not cluster.backend.degraded, 5.0)
        await until(lambda: cluster.reserved() == 1, 5.0)  # what runs is known again
        await cluster.reachable("g1", "g2")
        assert (await cluster.answer(3)).ids == expected(3)
        assert cluster.backend.router.local_placements == 12
        stream.aborted = True
        submission.abort(0)
        await cluster.idle()


async def test_a_restarted_router_rebuilds_from_hello_and_registers() -> None:
    times = RouterTimes(report=0.5, gateway_grace=0.5, load=0.1, settle=2.0, forget=5.0)
    async with MiniCluster("g1", "g2", router_times=times) as cluster:
        running = [cluster.ask(100_000) for _ in range(6)]
        for (sink,), _ in running:
            await sink.heard.wait()
        before = {g.view.group_id: g.reserved_requests for g in cluster.router.snapshot().groups}
        await cluster.restart_router()
        waiting = [cluster.ask(3) for _ in range(4)]  # asked while the groups are not back yet
        await until(lambda: len(cluster.router.snapshot().groups) == 2, 5.0)
        await until(lambda: cluster.reserved() >= 6, 5.0)
        for (sink,), _ in waiting:
            async with asyncio.timeout(5):
                await sink.ended.wait()
            assert sink.ids == expected(3)
        await until(lambda: {g.view.group_id: g.reserved_requests for g in cluster.router.snapshot().groups} == before)
        assert cluster.router.snapshot().gateways[0].open_requests == 6
        for (sink,), submission in running:
            assert not sink.ended.is_set()
            sink.aborted = True
            submission.abort(0)
        await cluster.idle()


async def test_a_model_the_restarted_router_has_not_seen_is_unavailable_not_unknown() -> None:
    async with MiniCluster("g1") as cluster:
        await cluster.groups["g1"].stop()
        await cluster.restart_router()
        await until(lambda: cluster.backend.router.connected and not cluster.backend.groups(), 5.0)
        assert isinstance((await cluster.answer(3)).error, Overloaded)
        assert isinstance((await cluster.answer(3, model="x")).error, ModelNotFound)


async def test_without_any_router_requests_are_refused_soon() -> None:
    async with MiniCluster() as cluster:
        await cluster.backend.close()
        await cluster.router.stop()
        cluster.backends.clear()
        backend = await cluster.add_backend()
        start = time.monotonic()
        sink = await cluster.answer(3)
        assert isinstance(sink.error, Overloaded)
        assert time.monotonic() - start < 1.0
        assert not backend.ready("m")


async def test_two_gateways_share_one_router_and_its_limits() -> None:
    async with MiniCluster("g1", slots=2) as cluster:
        second = await cluster.add_backend()
        await cluster.reachable("g1")
        await until(lambda: second.router.gateways == 2)
        sinks = []
        for backend in cluster.backends:
            for _ in range(30):
                sink = RecordingSink()
                sampling = SamplingParams(max_tokens=3)
                request = Request(id="r", model="m", prompt_token_ids=(1,) * 200, sampling=sampling, seed=1)
                backend.submit(request, [sink])
                sinks.append(sink)
        await until(lambda: cluster.router.snapshot().waiting > 40)
        assert len(cluster.groups["g1"].live) <= 4
        for sink in sinks:
            async with asyncio.timeout(10):
                await sink.ended.wait()
            assert sink.ids == expected(3)
        await cluster.idle()

"""The data-plane server around a real EngineCore and the fake executor, over real sockets."""

import asyncio
import contextlib
import threading
import time

import grpc
import msgspec
import numpy as np
import pytest
from engine.walk import alone, make_request, make_spec
from fakes.executor import FakeExecutor

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.plan import FinishNews, StepDeltas
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.errors import CheckpointError, EngineFailure, Overloaded
from nori_cluster.hashing import extend, hint, root
from nori_cluster.rpc import dataplane_server
from nori_cluster.rpc.dataplane_server import DataplaneServer
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2, sampling_pb2
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2_grpc as pb_grpc
from nori_cluster.types import FinishReason, GroupSpec, pack

pytestmark = pytest.mark.unit


class SlowExecutor(FakeExecutor):
    """A step takes 5 ms, or `pause` seconds; `broken` makes the next one fail."""

    broken = False
    pause = 0.005

    def collect(self):
        time.sleep(self.pause)
        if self.broken:
            raise EngineFailure("rank 0 (pid 1) is gone")
        return super().collect()


class Group:
    def __init__(self) -> None:
        self.spec = make_spec(num_blocks=40, max_model_len=200)
        self.executor = SlowExecutor(self.spec, 8)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_waiting_requests=4)
        self.scheduler = Scheduler(config, self.spec)
        self.failures: list[EngineFailure] = []
        self.server = DataplaneServer(
            EngineCore(self.scheduler, self.executor), self.spec, "g0", 7, self.failures.append
        )

    async def start(self) -> str:
        return f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    async def settled(self) -> None:
        """Within a second of the last sequence nothing is held."""
        for _ in range(100):
            if not self.scheduler.has_work and self.scheduler.pool.free == 40:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("blocks were not freed")


@pytest.fixture
async def group():
    group = Group()
    group.address = await group.start()
    yield group
    await group.server.stop()


class Gateway:
    """One Exchange stream, driven by hand."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.call = pb_grpc.WorkerGroupServiceStub(self.channel).Exchange()
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, pb.SequenceFinish] = {}
        self.accepted: list[int] = []
        self.rejections: list[pb.Rejection] = []
        self.starts: list[int] = []
        self.cached: dict[int, int] = {}

    async def __aenter__(self) -> "Gateway":
        await self.send(hello=pb.Hello(gateway_id="t", gateway_incarnation=1))
        self.welcome = (await self.read()).welcome
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self.channel.close()

    async def send(self, **command) -> None:
        await self.call.write(pb.ExchangeRequest(**command))

    async def read(self) -> pb.ExchangeResponse:
        message = await asyncio.wait_for(self.call.read(), 5)
        if message is grpc.aio.EOF:
            raise EOFError(await self.call.details())
        return message

    async def submit(self, *requests: pb.SequenceRequest) -> None:
        await self.send(submit=pb.Submit(sequences=requests))

    async def until(self, done) -> None:
        while not done():
            message = await self.read()
            self.accepted += message.accepted.handles
            if message.HasField("rejection"):
                self.rejections.append(message.rejection)
            output = message.step_output
            self.starts += [start.handle for start in output.starts]
            self.cached |= {start.handle: start.cached_tokens for start in output.starts}
            for handle, token in zip(output.handles, output.token_ids, strict=True):
                assert handle not in self.finishes
                self.tokens.setdefault(handle, []).append(token)
            for finish in output.finishes:
                assert finish.handle not in self.finishes
                self.finishes[finish.handle] = finish


def sequence(handle: int, prompt, *, max_tokens=6, seed=3, **fields) -> pb.SequenceRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return pb.SequenceRequest(handle=handle, prompt_token_ids=prompt, sampling=sampling, **fields)


async def test_welcome_describes_the_group(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        assert gateway.welcome.group_id == "g0"
        assert gateway.welcome.group_incarnation == 7
        assert gateway.welcome.description.kv_blocks == 40
        await gateway.send(ping=pb.Ping(nonce=5))
        assert (await gateway.read()).pong.nonce == 5


async def test_two_gateways_may_use_the_same_handles(group: Group) -> None:
    async with Gateway(group.address) as left, Gateway(group.address) as right:
        for gateway, first in ((left, 5), (right, 9)):
            await gateway.submit(*(sequence(handle, [first, handle]) for handle in (1, 2)))
        for gateway in (left, right):
            await gateway.until(lambda gateway=gateway: len(gateway.finishes) == 2)
        for gateway, first in ((left, 5), (right, 9)):
            assert sorted(gateway.accepted) == sorted(gateway.starts) == [1, 2]
            for handle in (1, 2):
                want = alone(make_request(0, [first, handle], max_tokens=6, seed=3, ignore_eos=True), group.spec)
                assert gateway.tokens[handle] == want
                assert gateway.finishes[handle].reason == generation_pb2.FINISH_REASON_LENGTH
    await group.settled()


async def test_abort_ends_with_one_finish_and_frees_blocks(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, [1], max_tokens=150), sequence(2, [2], max_tokens=5))
        await gateway.until(lambda: len(gateway.tokens.get(1, [])) > 2)
        await gateway.send(abort=pb.Abort(handles=[1, 77]))
        await gateway.until(lambda: len(gateway.finishes) == 2)
        assert gateway.finishes[1].reason == generation_pb2.FINISH_REASON_CANCELLED
        assert gateway.finishes[2].reason == generation_pb2.FINISH_REASON_LENGTH
        await group.settled()
        await gateway.submit(sequence(1, [1], max_tokens=2))  # the handle is free again


async def test_other_weights_are_told_before_anything_is_accepted_and_the_cache_is_empty(group: Group) -> None:
    prompt = list(range(1, 40))
    other = msgspec.structs.replace(group.spec, weights_id="b@2", weight_version="2")
    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, prompt))
        await gateway.until(lambda: 1 in gateway.finishes)
        await group.settled()
        group.server.draining = True
        assert await group.server.reload(lambda: other) is other
        group.server.draining = False
        welcome = (await gateway.read()).welcome.description
        assert (welcome.weights_id, welcome.weight_version) == ("b@2", "2")
        await gateway.submit(
            sequence(2, prompt), sequence(3, [1], weights_id="a@1"), sequence(4, [1], weights_id="b@2")
        )
        await gateway.until(lambda: {2, 4} <= gateway.finishes.keys() and gateway.rejections)
        assert gateway.cached[2] == 0
        (refused,) = gateway.rejections
        assert (list(refused.handles), refused.reason) == ([3], pb.REJECTION_REASON_OTHER_WEIGHTS)
        assert refused.message == "the answer began with weights a@1, this group holds b@2"
        await gateway.submit(sequence(5, prompt))
        await gateway.until(lambda: 5 in gateway.finishes)
        assert gateway.cached[5] > 0
    await group.settled()


async def test_a_reload_that_is_refused_changes_nothing_and_one_that_breaks_ends_the_group(group: Group) -> None:
    def refuse() -> GroupSpec:
        raise CheckpointError("x has shape (3,)")

    def breaks() -> GroupSpec:
        raise EngineFailure("rank 0 failed")

    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, [1], max_tokens=150))
        await gateway.until(lambda: gateway.tokens)
        group.server.draining = True
        with pytest.raises(Overloaded, match="1 sequences of the group still run"):
            await group.server.reload(refuse)
        group.server.abort_all("because")
        await gateway.until(lambda: 1 in gateway.finishes)
        assert gateway.finishes[1].error_message == "because"
        with pytest.raises(CheckpointError, match="shape"):
            await group.server.reload(refuse)
        group.server.draining = False
        await gateway.submit(sequence(2, [1], max_tokens=2))
        await gateway.until(lambda: 2 in gateway.finishes)
        group.server.draining = True
        with pytest.raises(EngineFailure, match="rank 0 failed"):
            await group.server.reload(breaks)
        with pytest.raises(grpc.aio.AioRpcError, match="rank 0 failed"):
            await gateway.until(lambda: False)
        assert [str(failure) for failure in group.failures] == ["rank 0 failed"]
        with pytest.raises(EngineFailure, match="rank 0 failed"):
            await group.server.reload(refuse)


async def test_a_reload_that_nobody_waits_for_any_more_is_not_begun(group: Group) -> None:
    begun, free, loaded = threading.Event(), threading.Event(), []

    def slow() -> GroupSpec:
        begun.set()
        assert free.wait(5.0)
        return group.spec

    def unwanted() -> GroupSpec:
        loaded.append("unwanted")
        return group.spec

    group.server.draining = True
    first = asyncio.create_task(group.server.reload(slow))
    assert await asyncio.to_thread(begun.wait, 5.0)
    second = asyncio.create_task(group.server.reload(unwanted))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    free.set()
    assert await first is group.spec
    assert await group.server.reload(lambda: group.spec) is group.spec
    assert not loaded
    assert not group.failures


async def test_a_lost_stream_aborts_its_sequences_only(group: Group) -> None:
    async with Gateway(group.address) as stays:
        async with Gateway(group.address) as leaves:
            await leaves.submit(*(sequence(handle, [handle], max_tokens=190) for handle in range(12)))
            await leaves.until(lambda: leaves.tokens)
        await stays.submit(sequence(1, [1], max_tokens=5))
        await stays.until(lambda: stays.finishes)
        await group.settled()


async def test_what_a_lost_stream_left_is_open_until_the_engine_let_it_go(group: Group) -> None:
    """A drain that ended before would call a group empty in which sequences run."""
    seen = []
    async with Gateway(group.address) as leaves:
        await leaves.submit(*(sequence(handle, [handle], max_tokens=190) for handle in range(3)))
        await leaves.until(lambda: leaves.tokens)
        group.executor.pause = 0.3  # the step in progress
        await asyncio.sleep(0.05)
    async with asyncio.timeout(3):
        while group.server.open_sequences:
            seen.append((len(group.server._sessions), group.server.open_sequences))
            await asyncio.sleep(0.01)
    assert (0, 3) in seen
    assert not group.scheduler.has_work


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (sequence(1, []), pb.REJECTION_REASON_INVALID, "empty"),
        (sequence(1, [61]), pb.REJECTION_REASON_INVALID, "out of the vocabulary"),
        (sequence(1, [1] * 200), pb.REJECTION_REASON_TOO_LONG, "maximum context length"),
        (sequence(1, [1], adapter="x"), pb.REJECTION_REASON_INVALID, "adapter"),
        (sequence(1, [1], resumed_tokens=1), pb.REJECTION_REASON_INVALID, "resumed_tokens"),
        (sequence(1, [1], top_logprobs=1 << 31), pb.REJECTION_REASON_INVALID, "top_logprobs"),
        (sequence(1, [1], max_tokens=0), pb.REJECTION_REASON_INVALID, "nothing to generate"),
    ],
)
async def test_bad_sequences_are_refused_and_nothing_runs(group: Group, message, reason, text: str) -> None:
    async with Gateway(group.address) as gateway:
        await gateway.submit(message)
        await gateway.until(lambda: gateway.rejections)
        assert gateway.rejections[0].reason == reason
        assert text in gateway.rejections[0].message
        assert group.executor.computed_tokens == 0


async def test_full_queue_and_draining_are_refused_with_retry_after(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        await gateway.submit(*(sequence(handle, [1], max_tokens=50) for handle in range(40)))
        await gateway.until(lambda: len(gateway.accepted) + len(gateway.rejections) == 40)
        assert {r.reason for r in gateway.rejections} == {pb.REJECTION_REASON_QUEUE_FULL}
        group.server.draining = True
        await gateway.submit(sequence(99, [1]))
        await gateway.until(lambda: gateway.rejections[-1].handles == [99])
        assert gateway.rejections[-1].reason == pb.REJECTION_REASON_DRAINING
        assert gateway.rejections[-1].retry_after.seconds == 1


async def test_engine_failure_ends_the_stream_and_is_reported(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, [1], max_tokens=150))
        await gateway.until(lambda: gateway.tokens)
        group.executor.broken = True
        with pytest.raises(grpc.aio.AioRpcError, match=r"rank 0 \(pid 1\) is gone"):
            await gateway.until(lambda: False)
        assert [str(f) for f in group.failures] == ["rank 0 (pid 1) is gone"]


async def test_hello_comes_first(group: Group) -> None:
    async with grpc.aio.insecure_channel(group.address) as channel:
        call = pb_grpc.WorkerGroupServiceStub(channel).Exchange()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(pb.ExchangeRequest(ping=pb.Ping(nonce=1)))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_deadline_ends_with_its_reason(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        message = sequence(1, [1], max_tokens=190)
        message.time_left.FromMilliseconds(100)
        await gateway.submit(message)
        await gateway.until(lambda: gateway.finishes)
        assert gateway.finishes[1].reason == generation_pb2.FINISH_REASON_CANCELLED
        assert "time ran out" in gateway.finishes[1].error_message


async def test_cached_tokens_are_reported_and_salts_and_siblings_kept_apart(group: Group) -> None:
    prompt = list(range(5, 38))  # four full blocks of 8, and one token
    async with Gateway(group.address) as gateway:
        for handle in (1, 2):
            await gateway.submit(sequence(handle, prompt, max_tokens=2))
            await gateway.until(lambda handle=handle: handle in gateway.finishes)
        await gateway.submit(sequence(3, prompt, max_tokens=2, cache_salt=b"other"))
        await gateway.until(lambda: 3 in gateway.finishes)
        assert gateway.cached == {1: 0, 2: 32, 3: 0}
        assert gateway.tokens[1] == gateway.tokens[2] == gateway.tokens[3]
    load = group.server.load
    assert (load.prefix_queries, load.prefix_hits) == (99, 32)


async def test_siblings_share_blocks_without_a_prefix_cache(group: Group) -> None:
    group.scheduler.config = msgspec.structs.replace(group.scheduler.config, enable_prefix_caching=False)
    group.scheduler.pool._keep = False
    prompt = list(range(5, 38))
    async with Gateway(group.address) as gateway:
        for first in (1, 11):
            family = [sequence(first + i, prompt, max_tokens=2, prompt_group=first, candidate=i) for i in range(3)]
            await gateway.submit(*family)
            await gateway.until(lambda first=first: {first, first + 1, first + 2} <= gateway.finishes.keys())
        assert gateway.cached == {1: 0, 2: 32, 3: 32, 11: 0, 12: 32, 13: 32}


async def test_cache_events_snapshot_then_changes(group: Group) -> None:
    prompt = list(range(5, 38))
    want, parent = [], root()
    for block in range(4):
        parent = extend(parent, pack(prompt[block * 8 : block * 8 + 8]))
        want.append(hint(parent))
    async with Gateway(group.address) as gateway, grpc.aio.insecure_channel(group.address) as channel:
        stub = pb_grpc.WorkerGroupServiceStub(channel)
        follow = stub.StreamCacheEvents(pb.StreamCacheEventsRequest())
        empty = await asyncio.wait_for(follow.read(), 5)
        assert (empty.snapshot, list(empty.stored_block_hashes)) == (True, [])
        await gateway.submit(sequence(1, prompt, max_tokens=2))
        await gateway.until(lambda: gateway.finishes)
        stored: list[int] = []
        while len(stored) < 4:
            change = await asyncio.wait_for(follow.read(), 5)
            assert not change.snapshot
            stored += change.stored_block_hashes
        assert stored == want
        late = stub.StreamCacheEvents(pb.StreamCacheEventsRequest())
        snapshot = await asyncio.wait_for(late.read(), 5)
        assert snapshot.snapshot
        assert set(snapshot.stored_block_hashes) == set(want)
        resumed = stub.StreamCacheEvents(pb.StreamCacheEventsRequest(after_sequence=snapshot.sequence))
        await gateway.submit(sequence(2, list(range(40, 49)), max_tokens=1))
        await gateway.until(lambda: 2 in gateway.finishes)
        change = await asyncio.wait_for(resumed.read(), 5)
        assert (change.snapshot, change.sequence, len(change.stored_block_hashes)) == (False, snapshot.sequence + 1, 1)
        for call in (follow, late, resumed):
            call.cancel()


async def test_what_came_before_an_engine_failure_is_still_told(group: Group) -> None:
    """A sequence that ended in the last good step has ended, not failed."""
    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, [1], max_tokens=150))
        await gateway.until(lambda: gateway.tokens)
        (session,) = group.server._sessions.values()
        keys = np.array([session.key(1)])
        last = StepDeltas(999, keys, np.ones(1, np.int32), np.array([7], np.int32), np.zeros(1, np.int32))
        last.finishes = [FinishNews(int(keys[0]), FinishReason.LENGTH)]
        group.server._deliver(last)
        group.server._deliver(EngineFailure("rank 0 is gone"))
        with pytest.raises(grpc.aio.AioRpcError, match="rank 0 is gone"):
            await gateway.until(lambda: False)
        assert gateway.finishes[1].reason == generation_pb2.FINISH_REASON_LENGTH


async def test_a_bug_in_the_reader_ends_the_stream(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is written but no longer read would leave its gateway waiting."""

    def bug(*_: object) -> None:
        raise RuntimeError("odd")

    async with Gateway(group.address) as gateway:
        monkeypatch.setattr(dataplane_server, "sequence_request", bug)
        await gateway.submit(sequence(1, [1]))
        with pytest.raises(grpc.aio.AioRpcError, match="RuntimeError: odd"):
            await gateway.until(lambda: False)
    await group.settled()


async def test_what_ends_after_its_stream_was_cut_is_open_no_more() -> None:
    session = dataplane_server.Session(1, 0)
    key = session.key(1)
    session.live.add(key)
    session.fail(Overloaded("the gateway reads too slowly"))
    none = np.zeros(0, np.int32)
    session.deliver(
        StepDeltas(9, np.zeros(0, np.int64), none, none, none), None, [], [FinishNews(key, FinishReason.LENGTH)]
    )
    assert not session.live


async def test_a_gateway_that_reads_too_slowly_is_cut(group: Group) -> None:
    async with Gateway(group.address) as gateway:
        await gateway.submit(sequence(1, [1], max_tokens=190))
        await gateway.until(lambda: gateway.tokens)
        (session,) = group.server._sessions.values()
        session.max_unsent = 0
        with pytest.raises(grpc.aio.AioRpcError, match="reads too slowly"):
            await gateway.until(lambda: False)
    await group.settled()

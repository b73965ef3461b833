"""The scheduler's rules one by one, on the fake executor."""

import numpy as np
import pytest
from engine.walk import alone, make_request, make_spec
from fakes.executor import FakeExecutor

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.errors import CapacityExceeded, ContextLengthExceeded, Overloaded
from nori_cluster.types import FinishReason, unpack

pytestmark = pytest.mark.unit


def make_core(depth: int = 1, *, budget: int = 64, seqs: int = 8, waiting: int = 100, **spec) -> EngineCore:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting_requests=waiting)
    group = make_spec(**spec)
    return EngineCore(Scheduler(config, group), FakeExecutor(group, seqs, depth))


def drain(core: EngineCore) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    outputs: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    for now in range(10_000):
        if not core.has_work:
            break
        deltas = core.step(float(now))
        if deltas is None:
            continue
        for key, token in zip(deltas.keys.tolist(), deltas.ids.tolist(), strict=True):
            outputs.setdefault(key, []).append(token)
        for finish in deltas.finishes:
            ends[finish.key] = finish.reason
    return outputs, ends


@pytest.mark.parametrize("depth", [1, 2])
def test_f16_context_limits(depth: int) -> None:
    """F16: max_model_len 64, budget 32. Refusals come at once, long prompts go through in chunks."""
    core = make_core(depth, budget=32, max_model_len=64, num_blocks=40, vocab_size=61)
    ids = [i % 50 + 5 for i in range(100_000)]
    core.submit(make_request(1, ids[:63], max_tokens=999, ignore_eos=True), 0.0)
    core.submit(make_request(2, ids[:40], max_tokens=1, ignore_eos=True), 0.0)
    core.submit(make_request(3, ids[:10], max_tokens=999, ignore_eos=True), 0.0)
    for length in (64, 65, 100_000):
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens"):
            core.submit(make_request(4, ids[:length], max_tokens=1), 0.0)
    outputs, ends = drain(core)
    assert [len(outputs[key]) for key in (1, 2, 3)] == [1, 1, 54]
    assert set(ends.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [1, 2])
def test_f30_capacity(depth: int) -> None:
    """F30: 8 blocks of 16. What can never fit is refused; what fills the cache ends with length; 20 prompts all end."""
    core = make_core(depth, budget=512, seqs=16, max_model_len=512, num_blocks=8, block_size=16)
    with pytest.raises(CapacityExceeded, match="holds 128 tokens"):
        core.submit(make_request(1, [7] * 200, max_tokens=4), 0.0)
    core.submit(make_request(2, [7] * 10, max_tokens=4, ignore_eos=True), 0.0)
    core.submit(make_request(3, [7] * 100, max_tokens=200, ignore_eos=True), 0.0)
    for key in range(10, 30):
        core.submit(make_request(key, [key] * 60, max_tokens=4, ignore_eos=True), 0.0)
    outputs, ends = drain(core)
    assert len(outputs[3]) == 29  # 128 tokens in the cache and one that needs no room
    assert [len(outputs[key]) for key in (2, *range(10, 30))] == [4] * 21
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert core.scheduler.pool.free == 8


def test_decodes_come_before_prefill_chunks_and_share_the_budget() -> None:
    core = make_core(budget=16, max_model_len=96, num_blocks=40)
    core.submit(make_request(1, [5] * 4, max_tokens=50, ignore_eos=True), 0.0)
    core.step(0.0)
    core.submit(make_request(2, [6] * 40, max_tokens=2, ignore_eos=True), 0.0)
    plan = core.scheduler.plan(1.0)
    assert plan is not None
    assert unpack(plan.counts).tolist() == [1, 15]


def test_order_key_decides_who_starts() -> None:
    core = make_core(seqs=1, num_blocks=40)
    for key, order in ((1, 5), (2, 1), (3, 1)):
        core.submit(make_request(key, [key], max_tokens=1, order_key=order), 0.0)
    order = []
    while core.has_work:
        deltas = core.step(0.0)
        order += [finish.key for finish in deltas.finishes] if deltas else []
    assert order == [2, 3, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_loses_nothing(depth: int) -> None:
    core = make_core(depth, seqs=3, num_blocks=8, block_size=16, max_model_len=200)
    requests = [make_request(key, range(16), max_tokens=90, seed=key, ignore_eos=True) for key in (1, 2, 3)]
    for request in requests:
        core.submit(request, 0.0)
    outputs, _ = drain(core)
    assert core.scheduler.preemptions > 0
    for request in requests:
        assert outputs[request.key] == alone(request, core.scheduler.spec)


def test_full_queue_is_refused() -> None:
    core = make_core(seqs=1, waiting=2)
    for key in range(2):
        core.submit(make_request(key, [1]), 0.0)
    with pytest.raises(Overloaded, match="queue is full") as refusal:
        core.submit(make_request(9, [1]), 0.0)
    assert refusal.value.retry_after


def test_deadline_ends_a_waiting_request_before_it_is_planned() -> None:
    core = make_core(seqs=1, num_blocks=40)
    core.submit(make_request(1, [1], max_tokens=20, ignore_eos=True), 0.0)
    core.submit(make_request(2, [2] * 8, deadline=5.0), 0.0)
    core.step(1.0)
    deltas = core.step(6.0)
    assert deltas is not None
    assert [(f.key, f.reason, bool(f.error)) for f in deltas.finishes] == [(2, FinishReason.CANCELLED, True)]
    drain(core)
    assert core.executor.computed_tokens == 20  # 1 prompt token and 19 outputs of request 1


def test_finish_names_the_stop_id_of_the_request_only() -> None:
    core = make_core(num_blocks=40)
    free = alone(make_request(1, [9, 4, 1], max_tokens=6, ignore_eos=True), core.scheduler.spec)
    assert len(set(free)) > 2
    stop = next(token for token in free if token != free[0])
    core.submit(make_request(1, [9, 4, 1], max_tokens=6, ignore_eos=True, stop_token_ids=(stop,)), 0.0)
    finishes = []
    ids: list[int] = []
    while core.has_work:
        deltas = core.step(0.0)
        assert deltas is not None
        finishes += deltas.finishes
        ids += deltas.ids.tolist()
    assert ids == free[: free.index(stop) + 1]
    assert finishes[0].matched_token_id == stop
    assert np.array_equal(core.scheduler.pool._references, np.zeros(40))


def test_what_left_leaves_nothing_behind() -> None:
    """Clients come and go while every slot is taken: neither the queue nor the deadlines keep its sequences."""
    core = make_core(seqs=1, waiting=4)
    core.submit(make_request(0, [7] * 8, max_tokens=50, ignore_eos=True), 0.0)
    core.step(0.0)
    for key in range(1, 1000):
        core.submit(make_request(key, [7] * 8, order_key=key, deadline=1e6), 0.0)
        core.abort(key)
        core.scheduler.check()
    assert len(core.scheduler.waiting._heap) < 100
    assert not core.scheduler._deadlines
    _, ends = drain(core)
    assert ends[0] is FinishReason.LENGTH and len(ends) == 1000

"""Rings and doorbells between real processes: order, wrap-around, frames too large for the ring, death of a rank."""

import multiprocessing
import os
import random
import signal
import time

import pytest
from worker.echo_worker import echo, try_wrong_token

from nori_cluster.config import ModelConfig
from nori_cluster.errors import CheckpointError, EngineFailure
from nori_cluster.types import StepPlan, pack
from nori_cluster.worker.channel import RING_BYTES, Listener, Ring, RingExecutor

pytestmark = pytest.mark.unit
SPAWN = multiprocessing.get_context("spawn")


def make_plan(step: int, size: int = 4) -> StepPlan:
    return StepPlan(step=step, drops=b"", starts=(), slots=pack([step]), counts=bytes(size), blocks=())


@pytest.fixture
def group():
    listener = Listener()
    workers = [SPAWN.Process(target=echo, args=(listener.address, listener.token, rank)) for rank in range(2)]
    for worker in workers:
        worker.start()
    executor = listener.accept(2, timeout=30.0)
    yield executor
    executor.close()
    for worker in workers:
        worker.join(0 if getattr(executor, "stuck", False) else 10)
        if getattr(executor, "stuck", False):
            worker.kill()
            worker.join(10)
        assert not worker.is_alive(), "a worker outlived its engine process"


def test_ring_against_a_list() -> None:
    rng = random.Random(0)
    ring = Ring(2)
    pending: list[list[bytes]] = [[], []]
    refused = 0
    for _ in range(4000):
        if rng.random() < 0.55:
            frame = rng.randbytes(rng.choice((0, 1, 100, 10_000, 700_000)))
            if ring.write(frame):
                for queue in pending:
                    queue.append(frame)
            else:
                refused += 1
        reader = rng.randrange(2)
        if pending[reader] and rng.random() < 0.8:
            assert ring.read(reader) == pending[reader].pop(0)
    assert refused
    assert not ring.write(bytes(RING_BYTES))
    ring.close()


def test_plans_and_results_in_order(group: RingExecutor) -> None:
    sizes = [4, 1000, RING_BYTES // 3, 0, RING_BYTES + 5, RING_BYTES // 2, 7]
    for step, size in enumerate(sizes):
        group.submit(make_plan(step, size))
        if step % 2:
            continue
        for done in range(max(step - 1, 0), step + 1):
            result = group.collect()
            assert (result.step, len(result.ids)) == (done, sizes[done])


def test_failing_rank_is_named(group: RingExecutor) -> None:
    group.submit(make_plan(13))
    with pytest.raises(EngineFailure, match="rank 1 failed: ValueError: thirteen"):
        while True:
            group.collect()


def test_dead_rank_is_named(group: RingExecutor) -> None:
    group.submit(make_plan(14))
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+\) is gone"):
        while True:
            group.collect()


def test_a_stopped_rank_is_named_while_another_waits_for_it(group: RingExecutor) -> None:
    group.stuck = True  # type: ignore[attr-defined]
    group.heartbeat_timeout = 1.0
    group.submit(make_plan(0))
    group.collect()
    group.check()
    os.kill(group.pids[1], signal.SIGSTOP)
    group.submit(make_plan(16))
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+\) gave no sign of life for [12]\.\d s; it"):
        group.collect()


def test_a_rank_that_stops_while_idle_is_noticed(group: RingExecutor) -> None:
    group.stuck = True  # type: ignore[attr-defined]
    group.heartbeat_timeout = 0.8
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(EngineFailure, match=r"rank 0 \(pid \d+\) gave no sign of life"):
        for _ in range(100):
            group.check()
            time.sleep(0.05)


def test_a_rank_that_dies_while_idle_is_noticed(group: RingExecutor) -> None:
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid \d+\) is gone; it has done no step"):
        for _ in range(100):
            group.check()
            time.sleep(0.05)


def test_a_step_that_never_ends_is_given_up(group: RingExecutor) -> None:
    """All ranks beat, none comes back: a deadlock."""
    group.stuck = True  # type: ignore[attr-defined]
    group.step_timeout = 0.7
    group.submit(make_plan(15))
    with pytest.raises(
        EngineFailure, match=r"step 0 took more than 0.7 s; rank 0 \(pid \d+\), rank 1 .*: it is in step 0"
    ):
        group.collect()


def named(path: str) -> ModelConfig:
    return ModelConfig(name="m", path=path)


def test_every_rank_loads_between_two_steps(group: RingExecutor) -> None:
    for step, path in enumerate(("first", "second")):
        group.submit(make_plan(step))
        group.collect()
        spec = group.reload(named(path), timeout=30.0)
        assert (spec.weights_id, spec.numerics_id) == (path, "" if step == 0 else "first")
    group.submit(make_plan(2))
    assert group.collect().step == 2


def test_what_one_rank_refuses_no_rank_loads(group: RingExecutor) -> None:
    with pytest.raises(CheckpointError, match="rank 1: odd: hidden_size is 3"):
        group.reload(named("odd"), timeout=30.0)
    assert group.reload(named("even"), timeout=30.0).numerics_id == ""
    group.submit(make_plan(0))
    assert group.collect().step == 0


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("broken", "rank 1 failed: OSError: cannot be read"),
        ("deadly", r"rank 1 \(pid \d+\) is gone"),
        ("endless", r"ranks \[0, 1\] did not load endless in time"),
    ],
)
def test_a_rank_that_fails_to_load_is_lost(group: RingExecutor, path: str, reason: str) -> None:
    group.stuck = path == "endless"  # type: ignore[attr-defined]
    with pytest.raises(EngineFailure, match=reason):
        group.reload(named(path), timeout=0.7 if path == "endless" else 30.0)


def test_missing_rank_is_named() -> None:
    with pytest.raises(EngineFailure, match=r"ranks \[0\] did not connect"):
        Listener().accept(1, timeout=0.2)


def test_a_stranger_is_not_let_in() -> None:
    listener = Listener()
    worker = SPAWN.Process(target=try_wrong_token, args=(listener.address,))
    worker.start()
    with pytest.raises(EngineFailure, match="did not connect"):
        listener.accept(1, timeout=3.0)
    worker.join(10)
    assert worker.exitcode == 0

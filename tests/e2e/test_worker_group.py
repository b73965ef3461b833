"""A worker group whose start fails, on the session's Ray: the error is the rank's own, and nothing is left."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from fakes.checkpoints import make_tiny_llama
from ray.util.placement_group import placement_group_table

from nori_cluster.cluster import processes
from nori_cluster.cluster.launch import Cluster
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig
from nori_cluster.errors import CheckpointError, EngineFailure, NoriError

pytestmark = pytest.mark.e2e


def group_of(folder: Path, **rest) -> WorkerGroup:
    config = GroupConfig(
        model=ModelConfig(name="tiny", path=str(folder), dtype="float32"),
        cache=CacheConfig(num_blocks=8),
        parallel=ParallelConfig(device="cpu", threads=1),
    )
    return WorkerGroup("other-0", 1, config, host="127.0.0.1", port=0, router="127.0.0.1:1", **rest)


def failure_of(group: WorkerGroup) -> tuple[NoriError, set[int]]:
    """What start raised, and the processes that were there when it did, the cluster's left out."""

    async def start() -> tuple[NoriError, set[int]]:
        before = set(processes.descendants(os.getpid()))
        try:
            await group.start()
        except NoriError as error:
            return error, {*processes.descendants(os.getpid())} - before
        finally:
            group.kill()
        raise AssertionError("it started")

    return asyncio.run(start())


def test_a_rank_that_cannot_load_is_the_reason_and_all_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "broken")
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:100])
    group = group_of(folder)
    error, started = failure_of(group)
    assert type(error) is CheckpointError
    assert "safetensors" in error.message
    assert set(group.pids) <= started
    deadline = time.monotonic() + 10
    while any(map(processes.is_alive, group.pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(processes.is_alive, group.pids))
    assert group._placement is not None
    assert placement_group_table(group._placement)["state"] == "REMOVED"
    group.kill()  # again does no harm
    assert cluster.ready_groups == 2


def test_a_group_that_takes_too_long_says_so(cluster: Cluster, tmp_path: Path) -> None:
    error, _ = failure_of(group_of(make_tiny_llama(tmp_path / "tiny"), start_timeout=0.05))
    assert type(error) is EngineFailure
    assert error.message == "other-0 did not start within 0.05 s"

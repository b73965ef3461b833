"""One cluster for the whole session: two groups × TP 2 of a tiny model, real Ray, real sockets, one gateway."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.checkpoints import make_tiny_llama

from nori_cluster.cluster import processes
from nori_cluster.cluster.launch import Cluster
from nori_cluster.config import (
    CacheConfig,
    ClusterConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    Ports,
    SchedulerConfig,
    SpeculativeConfig,
)
from nori_cluster.rpc.admin import AdminClient

ANY_PORTS = Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)


@pytest.fixture(scope="session")
def cluster(tiny_folder: Path) -> Iterator[Cluster]:
    group = GroupConfig(
        model=ModelConfig(name="tiny", path=str(tiny_folder), dtype="float32"),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256),
        parallel=ParallelConfig(tensor_parallel_size=2, device="cpu", threads=1, heartbeat_timeout=2.0),
        numerics=NumericsConfig(batch_invariant=True),  # so that streams that move say exactly the same
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1),
    )
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    before = set(processes.descendants(os.getpid()))
    cluster = Cluster(ClusterConfig(group=group, replicas=2, ports=ANY_PORTS, drain_timeout=10.0))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
        left = [pid for pid in processes.descendants(os.getpid()) if pid not in before and processes.is_alive(pid)]
        spared = bystander.poll() is None
        bystander.kill()
        bystander.wait()
        assert not left, "processes outlived the cluster"
        assert spared, "the stop ended a process that is not the cluster's"


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.http_url, timeout=60.0) as client:
        yield client


@pytest.fixture
def groups(cluster: Cluster) -> "Groups":
    return Groups(cluster)


class Groups:
    """The groups as `nori status` sees them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def events(self) -> list[Any]:
        with AdminClient(self.cluster.admin_address) as admin:
            return list(admin.events())

    def drain(self, name: str, grace: float) -> Any:
        """The operation at its end."""
        with AdminClient(self.cluster.admin_address) as admin:
            return admin.wait_operation(admin.drain(name, grace).name, 20.0)

    def resume(self, name: str) -> None:
        with AdminClient(self.cluster.admin_address) as admin:
            admin.resume(name)

    def read(self) -> list[Any]:
        with AdminClient(self.cluster.admin_address) as admin:
            return list(admin.list_groups())

    def until(self, condition: Any, seconds: float, what: str) -> list[Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition(groups := self.read()):
                return groups
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {what}; groups: {self.read()}")

    def until_idle(self, seconds: float = 1.0) -> None:
        """No sequence anywhere, and every block free."""
        self.until(
            lambda groups: all(
                g.load.running_sequences == g.load.waiting_sequences == 0
                and g.load.free_kv_blocks == g.load.total_kv_blocks
                for g in groups
            ),
            seconds,
            "all groups idle",
        )

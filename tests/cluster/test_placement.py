"""Room for a group, in numbers."""

import random
from pathlib import Path

import pytest

from nori_cluster.cluster import placement
from nori_cluster.cluster.placement import GROUPS_A_HOST, check_replicas, disk_shortfall, logical_cpus, shortfall
from nori_cluster.config import ClusterConfig, GroupConfig, ModelConfig, Ports
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit

CONFIG = ClusterConfig(group=GroupConfig(model=ModelConfig(name="m", path="/m")))


def test_f45_two_nodes_with_one_each_do_not_hold_a_group_of_two() -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    nodes = {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 2.0, "GPU": 1.0}}
    want = "needs {CPU: 3, GPU: 2} on one node, the largest free is {CPU: 8, GPU: 1}"
    assert shortfall(bundles, nodes) == want
    assert shortfall(bundles, nodes | {"c": {"CPU": 3.0, "GPU": 2.0}}) is None
    assert shortfall([{"TPU": 1.0}], nodes) == "needs {TPU: 1} on one node, the largest free is {TPU: 0}"
    assert shortfall([{"CPU": 1.0}], {}) == "needs {CPU: 1} on one node, and there is no node"


@pytest.mark.parametrize("seed", range(50))
def test_it_says_no_exactly_when_no_node_alone_has_all(seed: int) -> None:
    rng = random.Random(seed)
    bundles = [{kind: float(rng.randint(1, 3)) for kind in ("CPU", "GPU")} for _ in range(rng.randint(1, 3))]
    free = {name: {kind: float(rng.randint(0, 9)) for kind in ("CPU", "GPU")} for name in "abc"}
    need = {kind: sum(bundle[kind] for bundle in bundles) for kind in ("CPU", "GPU")}
    fits = any(all(node[kind] >= need[kind] for kind in need) for node in free.values())
    assert (shortfall(bundles, free) is None) == fits


def test_a_host_has_ports_for_sixteen_groups() -> None:
    for count in (1, GROUPS_A_HOST):
        check_replicas(CONFIG, count)
    with pytest.raises(ConfigError, match=r"at most 16 groups \(ports 50100 to 50115\), not 17"):
        check_replicas(CONFIG, 17)
    with pytest.raises(ConfigError, match="at most 16 groups, not 99"):
        check_replicas(ClusterConfig(group=CONFIG.group, ports=Ports(dataplane=0)), 99)
    with pytest.raises(ConfigError, match="at least 1 group, not 0"):
        check_replicas(CONFIG, 0)


def test_ports_beyond_the_last_or_of_another_service_are_refused() -> None:
    high = ClusterConfig(group=CONFIG.group, ports=Ports(dataplane=65530))
    check_replicas(high, 6)
    with pytest.raises(ConfigError, match="7 groups need data-plane ports 65530 to 65536, the last is 65535"):
        check_replicas(high, 7)
    near = ClusterConfig(group=CONFIG.group, ports=Ports(dataplane=50048, grpc=50051))
    check_replicas(near, 3)
    with pytest.raises(ConfigError, match="4 groups need data-plane ports 50048 to 50051, and 50051 is that of grpc"):
        check_replicas(near, 4)


def test_the_logical_cpus_hold_every_group_that_has_a_port() -> None:
    for size in (1, 2, 8):
        bundles = [{"CPU": 1.0}] * (1 + size) * GROUPS_A_HOST
        assert shortfall(bundles, {"here": {"CPU": float(logical_cpus(size))}}) is None


def test_a_disk_with_room_and_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_shortfall(tmp_path) is None
    assert disk_shortfall(tmp_path / "gone") is None, "that is another matter"
    monkeypatch.setattr(placement, "LOG_BYTES", 1 << 60)
    assert disk_shortfall(tmp_path) == f"needs {1 << 40} MiB in {tmp_path} for its logs, and the disk is full"

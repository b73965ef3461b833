"""How `nori serve` looks after its controller, without Ray: the calls that reach it are answered here."""

from typing import Any

import pytest

from nori_cluster.cluster import launch
from nori_cluster.cluster.launch import Cluster
from nori_cluster.config import ClusterConfig, GroupConfig, ModelConfig
from nori_cluster.errors import ConfigError, EngineFailure

pytestmark = pytest.mark.unit

CONFIG = ClusterConfig(group=GroupConfig(model=ModelConfig(name="m", path="/m")))


class WatchedCluster(Cluster):
    """alive: whether the controller answers. bad_starts: how many of the next ones do not start."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.alive = True
        self.bad_starts = self.started = 0

    def _check_gateway(self) -> None:
        pass

    def _ask(self, method: str, *args: Any, timeout: float = 30.0) -> Any:
        if not self.alive:
            raise EngineFailure("the controller died")

    def _end_controller(self) -> None:
        self.alive = False

    def _spawn_controller(self) -> str:
        self.started += 1
        if self.bad_starts:
            self.bad_starts -= 1
            raise EngineFailure("the controller did not start")
        self.alive = True
        return "router"


def test_a_controller_that_answers_is_left_alone() -> None:
    cluster = WatchedCluster()
    cluster.look()
    assert cluster.started == 0


def test_a_lost_one_is_replaced_until_it_is_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, now = WatchedCluster(), 0.0
    monkeypatch.setattr(launch.time, "monotonic", lambda: now)
    for number in range(20):  # one each 16 s: for ever
        now = number * 16.0
        cluster.alive = False
        cluster.look()
        assert cluster.started == number + 1
    with pytest.raises(EngineFailure, match="lost 5 times in 60 s: the controller died"):
        for _ in range(5):
            cluster.alive = False
            cluster.look()
    assert cluster.started <= 24


def test_one_that_does_not_start_counts_as_another_death() -> None:
    cluster = WatchedCluster()
    cluster.alive, cluster.bad_starts = False, 3
    cluster.look()
    assert cluster.started == 4
    cluster.alive, cluster.bad_starts = False, 99
    with pytest.raises(EngineFailure, match="5 times"):
        cluster.look()
    assert cluster.started == 4


def test_more_groups_than_ports_are_refused_before_anything_starts() -> None:
    config = ClusterConfig(group=CONFIG.group, replicas=17)
    with pytest.raises(ConfigError, match="at most 16 groups"):
        Cluster(config).start()

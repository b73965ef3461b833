"""A cluster without processes: what the command line sees of cluster.launch.Cluster, with a journal of calls."""

from collections.abc import Callable
from typing import ClassVar

from nori_cluster.config import ClusterConfig
from nori_cluster.errors import EngineFailure


class FakeCluster:
    """A test makes a subclass with its own journal. on_wait: what wait() does and returns; on_drain: during a drain."""

    journal: ClassVar[list[str]] = []
    configs: ClassVar[list[ClusterConfig]] = []
    url: ClassVar[str] = "http://127.0.0.1:8000"
    on_wait: ClassVar[Callable[[], int]] = staticmethod(lambda: 0)
    on_drain: ClassVar[Callable[[], int]] = staticmethod(lambda: 0)
    fail_start: ClassVar[bool] = False

    def __init__(self, config: ClusterConfig, *, on_phase: Callable[[str], None]) -> None:
        self.configs.append(config)
        self.on_phase = on_phase
        self.http_url = self.url
        self.grpc_address = "127.0.0.1:50051"
        self.metrics_url = "http://127.0.0.1:9090/metrics"
        self.admin_address = "127.0.0.1:8001"

    def start(self) -> None:
        self.on_phase("starting [Ray]")
        self.journal.append("start")
        if self.fail_start:
            raise EngineFailure("group 0 ended while it loaded: rank 1 was killed")

    def wait(self) -> int:
        self.journal.append("wait")
        return type(self).on_wait()

    def stop(self, drain_timeout: float | None = None) -> None:
        self.journal.append(f"stop {drain_timeout:g}")
        if drain_timeout:
            type(self).on_drain()

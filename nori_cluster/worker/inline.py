"""An Executor that runs one Worker in the calling process: for LLM(...).generate and tests. No socket, no Ray."""

from collections import deque

from nori_cluster.checkpoint.progress import Progress
from nori_cluster.config import GroupConfig, ModelConfig
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.errors import ConfigError
from nori_cluster.types import GroupSpec, StepPlan, StepResult
from nori_cluster.worker.worker import Worker


class InlineExecutor:
    """submit computes at once; collect hands out the oldest result. Needs worker.load() to have run."""

    depth = 1
    chains = True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        result = self.worker.execute(plan)
        assert result is not None, "the only rank is rank 0"
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    def check(self) -> None: ...

    def reload(self, model: ModelConfig) -> GroupSpec:
        """Other weights; only while no result is awaited. CheckpointError or ConfigError: nothing was touched."""
        assert not self._results
        self.worker.check_reload(model)
        return self.worker.reload(model)

    def close(self) -> None:
        self._results.clear()


def solo_worker(config: GroupConfig) -> Worker:
    """A worker of a group of one. ConfigError when the config asks for more ranks."""
    if config.parallel.tensor_parallel_size != 1:
        raise ConfigError(
            f"in this process only tensor_parallel_size 1 works, not {config.parallel.tensor_parallel_size}; "
            "use `nori serve` for more",
            param="tensor_parallel_size",
        )
    return Worker(config, SoloGroup())


def load_inline(config: GroupConfig, progress: Progress | None = None) -> tuple[InlineExecutor, GroupSpec]:
    """A loaded worker as an executor, and what it serves."""
    worker = solo_worker(config)
    spec = worker.load(progress)
    return InlineExecutor(worker), spec

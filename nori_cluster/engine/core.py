"""One engine step in four verbs: plan → submit → collect → apply. Synchronous, one thread, no clock of its own."""

from typing import Protocol

from nori_cluster.engine.plan import StepDeltas
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import EngineFailure
from nori_cluster.types import GroupSpec, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans on the workers of a group. depth: how many may be in flight.

    chains: whether one sequence may stand in two plans in flight (tensor parallel yes, pipeline parallel no).
    """

    depth: int
    chains: bool

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every worker; does not wait for it."""

    def collect(self) -> StepResult:
        """The oldest plan's result; blocks. EngineFailure when a worker is lost."""

    def check(self) -> None:
        """Called now and then while nothing is in flight. EngineFailure when a worker is lost."""

    def close(self) -> None: ...


class EngineCore:
    """A Scheduler and an Executor joined at pipeline depth `executor.depth`."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        assert executor.chains, "a scheduler that keeps a sequence out of two plans in flight is not built yet"
        self.scheduler = scheduler
        self.executor = executor

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: SequenceRequest, now: float) -> None:
        self.scheduler.submit(request, now)

    def abort(self, key: int, retryable: bool = False, reason: str = "") -> None:
        self.scheduler.abort(key, retryable, reason)

    def renew(self, spec: GroupSpec) -> StepDeltas | None:
        """The workers hold other weights; only without work. News of what the cache forgot."""
        return self.scheduler.renew(spec)

    def check(self) -> None:
        """While idle: EngineFailure when a worker is lost."""
        self.executor.check()

    def step(self, now: float) -> StepDeltas | None:
        """Fill the pipeline, take one result. None when there was nothing to do. EngineFailure ends the group."""
        while self.scheduler.num_in_flight < self.executor.depth:
            plan = self.scheduler.plan(now)
            if plan is None:
                break
            self.executor.submit(plan)
        if not self.scheduler.num_in_flight:
            news = self.scheduler.take_news()
            assert news is not None or not self.scheduler.has_work, "work is waiting, but nothing can be planned"
            return news
        result = self.executor.collect()
        if result.error:
            raise EngineFailure(result.error)
        return self.scheduler.apply(result, now)

"""The step thread of an engine process: takes commands from one inbox, steps the core, hands news to one outbox.

asyncio stays on the other side: commands arrive by `post` from any thread, news leave through `deliver`, a callable
that must not block (the data-plane server hands it over with call_soon_threadsafe).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.plan import StepDeltas
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import EngineFailure, NoriError, Overloaded
from nori_cluster.types import GroupSpec

_RATE_WINDOW = 5.0  # seconds over which tokens/s is averaged


class Submitted(msgspec.Struct, frozen=True):
    """What became of one Submit: keys in the order given; refused ones with the reason."""

    accepted: Sequence[int]
    refused: Sequence[tuple[int, NoriError]]


class Load(msgspec.Struct, frozen=True):
    """Load of the engine. pending_since: monotonic time at which the step in progress began (None when idle)."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    tokens_per_second: float = 0.0
    generated_tokens: int = 0
    preemptions: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evictions: int = 0
    pending_since: float | None = None


News = Submitted | StepDeltas | EngineFailure
Command = Callable[[], News | None]


class EngineThread:
    """Owns the EngineCore from `start` on; nothing else touches it."""

    def __init__(self, core: EngineCore, deliver: Callable[[News], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._inbox: deque[Command] = deque()
        self._bell = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nori-engine", daemon=True)
        self._pending_since: float | None = None
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._load = Load(free_blocks=core.scheduler.pool.free)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End after the step in progress; what still runs is dropped."""
        self._stopping = True
        self._bell.set()
        self._thread.join(timeout)

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Any thread. The answer is a Submitted through `deliver`."""
        self._post(lambda: self._submit(requests))

    def abort(self, keys: Sequence[int], retryable: bool = False, reason: str = "") -> None:
        """Any thread. Each key that still lives ends with a FinishNews. retryable: it may go on in another group."""
        self._post(lambda: self._abort(keys, retryable, reason))

    def reload(self, load: Callable[[], GroupSpec]) -> Future[GroupSpec]:
        """Any thread. Between two steps, while there is no work: `load` puts other weights on the workers.

        The future holds what it returned or raised; an EngineFailure also ends the engine.
        """
        future: Future[GroupSpec] = Future()
        self._post(lambda: self._reload(load, future))
        return future

    @property
    def load(self) -> Load:
        """The latest load; readable from any thread."""
        return msgspec.structs.replace(self._load, pending_since=self._pending_since)

    def _post(self, command: Command) -> None:
        self._inbox.append(command)
        self._bell.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._core.has_work:
                    self._measure()
                    self._core.check()
                    self._bell.wait(0.5)  # so that a lost worker is noticed, and tokens/s falls to 0, while idle
                    self._bell.clear()
                    continue
                self._pending_since = time.monotonic()
                deltas = self._core.step(self._pending_since)
                self._pending_since = None
                self._measure()
                if deltas is not None:
                    self._deliver(deltas)
        except EngineFailure as failure:
            self._deliver(failure)
        except Exception as bug:  # noqa: BLE001 - the group is lost; its owner must hear why
            self._deliver(EngineFailure(f"the engine failed: {type(bug).__name__}: {bug}"))

    def _take_commands(self) -> None:
        while self._inbox:
            news = self._inbox.popleft()()
            if news is not None:
                self._deliver(news)

    def _submit(self, requests: Sequence[SequenceRequest]) -> Submitted:
        accepted, refused, now = [], [], time.monotonic()
        for request in requests:
            try:
                self._core.submit(request, now)
            except NoriError as error:
                refused.append((request.key, error))
            else:
                accepted.append(request.key)
        return Submitted(accepted, refused)

    def _abort(self, keys: Sequence[int], retryable: bool, reason: str) -> None:
        for key in keys:
            self._core.abort(key, retryable, reason)

    def _reload(self, load: Callable[[], GroupSpec], future: Future[GroupSpec]) -> StepDeltas | None:
        if not future.set_running_or_notify_cancel():
            return None  # nobody waits for it any more; from here on it cannot be cancelled
        try:
            if self._core.has_work:
                raise Overloaded("sequences of the group still run")
            spec = load()
            deltas = self._core.renew(spec)
        except Exception as error:
            future.set_exception(error)
            if isinstance(error, NoriError) and not isinstance(error, EngineFailure):
                return None
            raise
        future.set_result(spec)
        return deltas

    def _measure(self) -> None:
        scheduler, now = self._core.scheduler, time.monotonic()
        if now - self._marks[-1][0] > 0.25:
            self._marks.append((now, scheduler.generated_tokens))
            while now - self._marks[0][0] > _RATE_WINDOW:
                self._marks.popleft()
        then, count = self._marks[0]
        self._load = Load(
            step=scheduler.step,
            running=scheduler.num_running,
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            free_blocks=scheduler.pool.free,
            tokens_per_second=(scheduler.generated_tokens - count) / max(now - then, 1.0),
            generated_tokens=scheduler.generated_tokens,
            preemptions=scheduler.preemptions,
            proposed_drafts=scheduler.proposed_drafts,
            accepted_drafts=scheduler.accepted_drafts,
            prefix_queries=scheduler.pool.index.queries,
            prefix_hits=scheduler.pool.index.hits,
            evictions=scheduler.pool.evictions,
        )

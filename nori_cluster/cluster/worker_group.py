"""One incarnation of a worker group: its placement group, engine process and ranks. Replaced, never repaired."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nori_cluster.cluster import processes
from nori_cluster.cluster.actors import DIED, expected, named_actor
from nori_cluster.cluster.engine_process import EngineProcess, EngineStatus
from nori_cluster.cluster.placement import Unplaceable, shortfall
from nori_cluster.cluster.rank_actor import RankActor
from nori_cluster.cluster.state import RunningGroup
from nori_cluster.config import GroupConfig, ModelConfig
from nori_cluster.errors import EngineFailure, NoriError
from nori_cluster.types import GroupSpec

log = logging.getLogger(__name__)

VERDICT_SECONDS = 0.5
PLACE_SECONDS = 10.0  # Ray frees the resources of a removed group within a second or two; nobody else will do more
ADOPT_SECONDS = 3.0  # an engine process that serves answers sooner
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


class WorkerGroup:
    """start, then watch; kill at the end, whatever happened. Owned by the controller."""

    def __init__(
        self,
        group_id: str,
        incarnation: int,
        config: GroupConfig,
        *,
        host: str,
        port: int,
        router: str,
        start_timeout: float = 600.0,
    ) -> None:
        self.group_id = group_id
        self.incarnation = incarnation
        self.config = config
        self.address = ""
        self.spec: GroupSpec | None = None  # once the ranks have loaded
        self.pids: list[int] = []  # of the ranks
        self.created = time.time()
        self.engine_pid = 0
        self.host = host
        self._port = port
        self._router = router
        self._start_timeout = start_timeout
        self._placement: PlacementGroup | None = None
        self._engine: Any = None
        self._ranks: list[Any] = []
        self._serving: list[Any] = []  # object refs of the ranks' serve

    async def start(self) -> str:
        """Bring up all processes; returns the data plane's address. NoriError says which process failed and why."""
        try:
            async with asyncio.timeout(self._start_timeout):
                await self._place()
                await self._join()
                await self._serve()
        except RayError as error:
            raise expected(error) from error
        except TimeoutError:
            raise EngineFailure(f"{self.group_id} did not start within {self._start_timeout:g} s") from None
        return self.address

    async def _place(self) -> None:
        device = self.config.parallel.device
        bundle = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        size = self.config.parallel.tensor_parallel_size
        bundles = [{"CPU": 1.0}, *([bundle] * size)]
        self._placement = placement_group(bundles, strategy="STRICT_PACK", name=self._id, lifetime="detached")
        await self._placed(self._placement, bundles)
        engine = ray.remote(EngineProcess).options(**self._options(0, "engine"), max_concurrency=100)
        self._engine = engine.remote(self.group_id, self.incarnation, self.config)
        for rank in range(size):
            gpus = {"num_gpus": 1} if device == "cuda" else {}
            actor = ray.remote(RankActor).options(**self._options(1 + rank, f"rank-{rank}"), **gpus)
            self._ranks.append(actor.remote(rank, self.config, self.host))

    async def _placed(self, placement: PlacementGroup, bundles: list[dict[str, float]]) -> None:
        """Returns once it has its resources; Unplaceable when there is no room for it for PLACE_SECONDS."""
        deadline = time.monotonic() + PLACE_SECONDS
        while not await asyncio.to_thread(placement.wait, 1):
            if time.monotonic() > deadline and (missing := shortfall(bundles, available_resources_per_node())):
                raise Unplaceable(missing)

    def _options(self, bundle: int, process: str) -> dict[str, Any]:
        """Detached and named: the group outlives the controller, and the next one finds it."""
        assert self._placement is not None
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        return {
            "name": f"{self._id}/{process}",
            "lifetime": "detached",
            "num_cpus": 1,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }

    @property
    def _id(self) -> str:
        return f"{self.group_id}#{self.incarnation}"

    def running(self) -> RunningGroup:
        """What `adopt` of another controller needs, once the group serves."""
        return RunningGroup(
            name=self.group_id,
            incarnation=self.incarnation,
            address=self.address,
            engine_pid=self.engine_pid,
            pids=tuple(self.pids),
            created=self.created,
            spec=self.spec,
        )

    async def adopt(self, running: RunningGroup) -> bool:
        """Instead of start: hold a group that another controller started. False when not all of it is there and
        answers; then kill it. Its streams notice neither."""
        self.address, self.engine_pid, self.pids = running.address, running.engine_pid, list(running.pids)
        self.created, self.spec = running.created, running.spec
        try:
            self._placement = get_placement_group(self._id)
            self._engine = named_actor(f"{self._id}/engine")
            self._ranks = [named_actor(f"{self._id}/rank-{rank}") for rank in range(len(self.pids))]
            async with asyncio.timeout(ADOPT_SECONDS):
                status: EngineStatus = await self._engine.status.remote()
        except (NoriError, RayError, TimeoutError, ValueError) as error:
            log.warning("group %s is not whole: %s", self._id, str(error) or "its engine process does not answer")
            return False
        self._serving = [rank.ended.remote() for rank in self._ranks]
        return status.pid == self.engine_pid and all(map(processes.is_alive, self._local_pids()))

    async def _join(self) -> None:
        alone = len(self._ranks) == 1
        port = 0 if alone else await self._ranks[0].rendezvous.remote()
        self.pids = list(await asyncio.gather(*(r.join.remote(port, self.incarnation) for r in self._ranks)))

    async def _serve(self) -> None:
        specs = await asyncio.gather(*(rank.load.remote() for rank in self._ranks))
        if any(spec != specs[0] for spec in specs):
            raise EngineFailure(f"the ranks of {self.group_id} disagree about the model: {specs}")
        self.spec = specs[0]
        address, token = await self._engine.listen.remote()
        self._serving = [rank.serve.remote(address, token) for rank in self._ranks]
        self.address = await self._engine.serve.remote(specs[0], self.host, self._port, self._router, 60.0)
        status: EngineStatus = await self._engine.status.remote()
        self.engine_pid = status.pid

    async def watch(self) -> str:
        """Returns why the group is lost, once any of its processes ended."""
        verdict = asyncio.ensure_future(_ended(self._engine.watch.remote()))
        names = {
            verdict: f"engine process (pid {self.engine_pid})",
            asyncio.ensure_future(self._silence()): f"engine process (pid {self.engine_pid})",
        }
        for rank, serving in enumerate(self._serving):
            names[asyncio.ensure_future(_ended(serving))] = f"rank {rank} (pid {self.pids[rank]})"
        try:
            done, _ = await asyncio.wait(names, return_when="FIRST_COMPLETED")
            if verdict not in done:  # it sees more than an end: who was first, and in which step
                await asyncio.wait({verdict}, timeout=VERDICT_SECONDS)
            if verdict.done() and not verdict.result().startswith(DIED):
                return f"{verdict.result()} [{self.host}]"
            first = next(task for task in names if task.done())
            return f"{names[first]}: {first.result()} [{self.host}]"
        finally:
            for task in names:
                task.cancel()

    async def _silence(self) -> str:
        """Returns once the engine process answers no more (stopped, or its loop is stuck)."""
        limit = self.config.parallel.heartbeat_timeout
        while True:
            try:
                async with asyncio.timeout(limit):
                    await self._engine.status.remote()
            except TimeoutError:
                return f"gave no answer for {limit:g} s"
            except RayError as error:
                return expected(error).message
            await asyncio.sleep(limit / 5)

    async def resume(self) -> ModelConfig:
        """Take new work again after a drain, and a reload that still runs; what it serves then. EngineFailure when the
        group is lost."""
        try:
            model: ModelConfig = await self._engine.resume.remote()
        except RayError as error:
            raise expected(error, "the engine process") from error
        self.config = msgspec.structs.replace(self.config, model=model)
        return model

    async def drain(self, timeout: float, hand_over: bool = False) -> int:
        """Sequences left after at most `timeout` seconds without new ones; hand_over: they move to other groups then.
        EngineFailure when the group is lost."""
        try:
            left: int = await self._engine.drain.remote(timeout, hand_over)
        except RayError as error:
            raise expected(error, "the engine process") from error
        return left

    async def abort(self, reason: str) -> int:
        """End what runs of a drained group; sequences left all the same. EngineFailure when the group is lost."""
        try:
            left: int = await self._engine.abort.remote(reason)
        except RayError as error:
            raise expected(error, "the engine process") from error
        return left

    async def reload(self, model: ModelConfig, timeout: float) -> None:
        """Other weights, in place, of a drained group. EngineFailure when it is lost over it; other NoriErrors when
        they cannot be loaded: it holds those it had."""
        try:
            self.spec = await self._engine.reload.remote(model, timeout)
        except RayError as error:
            raise expected(error, "the engine process") from error
        self.config = msgspec.structs.replace(self.config, model=model)

    async def stop(self) -> None:
        """The orderly part of an end: the group leaves the router's table and hangs up on its ranks. kill follows."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(5.0):
                await self._engine.stop.remote()

    def kill(self) -> None:
        """End every process and give the placement group back. Safe in any state.

        Ray asks a process to end; a stopped one would not hear it, so those of this host are killed as well.
        """
        for actor in [self._engine, *self._ranks]:
            if actor is not None:
                ray.kill(actor, no_restart=True)
        processes.end(self._local_pids(), 0.0)
        if self._placement is not None:
            remove_placement_group(self._placement)

    async def gone(self, timeout: float) -> bool:
        """Whether every process has ended within `timeout` seconds: only then is its memory free for another."""
        deadline = time.monotonic() + timeout
        while any(map(processes.is_alive, self._local_pids())):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _local_pids(self) -> list[int]:
        return [pid for pid in (self.engine_pid, *self.pids) if pid] if self.host in LOCAL_HOSTS else []


async def _ended(reference: Any) -> str:
    """Why a call that lasts as long as its process came to an end."""
    try:
        reason = await reference
    except RayError as error:
        return expected(error).message
    return reason or "ended by itself"

"""The engine process of a worker group, a Ray actor: scheduler, data-plane server, registration with the router.

Imports no torch. It never waits for Ray while it serves; the controller's only call then is `watch`.
"""

import asyncio
import functools
import logging
import os
import time
from typing import Any

import msgspec

from nori_cluster import telemetry
from nori_cluster.config import GroupConfig, ModelConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.errors import EngineFailure
from nori_cluster.routing.base import GroupRegistration, GroupReport, GroupState
from nori_cluster.rpc.dataplane_server import DataplaneServer
from nori_cluster.rpc.register import GroupRegistrar
from nori_cluster.types import GroupSpec
from nori_cluster.worker.channel import Listener, RingExecutor

log = logging.getLogger(__name__)

HAND_OVER_SECONDS = 5.0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """pids: of the ranks, in order. open_sequences: accepted and not ended."""

    pid: int
    pids: tuple[int, ...]
    step: int
    open_sequences: int


class EngineProcess:
    """One incarnation of one group. Order: listen, serve, then watch."""

    def __init__(self, group_id: str, incarnation: int, config: GroupConfig) -> None:
        telemetry.configure_logging(f"engine {group_id}")
        self._group_id = group_id
        self._incarnation = incarnation
        self._config = config
        self._listener = Listener()
        self._executor: RingExecutor | None = None
        self._server: DataplaneServer | None = None
        self._registrar: GroupRegistrar | None = None
        self._spec: GroupSpec | None = None
        self._address = ""
        self._ended: asyncio.Future[str] | None = None
        self._reloading = asyncio.Lock()  # a controller that takes over knows of no reload that the last one began

    async def listen(self) -> tuple[str, str]:
        """Address and token for the workers' channels."""
        return self._listener.address, self._listener.token

    async def serve(self, spec: GroupSpec, host: str, port: int, router: str, timeout: float) -> str:
        """Take in the workers, then requests. Returns host:port of the data plane."""
        self._ended = asyncio.get_running_loop().create_future()
        size = self._config.parallel.tensor_parallel_size
        self._executor = await asyncio.to_thread(self._listener.accept, size, timeout)
        self._executor.depth = self._config.scheduler.depth or 1
        self._executor.heartbeat_timeout = self._config.parallel.heartbeat_timeout
        self._executor.step_timeout = self._config.parallel.collective_timeout
        core = EngineCore(Scheduler(self._config.scheduler, spec), self._executor)
        self._spec = spec
        self._server = DataplaneServer(core, spec, self._group_id, self._incarnation, self._lost)
        self._address = f"{host}:{await self._server.start(host, port)}"
        self._registrar = GroupRegistrar(router, self._registration, self._report)
        self._registrar.start()
        log.info("group %s serves at %s", self._group_id, self._address)
        return self._address

    async def watch(self) -> str:
        """Returns when the group is lost, with the reason."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def status(self) -> EngineStatus:
        assert self._server is not None
        assert self._executor is not None
        return EngineStatus(
            pid=os.getpid(),
            pids=tuple(self._executor.pids),
            step=self._server.load.step,
            open_sequences=self._server.open_sequences,
        )

    async def drain(self, timeout: float, hand_over: bool = False) -> int:
        """Take no new sequences, wait for those that run; returns how many are left after `timeout` seconds.

        hand_over: what is left then is given up, to go on in other groups.
        """
        assert self._server is not None
        assert self._registrar is not None
        self._server.draining = True
        self._registrar.changed()
        left = await self._emptied(timeout)
        if left and hand_over and self._server.draining:
            self._server.hand_over()
            left = await self._emptied(HAND_OVER_SECONDS)
        self._registrar.changed()  # so that nobody reads an old load for long
        return left

    async def _emptied(self, timeout: float) -> int:
        """Waits for open sequences to end, but not once the drain was undone."""
        assert self._server is not None
        deadline = time.monotonic() + timeout
        while self._server.open_sequences and self._server.draining and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self._server.open_sequences

    async def abort(self, reason: str) -> int:
        """End what runs of a draining group, with `reason` for its clients; returns what is left all the same."""
        assert self._server is not None
        assert self._server.draining
        self._server.abort_all(reason)
        return await self._emptied(HAND_OVER_SECONDS)

    async def reload(self, model: ModelConfig, timeout: float) -> GroupSpec:
        """Other weights on every rank of a group that is drained; it stays so until `resume`.

        CheckpointError, ConfigError, Overloaded (something runs): nothing was touched. EngineFailure: it is lost.
        """
        assert self._server is not None
        assert self._executor is not None
        assert self._registrar is not None
        assert self._ended is not None
        async with self._reloading:
            task = asyncio.ensure_future(self._server.reload(functools.partial(self._executor.reload, model, timeout)))
            ends: set[asyncio.Future[Any]] = {task, self._ended}
            await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            if not task.done():  # the step thread is gone, or tells the task next
                await asyncio.wait({task}, timeout=1.0)
            if not task.done():
                task.cancel()
                raise EngineFailure(self._ended.result())
            self._spec = task.result()
            self._config = msgspec.structs.replace(self._config, model=model)
            self._registrar.registration_changed()
            log.info("group %s holds weights %s from %s", self._group_id, self._spec.weights_id, model.path)
            return self._spec

    async def resume(self) -> ModelConfig:
        """Take new sequences again, after a reload that still runs. Returns what is served."""
        assert self._server is not None
        assert self._registrar is not None
        async with self._reloading:
            self._server.draining = False
        self._registrar.changed()
        return self._config.model

    async def stop(self) -> None:
        """Leave the router's table, then end every stream and the step thread; the workers see the hang-up."""
        if self._registrar is not None:
            await self._registrar.close()
        if self._server is not None:
            await self._server.stop()
        if self._executor is not None:
            self._executor.close()

    def _lost(self, failure: EngineFailure) -> None:
        assert self._ended is not None
        if not self._ended.done():
            log.error("group %s is lost: %s", self._group_id, failure)
            self._ended.set_result(str(failure))
        if self._registrar is not None:
            self._registrar.changed()

    def _registration(self) -> GroupRegistration:
        assert self._spec is not None
        return GroupRegistration(
            group_id=self._group_id,
            incarnation=self._incarnation,
            model=self._spec.model,
            address=self._address,
            max_context_tokens=self._spec.max_model_len,
            max_running_sequences=self._config.scheduler.max_num_seqs,
            max_batched_tokens=self._config.scheduler.step_tokens,
            kv_block_tokens=self._spec.block_size,
            kv_blocks=self._spec.num_blocks,
            numerics_id=self._spec.numerics_id,
            weights_id=self._spec.weights_id,
            weight_version=self._spec.weight_version,
        )

    def _report(self) -> tuple[GroupState, GroupReport]:
        assert self._server is not None
        load = self._server.load
        pending = 0.0 if load.pending_since is None else time.monotonic() - load.pending_since
        if self._server.failure is not None:
            state = GroupState.DEAD
        elif self._server.draining:
            state = GroupState.DRAINING
        elif pending > self._config.parallel.collective_timeout:
            state = GroupState.STALLED
        else:
            state = GroupState.BUSY if load.waiting else GroupState.READY
        report = GroupReport(
            step=load.step,
            running_sequences=load.running,
            waiting_sequences=load.waiting,
            waiting_tokens=load.waiting_tokens,
            free_kv_blocks=load.free_blocks,
            tokens_per_second=load.tokens_per_second,
            generated_tokens=load.generated_tokens,
            prefix_cache_queries=load.prefix_queries,
            prefix_cache_hits=load.prefix_hits,
            prefix_cache_evictions=load.evictions,
            preemptions=load.preemptions,
            proposed_draft_tokens=load.proposed_drafts,
            accepted_draft_tokens=load.accepted_drafts,
        )
        return state, report

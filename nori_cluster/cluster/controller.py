"""The controller, a Ray actor pinned to the head: keeps the wanted groups and the router alive, serves the admin plane.

Every group has one supervising task: start an incarnation, watch it, end all of it when anything is lost, start the
next after a backoff (reconcile.py decides when). Nothing here touches a request.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from pathlib import Path

import msgspec
from ray.exceptions import RayError

from nori_cluster import telemetry
from nori_cluster.cluster import state
from nori_cluster.cluster.actors import end_strays
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.events import EventLog
from nori_cluster.cluster.operations import Operations
from nori_cluster.cluster.placement import Unplaceable, disk_shortfall
from nori_cluster.cluster.reconcile import GroupRecord, Phase, to_start
from nori_cluster.cluster.router_keeper import RouterHandle, RouterKeeper, RouterProcess
from nori_cluster.cluster.state import SavedState
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import ClusterConfig, ModelConfig, RouterConfig
from nori_cluster.errors import EngineFailure, NoriError, NotFound, Overloaded
from nori_cluster.routing.base import GroupRestarts, Restarts
from nori_cluster.rpc import admin
from nori_cluster.rpc.router_server import RouterSnapshot
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
DISK_SECONDS = 1.0  # between two looks at the disk while a group starts
REPORT_SECONDS = 2.0  # for the report of a group that is empty to reach the router
GONE_SECONDS = 10.0  # for the processes of a lost group to end


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """ready: groups that are. first_error: why the very first start of a group failed (launch gives up then)."""

    ready: int
    first_error: NoriError | None = None


class Controller:
    """start once; then it acts by itself until stop. make_group, make_router: what it is made of, fakes in tests."""

    def __init__(
        self,
        config: ClusterConfig,
        state_file: Path | None = None,
        make_group: Callable[..., WorkerGroup] = WorkerGroup,
        make_router: Callable[[RouterConfig, str], RouterHandle] = RouterProcess,
        end_strays: Callable[[Collection[str]], list[str]] = end_strays,
    ) -> None:
        telemetry.configure_logging("controller")
        self.config = config
        self._names = self._names_of(config.replicas)  # of the wanted groups
        self.records = {name: GroupRecord(name=name) for name in self._names}  # also of those that are being removed
        self.groups: dict[str, WorkerGroup] = {}
        self.models: dict[str, ModelConfig] = {}  # what each group shall serve, restarted or not; see wanted_model
        self._make_group = make_group
        self._admin_port = config.ports.admin
        self._router = RouterKeeper(
            partial(make_router, config.router),
            config.internal_host,
            config.ports.router,
            on_start=self._save,
            count=self._restarts,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of each group's newest incarnation
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self._draining: set[str] = set()
        self._drained: set[str] = set()  # those of them that an operator wants so
        self._state_file = state_file
        self._end_strays = end_strays
        self._takeovers = 0
        self._tidying: asyncio.Task[None] | None = None
        self._on_purpose: set[str] = set()  # groups whose incarnation is ended by us
        self._admin: admin.AdminServer | None = None
        self._first_error: NoriError | None = None
        self._changed = asyncio.Event()
        self.events = EventLog()
        self.operations = Operations(self)

    def _names_of(self, count: int) -> list[str]:
        return [f"{self.config.group.model.name}-{index}" for index in range(count)]

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, str]:
        """Router and admin plane, then groups; returns both addresses at once, groups come up in their own time."""
        saved = None if self._state_file is None else state.load(self._state_file)
        if saved is None:
            await self._router.start()
        else:
            await self._take_over(saved)
        self._admin = await admin.serve(ControllerAdmin(self), self.config.internal_host, self._admin_port)
        self._admin_port = self._admin.port
        self._save()
        self._loops = [
            background(self._keep_groups(), "keeping the groups"),
            background(self._router.keep(), "keeping the router"),
        ]
        return self._router.address, f"{self.config.internal_host}:{self._admin.port}"

    async def _take_over(self, saved: SavedState) -> None:
        """Go on where another controller was lost: whole groups and the router are adopted as they run, the rest is
        ended and starts anew."""
        self._restore(saved)
        made = {running.name: self._make(running.name) for running in saved.running}
        whole = await asyncio.gather(*(made[running.name].adopt(running) for running in saved.running))
        adopted = {running.name for running, well in zip(saved.running, whole, strict=True) if well}
        lost = [made[name] for name in made.keys() - adopted]
        for group in lost:
            group.kill()
        keep = {f"{name}#{self.records[name].incarnation}" for name in adopted}
        self._end_strays({*keep, saved.router})
        await self._router.adopt(saved.router, saved.router_port)
        await asyncio.gather(*(group.gone(GONE_SECONDS) for group in lost))
        self.groups = {name: made[name] for name in adopted}
        self._draining &= adopted
        self._drained &= adopted
        cut_off = sorted((self._draining - self._drained) & set(self._names))
        for name, record in self.records.items():
            lost_now = record.taken_over(name in adopted, time.monotonic())
            if lost_now:
                self.tell(record, "lost", record.last_failure)
        for name in sorted(adopted):
            self.tell(self.records[name], "adopted", f"serves at {made[name].address}")
            self._tasks[name] = background(self._supervise(name, made[name]), f"supervising {name}")
        self._tidying = background(self.operations.tidy(cut_off), "undoing what was cut off")

    def _restore(self, saved: SavedState) -> None:
        self.events = EventLog(saved.events)
        self.records = {record.name: record for record in saved.records}
        self.models = dict(saved.models)
        group = msgspec.structs.replace(self.config.group, model=saved.model)
        self.config = msgspec.structs.replace(self.config, group=group)
        self._names = self._names_of(saved.replicas)
        self._drained = set(saved.drained)
        self._draining = set(saved.draining)
        self._takeovers = saved.takeovers + 1
        self._admin_port = saved.admin_port
        self._router.restarts = saved.router_restarts
        for name in self._names:
            self.records.setdefault(name, GroupRecord(name=name))

    def _save(self) -> None:
        """Into the state file, what another controller needs."""
        if self._state_file is None or self._stopping:
            return
        ready = [group for name, group in self.groups.items() if self.records[name].phase is Phase.READY]
        saved = SavedState(
            replicas=len(self._names),
            model=self.config.group.model,
            models=self.models,
            draining=tuple(sorted(self._draining)),
            drained=tuple(sorted(self._drained)),
            router=self._router.name,
            router_port=self._router.port,
            router_restarts=self._router.restarts,
            admin_port=self._admin_port,
            takeovers=self._takeovers,
            records=tuple(self.records.values()),
            running=tuple(group.running() for group in ready),
            events=tuple(self.events.past(0)[-state.REMEMBERED_EVENTS :]),
        )
        try:
            state.save(self._state_file, saved)
        except OSError as error:  # the cluster goes on; another controller would start from what was saved last
            log.error("the state for another controller cannot be saved: %s", error)

    async def _keep_groups(self) -> None:
        while True:
            for name in to_start(self._names, self.records, time.monotonic()):
                record = self.records[name]
                if missing := self._disk_shortfall():
                    self._tell_no_room(record, missing)
                    record.postponed(missing, time.monotonic())
                    continue
                record.started()
                self.tell(record, "starting")
                self._tasks[name] = background(self._supervise(name), f"supervising {name}")
            await asyncio.sleep(TICK_SECONDS)

    def _disk_shortfall(self) -> str | None:
        """Ray's session, with every log, lies where the state file does."""
        return None if self._state_file is None else disk_shortfall(self._state_file.parent)

    async def _start(self, group: WorkerGroup) -> None:
        """Raises what group.start does; Unplaceable when the disk is full before its processes are there: Ray would
        wait for them without a word."""
        start = asyncio.ensure_future(group.start())
        try:
            while not (await asyncio.wait({start}, timeout=DISK_SECONDS))[0]:
                if not group.pids and (missing := self._disk_shortfall()):
                    raise Unplaceable(missing)
            start.result()
        finally:
            if not start.done():
                start.cancel()
                await asyncio.wait({start})

    def _make(self, name: str) -> WorkerGroup:
        port = self.config.ports.dataplane
        return self._make_group(
            name,
            self.records[name].incarnation,
            msgspec.structs.replace(self.config.group, model=self.wanted_model(name)),
            host=self.config.internal_host,
            port=port + int(name.rpartition("-")[2]) if port else 0,
            router=self._router.address,
        )

    async def _supervise(self, name: str, adopted: WorkerGroup | None = None) -> None:
        """One incarnation from its start, or its adoption, to its end."""
        record = self.records[name]
        group = self._make(name) if adopted is None else adopted
        self.groups[name] = group
        reason, placed = "stopped", True
        try:
            if adopted is None:
                await self._start(group)
                record.became_ready(time.monotonic())
                self._changed.set()
                self.tell(record, "ready", f"serves at {group.address}")
                log.info("group %s is ready at %s", name, group.address)
            reason = await group.watch()
        except Unplaceable as error:
            reason, placed = error.message, False
        except Exception as error:  # whatever it was, the group is lost and its place must come free
            reason = str(error) or type(error).__name__
            if not isinstance(error, NoriError | RayError | TimeoutError):
                log.exception("a bug ended group %s", name)
            if record.incarnation == 1 and record.phase is Phase.STARTING:
                known = error if isinstance(error, NoriError) else EngineFailure(f"{name} did not start: {reason}")
                self._first_error = self._first_error or known
        finally:
            self._note_end(record, reason, placed)
            await self._clear(record, group)

    def _note_end(self, record: GroupRecord, reason: str, placed: bool) -> None:
        """Why an incarnation ended, in its record, the log and the events."""
        self._draining.discard(record.name)  # the next incarnation takes work
        self._drained.discard(record.name)
        if record.name in self._on_purpose:
            self._on_purpose.discard(record.name)
            record.ended()
        elif placed:
            record.failed(reason, time.monotonic())
            if not self._stopping:
                log.warning("group %s, incarnation %d, is lost: %s", record.name, record.incarnation, reason)
                self.tell(record, "lost", reason)
        else:
            self._tell_no_room(record, reason)
            record.unplaced(reason, time.monotonic())

    def _tell_no_room(self, record: GroupRecord, reason: str) -> None:
        """Once for as long as the reason is the same."""
        if record.unplaceable != reason:
            log.error("no room for group %s: it %s", record.name, reason)
            self.tell(record, "unplaceable", reason)

    async def _clear(self, record: GroupRecord, group: WorkerGroup) -> None:
        """Every process of the incarnation is ended; its place is free for the next."""
        try:
            group.kill()
            if not self._stopping and not await group.gone(GONE_SECONDS):
                log.error("processes of group %s live on after %g s", record.name, GONE_SECONDS)
        except Exception:
            log.exception("group %s could not be ended", record.name)
        finally:
            del self.groups[record.name]
            record.gone()
            self._changed.set()
        if record.phase is Phase.GIVEN_UP:
            log.error("group %s failed %d times in a row and stays down", record.name, record.failures)
            self.tell(
                record, "given up", f"{record.failures} failures in a row; `nori resume {record.name}` tries again"
            )

    def tell(self, record: GroupRecord, kind: str, message: str = "") -> None:
        self.events.add(kind, record.name, record.incarnation, message)
        self._save()

    async def stop(self, drain_timeout: float) -> None:
        """End everything: groups drained for at most so many seconds and stopped in order, then the router."""
        self._stopping = True
        for task in self._loops:
            task.cancel()
        ready = [g for n, g in self.groups.items() if self.records[n].phase is Phase.READY]
        await asyncio.gather(*(group.drain(drain_timeout) for group in ready), return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in ready), return_exceptions=True)
        tidying = [] if self._tidying is None else [self._tidying]
        tasks = [*self._loops, *tidying, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._admin is not None:
            await self._admin.stop()
        self._router.kill()

    # -- questions --------------------------------------------------------------------------------------------------

    async def state(self) -> ControllerState:
        ready = sum(record.phase is Phase.READY for record in self.records.values())
        return ControllerState(ready=ready, first_error=self._first_error)

    async def next_state(self, timeout: float) -> ControllerState:
        """The state after the next change, or after `timeout` seconds."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
        return await self.state()

    async def pid(self) -> int:
        return os.getpid()

    async def router_pid(self) -> int:
        """Of the router's process, for drills. EngineFailure while it is lost."""
        return await self._router.pid()

    async def router_snapshot(self) -> RouterSnapshot:
        """EngineFailure while the router is lost."""
        return await self._router.snapshot()

    def check_known(self, name: str) -> None:
        """NotFound for a name without a group."""
        if name not in self.records:
            raise NotFound(f"no worker group {name!r}; there are: {', '.join(self._names)}", param="name")

    def check_drainable(self, name: str) -> None:
        """NotFound for a name without a group; Overloaded while the group is not up."""
        self.check_known(name)
        if self.records[name].phase is not Phase.READY:
            raise Overloaded(f"worker group {name!r} is {self.records[name].phase.value}; try again when it is ready")

    async def drain(self, name: str, grace: float, *, hand_over: bool | None = None) -> int:
        """No new work for a group; returns the sequences left after `grace` seconds. EngineFailure when it is lost.
        0: the group said that nothing of it runs, and so does its load from then on.

        hand_over: what is left then is given up, to go on elsewhere; None: where another group is ready, and the group
        stays drained until resumed, whoever controls the cluster.
        """
        self.check_drainable(name)
        group = self.groups[name]
        await self._router.set_draining(name, True)
        if self.records[name].phase is not Phase.READY or self.groups[name] is not group:
            raise EngineFailure(f"worker group {name!r} was lost before it was drained")
        self._draining.add(name)
        if hand_over is None:
            self._drained.add(name)
        self.tell(self.records[name], "draining", f"at most {grace:g} s")
        others = [n for n, r in self.records.items() if r.phase is Phase.READY and n not in self._draining]
        left = await group.drain(grace, bool(others) if hand_over is None else hand_over)
        if not left:
            await self._reported_empty(name)
        if name in self._draining:
            self.tell(self.records[name], "drained", f"{left} sequences left" if left else "")
        return left

    async def _reported_empty(self, name: str) -> None:
        """The router has heard it too, or does not in time."""
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and name in self._draining:
            try:
                statuses = (await self.router_snapshot()).groups
            except NoriError:  # another router hears of no load before the next report
                return
            load = next((status.view.report for status in statuses if status.view.group_id == name), None)
            if load is None or not load.running_sequences + load.waiting_sequences:
                return
            await asyncio.sleep(TICK_SECONDS / 4)

    async def resume(self, name: str) -> None:
        """Undo a drain, or start a group again that was given up. NotFound, Overloaded (not up), EngineFailure."""
        if name in self.records and self.records[name].phase is Phase.GIVEN_UP:
            self.records[name].retry()
            self.tell(self.records[name], "resumed")
            return
        self.check_drainable(name)
        self.models[name] = await self.groups[name].resume()
        self._draining.discard(name)  # the group says so itself to a router that is lost now
        self._drained.discard(name)
        self.tell(self.records[name], "resumed")
        await self._router.set_draining(name, False)

    # -- wanted, and ended on purpose: for operations.py ------------------------------------------------------------

    @property
    def wanted(self) -> Sequence[str]:
        """Names of the wanted groups, in order."""
        return self._names

    def want(self, count: int) -> list[str]:
        """So many groups from now on: missing ones start by themselves. Returns those that are too many, last first."""
        self._names = self._names_of(count)
        surplus = [name for name in reversed(self.records) if name not in self._names]
        self._save()
        for name in self._names:
            self.records.setdefault(name, GroupRecord(name=name)).look_again()
        return surplus

    def serve_from_now(self, model: ModelConfig) -> None:
        """What groups that come later serve."""
        group = msgspec.structs.replace(self.config.group, model=model)
        self.config = msgspec.structs.replace(self.config, group=group)
        self._save()

    def wanted_model(self, name: str) -> ModelConfig:
        """What the group serves, or will once it starts."""
        return self.models.setdefault(name, self.config.group.model)

    @property
    def draining(self) -> Set[str]:
        """Groups that take no new work on somebody's order."""
        return self._draining

    async def end_on_purpose(self, name: str) -> None:
        """Returns when the incarnation that runs, if any, is gone whole."""
        record, task, group = self.records[name], self._tasks.get(name), self.groups.get(name)
        if task is None or task.done():
            return
        if record.phase is not Phase.STOPPING:
            self._on_purpose.add(name)
            if group is not None and record.phase is Phase.READY:
                await group.stop()
                group.kill()  # its watch sees the end
                await asyncio.wait({task}, timeout=GONE_SECONDS)
            task.cancel()  # one that starts, or whose end nobody saw
        await asyncio.wait({task})
        self._on_purpose.discard(name)

    async def remove(self, name: str, grace: float) -> None:
        """Drain and end a group that is wanted no more; one that fails meanwhile is gone all the same."""
        record = self.records[name]
        try:
            if record.phase is Phase.READY:
                await self.drain(name, grace, hand_over=True)
        except NoriError as error:
            log.warning("group %s could not be drained before its removal: %s", name, error)
        await self.end_on_purpose(name)
        self._tasks.pop(name, None)
        del self.records[name]
        self.models.pop(name, None)
        self.tell(record, "removed")

    @property
    def restarts(self) -> tuple[int, int]:
        """How often another controller and another router had to take over."""
        return self._takeovers, self._router.restarts

    def _restarts(self) -> Restarts:
        controllers, routers = self.restarts
        groups = tuple(
            GroupRestarts(
                group_id=record.name, model=self.wanted_model(record.name).name,
                lost=record.lost, on_purpose=record.restarts,
            )
            for record in self.records.values()
        )  # fmt: skip
        return Restarts(controllers=controllers, routers=routers, groups=groups)

    @property
    def desired(self) -> int:
        """How many groups are wanted."""
        return len(self._names)

"""The controller, a Ray actor pinned to the head: keeps the wanted groups and the router alive, serves the admin plane.

Every group has one supervising task: start an incarnation, watch it, end all of it when anything is lost, start the
next after a backoff (reconcile.py decides when). Nothing here touches a request.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from ray.exceptions import RayError

from nori_cluster import telemetry
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.events import EventLog
from nori_cluster.cluster.placement import Unplaceable, check_replicas
from nori_cluster.cluster.reconcile import GroupRecord, Phase, to_start
from nori_cluster.cluster.roll import Roll
from nori_cluster.cluster.router_keeper import RouterHandle, RouterKeeper, RouterProcess
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import ClusterConfig, RouterConfig
from nori_cluster.errors import EngineFailure, NoriError, NotFound, Overloaded
from nori_cluster.rpc import admin
from nori_cluster.rpc.router_server import RouterSnapshot
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
GONE_SECONDS = 10.0  # for the processes of a lost group to end
BACK_SECONDS = 600.0  # a rolling operation waits so long for one group


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """ready: groups that are. first_error: why the very first start of a group failed (launch gives up then)."""

    ready: int
    first_error: NoriError | None = None


class Controller:
    """start once; then it acts by itself until stop. make_group, make_router: what it is made of, fakes in tests."""

    def __init__(
        self,
        config: ClusterConfig,
        make_group: Callable[..., WorkerGroup] = WorkerGroup,
        make_router: Callable[[RouterConfig], RouterHandle] = RouterProcess,
    ) -> None:
        telemetry.configure_logging("controller")
        self.config = config
        self._names = self._names_of(config.replicas)  # of the wanted groups
        self.records = {name: GroupRecord(name=name) for name in self._names}  # also of those that are being removed
        self.groups: dict[str, WorkerGroup] = {}
        self._make_group = make_group
        self._router = RouterKeeper(lambda: make_router(config.router), config.internal_host, config.ports.router)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of each group's newest incarnation
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False
        self._draining: set[str] = set()
        self._takeovers = 0
        self._operation = ""  # the rolling operation or scaling under way
        self._on_purpose: set[str] = set()  # groups whose incarnation is ended by us
        self._admin: admin.AdminServer | None = None
        self._first_error: NoriError | None = None
        self._changed = asyncio.Event()
        self.events = EventLog()

    def _names_of(self, count: int) -> list[str]:
        return [f"{self.config.group.model.name}-{index}" for index in range(count)]

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, str]:
        """Router and admin plane, then groups; returns both addresses at once, groups come up in their own time."""
        await self._router.start()
        self._admin = await admin.serve(ControllerAdmin(self), self.config.internal_host, self.config.ports.admin)
        self._loops = [
            background(self._keep_groups(), "keeping the groups"),
            background(self._router.keep(), "keeping the router"),
        ]
        return self._router.address, f"{self.config.internal_host}:{self._admin.port}"

    async def _keep_groups(self) -> None:
        while True:
            for name in to_start(self._names, self.records, time.monotonic()):
                self.records[name].started()
                self._tell(self.records[name], "starting")
                self._tasks[name] = background(self._supervise(name), f"supervising {name}")
            await asyncio.sleep(TICK_SECONDS)

    async def _supervise(self, name: str) -> None:
        """One incarnation from start to end."""
        record = self.records[name]
        port = self.config.ports.dataplane
        group = self._make_group(
            name,
            record.incarnation,
            self.config.group,
            host=self.config.internal_host,
            port=port + int(name.rpartition("-")[2]) if port else 0,
            router=self._router.address,
        )
        self.groups[name] = group
        reason, placed = "stopped", True
        try:
            await group.start()
            record.became_ready(time.monotonic())
            self._changed.set()
            self._tell(record, "ready", f"serves at {group.address}")
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
        if record.name in self._on_purpose:
            self._on_purpose.discard(record.name)
            record.ended()
        elif placed:
            record.failed(reason, time.monotonic())
            if not self._stopping:
                log.warning("group %s, incarnation %d, is lost: %s", record.name, record.incarnation, reason)
                self._tell(record, "lost", reason)
        else:
            if record.unplaceable != reason:  # said once
                log.error("no room for group %s: it %s", record.name, reason)
                self._tell(record, "unplaceable", reason)
            record.unplaced(reason, time.monotonic())

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
            self._tell(
                record, "given up", f"{record.failures} failures in a row; `nori resume {record.name}` tries again"
            )

    def _tell(self, record: GroupRecord, kind: str, message: str = "") -> None:
        self.events.add(kind, record.name, record.incarnation, message)

    async def stop(self, drain_timeout: float) -> None:
        """End everything: groups drained for at most so many seconds and stopped in order, then the router."""
        self._stopping = True
        for task in self._loops:
            task.cancel()
        ready = [g for n, g in self.groups.items() if self.records[n].phase is Phase.READY]
        await asyncio.gather(*(group.drain(drain_timeout) for group in ready), return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in ready), return_exceptions=True)
        tasks = [*self._loops, *self._tasks.values()]
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

        hand_over: what is left then is given up, to go on elsewhere; None: where another group is ready.
        """
        self.check_drainable(name)
        group = self.groups[name]
        await self._router.set_draining(name, True)
        self._draining.add(name)
        self._tell(self.records[name], "draining", f"at most {grace:g} s")
        others = [n for n, r in self.records.items() if r.phase is Phase.READY and n not in self._draining]
        left = await group.drain(grace, bool(others) if hand_over is None else hand_over)
        if name in self._draining:
            self._tell(self.records[name], "drained", f"{left} sequences left" if left else "")
        return left

    async def resume(self, name: str) -> None:
        """Undo a drain, or start a group again that was given up. NotFound, Overloaded (not up), EngineFailure."""
        if name in self.records and self.records[name].phase is Phase.GIVEN_UP:
            self.records[name].retry()
            return
        self.check_drainable(name)
        await self.groups[name].resume()
        await self._router.set_draining(name, False)
        self._draining.discard(name)
        self._tell(self.records[name], "resumed")

    # -- rolling operations -----------------------------------------------------------------------------------------

    async def roll(
        self,
        names: Sequence[str],
        act: Callable[[str], Awaitable[None]],
        max_unavailable: int = 1,
        *,
        grace: float = 0.0,
        on_progress: Callable[[int], None] = lambda percent: None,
    ) -> None:
        """Act on groups one after another, at most max_unavailable out of service at a time.

        Each is drained (what runs gets `grace` seconds, then goes on in another group or waits for one), then
        `act(name)` is awaited, then the group must be ready: act may change it in place or end its incarnation; the
        drain is undone here. A group that is down by itself counts as unavailable and is waited for before its turn.
        The first failure ends the roll after what is under way; a group whose act failed in place takes work again.
        Raises EngineFailure (which groups failed and why, which are done, which were not touched), ConfigError for a
        max_unavailable below 1, NotFound, and Overloaded while another roll is under way.
        """
        for name in names:
            self.check_known(name)
        roll, tasks = Roll(names, max_unavailable), set[asyncio.Task[None]]()
        self._begin("a rolling operation")
        try:
            while not roll.over:
                self._give_up_on(roll)
                tasks |= {
                    asyncio.create_task(self._turn(roll, name, act, grace)) for name in roll.take(self._down(roll))
                }
                if tasks:
                    _, tasks = await asyncio.wait(tasks, timeout=TICK_SECONDS, return_when="FIRST_COMPLETED")
                else:
                    await asyncio.sleep(TICK_SECONDS)
                on_progress(roll.percent)
        finally:
            self._operation = ""
            for task in tasks:
                task.cancel()
        if (failure := roll.verdict()) is not None:
            raise failure

    def _down(self, roll: Roll) -> list[str]:
        """Groups of the roll that are out of service, but not by it."""
        names = [*roll.waiting, *roll.done]
        return [name for name in names if self.records[name].phase is not Phase.READY or name in self._draining]

    def _give_up_on(self, roll: Roll) -> None:
        """Nobody brings these back, so the roll would wait for ever."""
        for name in self._down(roll):
            phase = self.records[name].phase
            if self.records[name].unplaceable:
                roll.failed(name, f"no room for it: it {self.records[name].unplaceable}")
                continue
            if phase is Phase.GIVEN_UP:
                roll.failed(name, f"it is down; `nori resume {name}` starts it")
            elif phase is Phase.READY:
                roll.failed(name, f"it is drained; `nori resume {name}` lets it take work")

    async def _turn(self, roll: Roll, name: str, act: Callable[[str], Awaitable[None]], grace: float) -> None:
        """One group from its drain until it takes work again."""
        try:
            await self.drain(name, grace, hand_over=True)
            try:
                await act(name)
                async with asyncio.timeout(BACK_SECONDS):
                    await self._until_ready(name)
            finally:
                if name in self._draining:  # the same incarnation
                    await self.resume(name)
            roll.back(name)
        except TimeoutError:
            roll.failed(name, f"not ready again after {BACK_SECONDS:g} s")
        except NoriError as error:
            roll.failed(name, error.message)
        except Exception as bug:
            log.exception("a rolling operation failed at group %s", name)
            roll.failed(name, f"{type(bug).__name__}: {bug}")

    async def _until_ready(self, name: str) -> None:
        """EngineFailure once another incarnation of it failed, or found no room."""
        record = self.records[name]
        lost = record.lost
        while record.phase is not Phase.READY:
            if record.unplaceable:
                raise Unplaceable(f"no room for {name}: it {record.unplaceable}; it starts once there is")
            if record.lost > lost:
                raise EngineFailure(f"{name} did not start: {record.last_failure}")
            await asyncio.sleep(TICK_SECONDS / 4)

    def _begin(self, what: str) -> None:
        """One operation on many groups at a time. Overloaded otherwise."""
        if self._operation:
            raise Overloaded(f"{self._operation} is under way; try again when it has ended")
        self._operation = what

    async def restart_groups(
        self, max_unavailable: int, grace: float, on_progress: Callable[[int], None] = lambda percent: None
    ) -> None:
        """Every group anew, by `roll`: no failure, no backoff. Raises what roll raises."""
        await self.roll(list(self._names), self._restart, max_unavailable, grace=grace, on_progress=on_progress)

    async def _restart(self, name: str) -> None:
        self._tell(self.records[name], "restarting")
        await self._end_on_purpose(name)

    async def _end_on_purpose(self, name: str) -> None:
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

    # -- scale ------------------------------------------------------------------------------------------------------

    async def scale(self, count: int, grace: float, on_progress: Callable[[int], None] = lambda percent: None) -> None:
        """As many groups as `count`: new ones are started, the last ones drained (with hand-over after `grace` seconds)
        and ended. Returns when all wanted groups were ready once.

        Raises ConfigError for a number that has no ports, Overloaded while another operation is under way, Unplaceable
        (it stays wanted and starts once there is room), EngineFailure when a new group does not start (it is tried
        again with backoff).
        """
        check_replicas(self.config, count)
        self._begin("scaling")
        try:
            surplus = [name for name in reversed(self.records) if name not in self._names_of(count)]
            self._names = self._names_of(count)
            for name in self._names:
                self.records.setdefault(name, GroupRecord(name=name)).look_again()
            for number, name in enumerate(surplus):
                await self._remove(name, grace)
                on_progress(100 * (number + 1) // len(surplus))
            async with asyncio.timeout(BACK_SECONDS):
                for number, name in enumerate(self._names):
                    if self.records[name].phase is not Phase.GIVEN_UP:
                        await self._until_ready(name)
                    on_progress(100 * (number + 1) // count)
        except TimeoutError:
            raise EngineFailure(f"not all groups were ready after {BACK_SECONDS:g} s") from None
        finally:
            self._operation = ""

    async def _remove(self, name: str, grace: float) -> None:
        """Drain and end a group that is wanted no more; one that fails meanwhile is gone all the same."""
        record = self.records[name]
        try:
            if record.phase is Phase.READY:
                await self.drain(name, grace, hand_over=True)
        except NoriError as error:
            log.warning("group %s could not be drained before its removal: %s", name, error)
        await self._end_on_purpose(name)
        self._tasks.pop(name, None)
        del self.records[name]
        self._tell(record, "removed")

    @property
    def restarts(self) -> tuple[int, int]:
        """How often another controller and another router had to take over."""
        return self._takeovers, self._router.restarts

    @property
    def desired(self) -> int:
        """How many groups are wanted."""
        return len(self._names)

"""A Roll driven on the groups of a controller: drain, act, wait until ready."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from typing import Protocol

from nori_cluster.cluster.placement import Unplaceable
from nori_cluster.cluster.reconcile import GroupRecord, Phase
from nori_cluster.cluster.roll import Roll
from nori_cluster.errors import EngineFailure, NoriError

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
BACK_SECONDS = 600.0  # an operation waits so long for one group


class Pool(Protocol):
    """What this needs of the controller. draining: groups that take no new work on somebody's order."""

    records: dict[str, GroupRecord]

    @property
    def draining(self) -> Set[str]: ...

    async def drain(self, name: str, grace: float, *, hand_over: bool | None = None) -> int: ...

    async def resume(self, name: str) -> None: ...


class Rolling:
    """One rolling operation. grace: seconds for what runs in a drained group."""

    def __init__(
        self, pool: Pool, act: Callable[[str], Awaitable[None]], roll: Roll, *, grace: float, hand_over: bool
    ) -> None:
        self._pool = pool
        self._act = act
        self._roll = roll
        self._grace = grace
        self._hand_over = hand_over

    async def run(self, on_progress: Callable[[int], None]) -> None:
        """Each group is drained (what runs gets `grace` seconds, then goes on in another group or waits for one;
        without hand_over it runs on), then `act(name)` is awaited, then the group must be ready: act may change it in
        place or end its incarnation; the drain is undone here. A group that is down by itself counts as unavailable
        and is waited for before its turn. The first failure ends the roll after what is under way; a group whose act
        failed in place takes work again.

        Raises EngineFailure: which groups failed and why, which are done, which were not touched.
        """
        roll, tasks = self._roll, set[asyncio.Task[None]]()
        try:
            while not roll.over:
                self._give_up_on_lost()
                tasks |= {asyncio.create_task(self._turn(name)) for name in roll.take(self._down())}
                if tasks:
                    _, tasks = await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when="FIRST_COMPLETED")
                else:
                    await asyncio.sleep(LOOK_SECONDS)
                on_progress(roll.percent)
        finally:
            for task in tasks:
                task.cancel()
        if (failure := roll.verdict()) is not None:
            raise failure

    def _down(self) -> list[str]:
        """Groups of the roll that are out of service, but not by it."""
        names, records = [*self._roll.waiting, *self._roll.done], self._pool.records
        return [name for name in names if records[name].phase is not Phase.READY or name in self._pool.draining]

    def _give_up_on_lost(self) -> None:
        """Nobody brings these back, so the roll would wait for ever."""
        for name in self._down():
            record = self._pool.records[name]
            if record.unplaceable:
                self._roll.failed(name, f"no room for it: it {record.unplaceable}")
            elif record.phase is Phase.GIVEN_UP:
                self._roll.failed(name, f"it is down; `nori resume {name}` starts it")
            elif record.phase is Phase.READY:
                self._roll.failed(name, f"it is drained; `nori resume {name}` lets it take work")

    async def _turn(self, name: str) -> None:
        """One group from its drain until it takes work again."""
        try:
            await self._pool.drain(name, self._grace, hand_over=self._hand_over)
            try:
                await self._act(name)
                async with asyncio.timeout(BACK_SECONDS):
                    await until_ready(self._pool.records[name])
            finally:
                if name in self._pool.draining:  # the same incarnation
                    await self._pool.resume(name)
            self._roll.back(name)
        except TimeoutError:
            self._roll.failed(name, f"not ready again after {BACK_SECONDS:g} s")
        except NoriError as error:
            self._roll.failed(name, error.message)
        except Exception as bug:
            log.exception("a rolling operation failed at group %s", name)
            self._roll.failed(name, f"{type(bug).__name__}: {bug}")


async def until_ready(record: GroupRecord) -> None:
    """Unplaceable or EngineFailure once another incarnation found no room, or failed."""
    lost = record.lost
    while record.phase is not Phase.READY:
        if record.unplaceable:
            raise Unplaceable(f"no room for {record.name}: it {record.unplaceable}; it starts once there is")
        if record.lost > lost:
            raise EngineFailure(f"{record.name} did not start: {record.last_failure}")
        await asyncio.sleep(LOOK_SECONDS / 2)

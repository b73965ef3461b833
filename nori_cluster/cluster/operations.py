"""Operations on many groups: scale, restart, reload, one at a time, on the groups that a controller keeps alive.

The controller starts and ends incarnations; what is here only decides which, in which order, and waits.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Protocol

from nori_cluster.cluster import reload, rolling
from nori_cluster.cluster.placement import check_replicas
from nori_cluster.cluster.reconcile import GroupRecord, Phase
from nori_cluster.cluster.reload import Reload
from nori_cluster.cluster.roll import Roll
from nori_cluster.cluster.rolling import BACK_SECONDS, Rolling, until_ready
from nori_cluster.config import ClusterConfig, InFlightPolicy, ModelConfig
from nori_cluster.errors import EngineFailure, NoriError, Overloaded

log = logging.getLogger(__name__)

Progress = Callable[[int], None]  # percent


def unseen(percent: int) -> None:
    """A Progress for which nobody looks."""


class Pool(rolling.Pool, reload.Pool, Protocol):
    """What this needs of the controller."""

    config: ClusterConfig

    @property
    def wanted(self) -> Sequence[str]: ...

    def want(self, count: int) -> list[str]: ...

    def serve_from_now(self, model: ModelConfig) -> None: ...

    def check_known(self, name: str) -> None: ...

    def tell(self, record: GroupRecord, kind: str, message: str = "") -> None: ...

    async def end_on_purpose(self, name: str) -> None: ...

    async def remove(self, name: str, grace: float) -> None: ...


class Operations:
    """Of one controller. under_way: the operation that runs now, "" for none."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.under_way = ""
        self._active: Collection[str] = ()  # groups that a roll has taken and not brought back

    async def roll(
        self,
        names: Sequence[str],
        act: Callable[[str], Awaitable[None]],
        max_unavailable: int = 1,
        *,
        grace: float = 0.0,
        hand_over: bool = True,
        on_progress: Progress = unseen,
    ) -> None:
        """Act on groups one after another, at most max_unavailable out of service at a time: see Rolling.run.

        Raises Overloaded while another operation is under way, NotFound, and what Rolling.run raises.
        """
        with self._alone("a rolling operation"):
            await self._drive(names, act, max_unavailable, grace=grace, hand_over=hand_over, on_progress=on_progress)

    async def _drive(
        self,
        names: Sequence[str],
        act: Callable[[str], Awaitable[None]],
        max_unavailable: int = 1,
        *,
        grace: float = 0.0,
        hand_over: bool = True,
        on_progress: Progress = unseen,
    ) -> None:
        """roll, of an operation that is under way."""
        for name in names:
            self._pool.check_known(name)
        roll = Roll(names, max_unavailable)
        self._active = roll.active
        try:
            await Rolling(self._pool, act, roll, grace=grace, hand_over=hand_over).run(on_progress)
        finally:
            self._active = ()

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One operation on many groups at a time. Overloaded otherwise."""
        if self.under_way:
            raise Overloaded(f"{self.under_way} is under way; try again when it has ended")
        self.under_way = what
        try:
            yield
        finally:
            self.under_way = ""

    def check_free(self, name: str) -> None:
        """Overloaded while an operation has this group in its hands: then nobody else drains or resumes it."""
        going = name in self._pool.records and name not in self._pool.wanted
        if name in self._active or going:
            raise Overloaded(f"{self.under_way or 'its removal'} works on {name!r}; try again when it has ended")

    async def tidy(self, drained: Collection[str]) -> None:
        """After a takeover: operations ended with their controller. drained: groups they had drained, which take work
        again; groups wanted no more are still removed."""
        surplus = [name for name in self._pool.records if name not in self._pool.wanted]
        if not drained and not surplus:
            return
        with self._alone("undoing what was cut off with the controller"):
            for name in drained:
                try:
                    await self._pool.resume(name)
                except NoriError as error:  # lost: the next incarnation takes work
                    log.warning("group %s could not be told to take work: %s", name, error)
            for name in surplus:
                await self._pool.remove(name, 0.0)

    async def restart_groups(self, max_unavailable: int, grace: float, on_progress: Progress = unseen) -> None:
        """Every group anew, by `roll`: no failure, no backoff. Raises what roll raises."""
        await self.roll(list(self._pool.wanted), self._restart, max_unavailable, grace=grace, on_progress=on_progress)

    async def _restart(self, name: str) -> None:
        self._pool.tell(self._pool.records[name], "restarting")
        await self._pool.end_on_purpose(name)

    async def reload(
        self,
        model: ModelConfig,
        policy: InFlightPolicy,
        max_unavailable: int,
        grace: float,
        on_progress: Progress = unseen,
    ) -> None:
        """Other weights for every wanted group, and for those that come later. Raises Overloaded while
        another operation is under way, and what Reload.run raises."""
        with self._alone("a reload of weights"):
            work = Reload(self._pool, self._drive, model, policy, grace=grace)
            await work.run(list(self._pool.wanted), max_unavailable, on_progress)
            self._pool.serve_from_now(model)

    async def scale(self, count: int, grace: float, on_progress: Progress = unseen) -> None:
        """As many groups as `count`: new ones are started, the last ones drained (with hand-over after `grace` seconds)
        and ended. Returns when all wanted groups were ready once.

        Raises ConfigError for a number that has no ports, Overloaded while another operation is under way, Unplaceable
        (it stays wanted and starts once there is room), EngineFailure when a new group does not start (it is tried
        again with backoff).
        """
        check_replicas(self._pool.config, count)
        with self._alone("scaling"):
            surplus = self._pool.want(count)
            for number, name in enumerate(surplus):
                await self._pool.remove(name, grace)
                on_progress(100 * (number + 1) // len(surplus))
            try:
                async with asyncio.timeout(BACK_SECONDS):
                    for number, name in enumerate(self._pool.wanted):
                        if self._pool.records[name].phase is not Phase.GIVEN_UP:
                            await until_ready(self._pool.records[name])
                        on_progress(100 * (number + 1) // count)
            except TimeoutError:
                raise EngineFailure(f"not all groups were ready after {BACK_SECONDS:g} s") from None

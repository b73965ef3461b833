"""Other weights for every group, a few at a time, in place: drained, emptied, reloaded, taken into service again.

No request goes on with other weights than it began with, so the last groups of the old ones let theirs end. A group
that fails over it starts again with the weights it had.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from msgspec import structs

from nori_cluster.checkpoint.safetensors_index import weight_entries
from nori_cluster.cluster.reconcile import GroupRecord, Phase
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import InFlightPolicy, ModelConfig, existing_folder
from nori_cluster.errors import ConfigError, EngineFailure, Overloaded
from nori_cluster.rpc.router_server import RouterSnapshot
from nori_cluster.worker.reload import read_facts, require_same

POLL_SECONDS = 0.1
MOVED_SECONDS = 0.5  # in which gateways ask the router for another group
LOST_SECONDS = 10.0  # until the controller has noticed a loss
REASON = "the weights of the model are being replaced (in-flight policy abort)"


class Pool(Protocol):
    """What this needs of the controller."""

    groups: dict[str, WorkerGroup]
    records: dict[str, GroupRecord]
    models: dict[str, ModelConfig]

    def wanted_model(self, name: str) -> ModelConfig: ...

    @property
    def draining(self) -> Set[str]: ...

    async def router_snapshot(self) -> RouterSnapshot: ...


class RollFn(Protocol):
    """Operations.roll, of an operation that is under way."""

    async def __call__(
        self,
        names: Sequence[str],
        act: Callable[[str], Awaitable[None]],
        max_unavailable: int = 1,
        *,
        grace: float = 0.0,
        hand_over: bool = True,
        on_progress: Callable[[int], None] = ...,
    ) -> None: ...


def next_model(models: Mapping[str, ModelConfig], folder: str, version: str = "") -> ModelConfig:
    """What the groups shall serve. models: what each does now. Without a version: that of groups which hold this folder
    already, after a reload that failed midway, else the next number.

    ConfigError for a relative folder and for a label that another folder has.
    """
    if not Path(folder).is_absolute():
        raise ConfigError(f"the folder must be an absolute path, not {folder!r}", param="uri")
    held = list(models.values())
    begun = [m.weight_version for m in held if m.path == folder]
    if not version and begun and len(begun) < len(held):
        version = begun[0]
    for model in held:
        if model.weight_version == version and model.path != folder:
            raise ConfigError(f"weight version {version!r} is that of {model.path}", param="weight_version")
    numbers = [int(m.weight_version) for m in held if m.weight_version.isdecimal()]
    version = version or str(max(numbers, default=0) + 1)
    return structs.replace(held[0], path=folder, weight_version=version)


def check_folder(old: Path, new: Path) -> None:
    """CheckpointError naming the first difference but the weights. Before any group is drained; each rank looks again,
    with the tensors that it needs. Nothing is compared when the old folder is gone."""
    if old.is_dir():
        names = weight_entries(old).keys() & weight_entries(new).keys()
        require_same(read_facts(old, names), new)


class Reload:
    """One reload of some groups. grace: seconds for requests that have to end where they are; timeout: for a load."""

    def __init__(
        self,
        pool: Pool,
        roll: RollFn,
        model: ModelConfig,
        policy: InFlightPolicy,
        *,
        grace: float,
        timeout: float = 600.0,
    ) -> None:
        self._pool = pool
        self._roll = roll
        self._model = model
        self._policy = policy
        self._grace = grace
        self._timeout = timeout
        self._moving = asyncio.Lock()

    async def run(
        self, names: Sequence[str], max_unavailable: int, on_progress: Callable[[int], None] = lambda percent: None
    ) -> None:
        """NoriError of the first group that failed, with the version that each one has now."""
        new = existing_folder(self._model.path)
        due = [name for name in names if self._pool.wanted_model(name) != self._model]
        for old in {self._pool.models[name].path for name in due}:
            await asyncio.to_thread(check_folder, Path(old), new)
        try:
            await self._roll(due, self._act, max_unavailable, grace=0.0, hand_over=False, on_progress=on_progress)
        except EngineFailure as error:
            held = ", ".join(f"{name} {self._pool.models[name].weight_version}" for name in names)
            raise EngineFailure(f"{error.message}; weight versions now: {held}") from error

    async def _act(self, name: str) -> None:
        """A group that takes no new work: emptied, then reloaded. It is this incarnation or none: another one that came
        meanwhile takes work and is not touched."""
        if name not in self._pool.draining:
            raise EngineFailure(f"{name} was lost while it was drained")
        group = self._pool.groups[name]
        try:
            if left := await self._empty(name, group):
                kept = self._pool.models[name].weight_version
                raise Overloaded(
                    f"{left} requests still run after {self._grace:g} s, it keeps version {kept}; "
                    "give them longer or use the in-flight policy abort"
                )
            await group.reload(self._model, self._timeout)
        except EngineFailure:
            await self._lost(name, group)
            raise
        self._pool.models[name] = self._model

    async def _empty(self, name: str, group: WorkerGroup) -> int:
        """Sequences that are left."""
        if self._policy == "abort":
            return await group.abort(REASON)
        if self._policy == "continue":
            async with self._moving:
                await asyncio.sleep(POLL_SECONDS)  # groups whose turn began with this one's are draining now
                if self._alike(name):
                    left = await group.drain(0.0, True)
                    await self._moved()
                    return left
        return await group.drain(self._grace, False)

    def _alike(self, name: str) -> list[str]:
        """Groups that can go on with what this one says."""
        pool = self._pool
        return [
            other
            for other, record in pool.records.items()
            if other != name
            and record.phase is Phase.READY
            and other not in pool.draining
            and pool.wanted_model(other) == pool.wanted_model(name)
        ]

    async def _moved(self) -> None:
        """Until nothing waits for a group: what was given up has its place. Overloaded after the grace."""
        end = asyncio.get_running_loop().time() + MOVED_SECONDS + self._grace
        await asyncio.sleep(MOVED_SECONDS)
        while waiting := (await self._pool.router_snapshot()).waiting:
            if asyncio.get_running_loop().time() > end:
                raise Overloaded(f"{waiting} requests still wait for a group with the weights that they began with")
            await asyncio.sleep(POLL_SECONDS)

    async def _lost(self, name: str, group: WorkerGroup) -> None:
        """Until the controller knows that this incarnation is over."""
        pool, end = self._pool, asyncio.get_running_loop().time() + LOST_SECONDS
        while pool.groups.get(name) is group and pool.records[name].phase is Phase.READY:
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(POLL_SECONDS)

"""Rolls, restarts and scaling of a controller around fake groups."""

import asyncio
from collections.abc import Callable

import pytest
from fakes.cluster import until
from fakes.pool import World, controller, ready

from nori_cluster.cluster import controller as controller_module
from nori_cluster.cluster import reconcile, rolling
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.placement import Unplaceable
from nori_cluster.cluster.reconcile import Phase
from nori_cluster.errors import CheckpointError, ConfigError, EngineFailure, NotFound, Overloaded
from nori_cluster.rpc.admin_types import OperationInfo

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(reconcile, "PLACE_AGAIN", 0.05)
    monkeypatch.setattr(controller_module, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(rolling, "LOOK_SECONDS", 0.02)


# -- rolling operations ----------------------------------------------------------------------------------------------


async def test_a_roll_takes_one_group_after_another_out_of_service() -> None:
    world = World()
    async with controller(world) as made:
        for name in ("m-0", "m-1"):
            world.newest(name).drains.set_result(0)
        out: list[str] = []
        percents: list[int] = []

        async def act(name: str) -> None:
            out.append(name)
            world.journal.append(f"act on {name}")
            assert made._draining == {name}

        await made.operations.roll(["m-0", "m-1"], act, grace=5.0, on_progress=percents.append)
        assert world.journal == [
            step for name in ("m-0", "m-1") for step in
            (f"router drains {name}", f"drain {name} and hand over", f"act on {name}", f"resume {name}",
             f"router resumes {name}")
        ]  # fmt: skip
        assert percents[-1] == 100
        with pytest.raises(NotFound):
            await made.operations.roll(["m-9"], act)


async def test_a_failed_act_stops_the_roll_and_the_group_takes_work_again() -> None:
    world = World()
    async with controller(world) as made:

        async def act(name: str) -> None:
            raise CheckpointError("model.safetensors: cut off")

        with pytest.raises(EngineFailure, match=r"m-0: model.* \(done: none; not touched: m-1\)"):
            await made.operations.roll(["m-0", "m-1"], act)
        assert world.journal[-1] == "router resumes m-0"
        assert not made._draining


async def test_a_group_lost_while_it_is_rolled_is_waited_for() -> None:
    world = World()
    async with controller(world) as made:

        async def act(name: str) -> None:
            world.newest(name).die()
            await until(lambda: made.records[name].incarnation == 2)

        await made.operations.roll(["m-0", "m-1"], act, max_unavailable=2)
        assert ready(made, 2)()
        assert [record.incarnation for record in made.records.values()] == [2, 2]


async def test_a_roll_does_not_wait_for_a_group_that_nobody_brings_back() -> None:
    world = World()
    async with controller(world) as made:
        await made.drain("m-1", 0.5)

        async def act(name: str) -> None:
            raise AssertionError("nothing may be taken: one is out already")

        with pytest.raises(EngineFailure, match="m-1: it is drained; `nori resume m-1`"):
            await made.operations.roll(["m-0", "m-1"], act)


async def test_one_roll_at_a_time() -> None:
    world = World()
    async with controller(world) as made:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def act(name: str) -> None:
            inside.set()
            await leave.wait()

        first = asyncio.create_task(made.operations.roll(["m-0"], act))
        await inside.wait()
        with pytest.raises(Overloaded, match="under way"):
            await made.operations.roll(["m-1"], act)
        leave.set()
        await first


# -- restart ---------------------------------------------------------------------------------------------------------


async def test_a_restart_replaces_every_group_and_is_no_failure() -> None:
    world = World()
    async with controller(world) as made:
        await made.operations.restart_groups(1, 0.5)
        steps = [("router drains {}", "drain {} and hand over", "stop {}", "kill {}", "kill {}")] * 2
        want = [
            step.format(name) for name, all_of_one in zip(("m-0", "m-1"), steps, strict=True) for step in all_of_one
        ]
        assert world.journal == want
        assert ready(made, 2)()
        for record in made.records.values():
            assert (record.incarnation, record.failures, record.lost, record.restarts) == (2, 0, 0, 1)
            assert record.last_failure == ""
        kinds = [event.kind for event in made.events.past(4)]
        assert kinds == ["draining", "drained", "restarting", "starting", "ready"] * 2
        assert not made._draining


async def test_a_restart_stops_at_a_group_that_does_not_come_back() -> None:
    world = World()
    async with controller(world) as made:
        world.failures["m-0"] = [CheckpointError("model.safetensors: cut off")]
        with pytest.raises(EngineFailure, match=r"m-0: m-0 did not start: model.*not touched: m-1"):
            await made.operations.restart_groups(1, 0.0)
        assert made.records["m-1"].incarnation == 1
        await until(ready(made, 2))  # it is tried again, as always


# -- scale -----------------------------------------------------------------------------------------------------------


async def test_scaling_up_starts_groups_on_the_next_ports_and_down_removes_the_last() -> None:
    world = World()
    async with controller(world) as made:
        percents: list[int] = []
        await made.operations.scale(4, 0.0, percents.append)
        assert percents[-1] == 100
        assert list(made.records) == ["m-0", "m-1", "m-2", "m-3"]
        assert ready(made, 4)()
        await made.operations.scale(1, 0.5)
        assert list(made.records) == list(made.groups) == ["m-0"]
        removed = [entry.split()[1] for entry in world.journal if entry.startswith("stop")]
        assert removed == ["m-3", "m-2", "m-1"]
        assert world.journal[:4] == ["router drains m-3", "drain m-3 and hand over", "stop m-3", "kill m-3"]
        assert made.desired == 1
        await made.operations.scale(2, 0.0)
        assert made.records["m-1"].incarnation == 1, "a new group, not the old one"


async def test_a_group_without_room_is_told_once_and_starts_when_there_is_room() -> None:
    world = World()
    async with controller(world) as made:
        full = "needs {CPU: 2} on one node, the largest free is {CPU: 1}"
        world.failures["m-3"] = [Unplaceable(full) for _ in range(4)]
        with pytest.raises(Unplaceable, match=r"no room for m-3: it needs .* it starts once there is"):
            await made.operations.scale(4, 0.0)
        assert made.records["m-2"].phase is Phase.READY, "one without room holds up no other"
        await until(ready(made, 4))
        told = [event for event in made.events.past(0) if event.kind == "unplaceable"]
        assert [(event.group, event.message) for event in told] == [("m-3", full)]
        assert (made.records["m-3"].lost, made.records["m-3"].unplaceable) == (0, "")


async def test_a_group_without_room_goes_when_it_is_wanted_no_more() -> None:
    world = World()
    async with controller(world) as made:
        world.failures["m-2"] = [Unplaceable("full") for _ in range(1000)]
        with pytest.raises(Unplaceable):
            await made.operations.scale(3, 0.0)
        await made.operations.scale(2, 0.0)
        tries = len(world.made)
        await asyncio.sleep(0.2)
        assert len(world.made) == tries
        assert list(made.records) == ["m-0", "m-1"]


async def test_a_new_group_that_does_not_start_is_the_answer() -> None:
    world = World()
    async with controller(world) as made:
        world.failures["m-2"] = [EngineFailure("no memory")]
        with pytest.raises(EngineFailure, match="m-2 did not start: no memory"):
            await made.operations.scale(3, 0.0)
        await until(ready(made, 3))


async def test_scaling_down_a_group_that_starts_or_dies() -> None:
    world = World()
    world.slow = {"m-1"}
    async with controller(world, wait=False) as made:
        await until(ready(made, 1))
        await made.operations.scale(1, 0.0)
        assert "kill m-1" in world.journal
        world.slow = set()
        await made.operations.scale(2, 0.0)
        removal = asyncio.create_task(made.operations.scale(1, 30.0))
        await until(lambda: "drain m-1 and hand over" in world.journal)
        world.newest("m-1").die()
        await asyncio.wait_for(removal, 2.0)
        assert list(made.records) == ["m-0"]


async def ended(admin: ControllerAdmin, operation: OperationInfo) -> OperationInfo:
    async with asyncio.timeout(3):
        while not operation.done:
            await asyncio.sleep(0.01)
            found = await admin.get_operation(operation.name)
            assert found is not None
            operation = found
    return operation


async def test_the_admin_plane_scales_and_restarts_as_operations() -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        assert (await admin.scale("m", 3, validate_only=True)).done
        assert made.desired == 2, "validate_only does nothing"
        for refused in (admin.scale("x", 3, False), admin.restart("x", 1, None)):
            with pytest.raises(NotFound, match="no model 'x'; there is: m"):
                await refused
        for refused in (admin.scale("m", 17, True), admin.restart("m", 0, None)):
            with pytest.raises(ConfigError):
                await refused
        scaled = await ended(admin, await admin.scale("m", 3, False))
        restarted = await ended(admin, await admin.restart("m", 3, 0.0))
        assert [record.incarnation for record in made.records.values()] == [2, 2, 2]
        assert ready(made, 3)()
        for done in (scaled, restarted):
            assert (done.error_code, done.progress_percent) == (0, 100)
        world.failures["m-3"] = [Unplaceable("needs more") for _ in range(1000)]
        failed = await ended(admin, await admin.scale("m", 4, False))
        assert failed.error_message == "no room for m-3: it needs more; it starts once there is"
        shown = {group.name: group for group in await admin.list_groups()}["m-3"]
        assert shown.last_failure == "no room: it needs more"


@pytest.mark.parametrize("count", [0, 17])
async def test_numbers_that_cannot_be(count: int) -> None:
    async with controller(World()) as made:
        with pytest.raises(ConfigError):
            await made.operations.scale(count, 0.0)
        assert made.desired == 2


async def test_one_operation_at_a_time() -> None:
    world = World()
    async with controller(world) as made:
        world.slow = {"m-2"}
        scaling = asyncio.create_task(made.operations.scale(3, 0.0))
        await until(lambda: "m-2" in made.groups)
        operations: list[Callable[[], object]] = [
            lambda: made.operations.scale(2, 0.0),
            lambda: made.operations.restart_groups(1, 0.0),
        ]
        for operation in operations:
            with pytest.raises(Overloaded, match="scaling is under way"):
                await operation()  # type: ignore[misc]
        scaling.cancel()
        await asyncio.wait({scaling})
        await made.operations.scale(2, 0.0)

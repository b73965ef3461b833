"""A controller that goes on where another was lost: what it adopts, what it replaces, what it still knows."""

import asyncio
import random
from pathlib import Path

import pytest
from fakes.cluster import until
from fakes.pool import World, controller, lost_controller, ready

from nori_cluster.cluster import reconcile, rolling, router_keeper
from nori_cluster.cluster import state as state_module
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.reconcile import Deaths, GroupRecord, Phase, to_start
from nori_cluster.config import ModelConfig
from nori_cluster.errors import EngineFailure, NotFound, Overloaded

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(rolling, "LOOK_SECONDS", 0.02)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


async def test_whole_groups_and_the_router_are_adopted_as_they_run(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        await first.operations.scale(3, 0.0)
        port = first._admin.port if first._admin else 0
        last = first.events.past(0)[-1].sequence
    before = list(world.journal)
    async with controller(world, state_file=file, wait=False) as second:
        assert ready(second, 3)(), "adopted before start returns"
        assert second._admin is not None
        assert second._admin.port == port
        assert world.journal == before, "nothing was ended, drained or told"
        assert len(world.routers) == 1
        assert world.kept == [{"m-0#1", "m-1#1", "m-2#1", "router-0"}]
        assert second.desired == 3
        assert second.restarts == (1, 0)
        news = second.events.past(last)
        assert [(event.sequence, event.kind, event.group) for event in news] == [
            (last + 1 + index, "adopted", f"m-{index}") for index in range(3)
        ]
        world.newest("m-1").die()  # it is watched
        await until(lambda: world.newest("m-1").incarnation == 2)
        await until(ready(second, 3))
        status = await ControllerAdmin(second).get_status()
        assert (status.controller_restarts, status.models[0].desired_groups) == (1, 3)
        await until(lambda: world.restarts.controllers == 1)


async def test_what_is_not_whole_is_ended_and_replaced(file: Path) -> None:
    world = World()
    async with lost_controller(world, file):
        pass
    world.broken = {"m-1"}
    async with controller(world, state_file=file) as second:
        assert world.journal[-1] == "kill m-1"
        assert world.kept == [{"m-0#1", "router-0"}]
        assert [record.incarnation for record in second.records.values()] == [1, 2]
        assert second.records["m-1"].last_failure == "it was not whole when another controller took over"
        assert [e.group for e in second.events.past(0) if e.kind == "lost"] == ["m-1"]


async def test_a_router_lost_together_with_the_controller_is_replaced_on_its_port(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        address = first._router.address
    world.routers[0].dead = True
    async with controller(world, state_file=file) as second:
        assert second._router.address == address
        assert len(world.routers) == 2
        assert second.restarts == (1, 1)


async def test_a_router_that_was_replaced_before_is_the_one_that_is_adopted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_keeper, "CHECK_SECONDS", 0.01)
    world = World()
    async with lost_controller(world, file) as first:
        world.routers[0].dead = True
        await until(lambda: first._router.name == "router-1")
    async with controller(world, state_file=file) as second:
        assert second._router.name == "router-1"
        assert len(world.routers) == 2
        assert second.restarts == (1, 1)


async def test_a_full_disk_ends_no_controller(file: Path) -> None:
    world = World()
    async with controller(world, state_file=file / "no folder" / "state.json") as made:
        world.newest("m-0").die()
        await until(lambda: world.newest("m-0").incarnation == 2)
        await until(ready(made, 2))


async def test_groups_that_were_starting_start_anew_with_another_incarnation(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        world.slow = {"m-2"}
        scaling = asyncio.create_task(first.operations.scale(3, 0.0))
        await until(lambda: "m-2" in first.groups)
        scaling.cancel()
    world.slow = set()
    async with controller(world, state_file=file, wait=False) as second:
        await until(ready(second, 3))
        assert second.records["m-2"].incarnation == 2
        assert second.records["m-2"].lost == 0, "it was cut off with its controller"
        assert world.kept == [{"m-0#1", "m-1#1", "router-0"}]


async def test_a_drain_by_hand_stays_and_one_of_an_operation_is_undone(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        await first.drain("m-0", 0.5)
        await first.drain("m-1", 0.5, hand_over=True)
        operation = await ControllerAdmin(first).drain("m-0", 0.5)
    async with controller(world, state_file=file) as second:
        await until(lambda: world.journal[-1] == "router resumes m-1")
        assert second._draining == {"m-0"}
        assert await ControllerAdmin(second).get_operation(operation.name) is None, (
            "operations end with their controller"
        )
        await second.resume("m-0")
        assert not second._draining


async def test_a_removal_that_was_cut_off_goes_on(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        scaling = asyncio.create_task(first.operations.scale(1, 30.0))
        await until(lambda: "drain m-1 and hand over" in world.journal)
        scaling.cancel()
        await asyncio.wait({scaling})
    async with controller(world, state_file=file, wait=False) as second:
        await until(lambda: list(second.records) == ["m-0"])
        assert "stop m-1" in world.journal
        with pytest.raises(NotFound):
            await second.resume("m-1")


def test_a_file_that_is_not_ours_is_told(file: Path) -> None:
    assert state_module.load(file) is None
    file.write_text('{"replicas": "x"}')
    with pytest.raises(EngineFailure, match=r"state.json cannot be read: .*replicas"):
        state_module.load(file)


def test_five_deaths_in_a_minute_are_too_many() -> None:
    deaths = Deaths(5, 60.0)
    assert [deaths.too_many(now) for now in (0, 10, 20, 30, 59)] == [False] * 4 + [True]
    deaths = Deaths(5, 60.0)
    assert not any(deaths.too_many(now) for now in range(0, 1000, 16))


@pytest.mark.parametrize("seed", range(50))
def test_random_walk_of_takeovers(seed: int) -> None:
    """Controllers come and go: a whole group is never ended, one that is not never kept; incarnations do not repeat;
    failures in a row still end in giving up, and nothing is stuck."""
    rng, now = random.Random(seed), 0.0
    records = {name: GroupRecord(name=name) for name in ("m-0", "m-1", "m-2")}
    started: set[tuple[str, int]] = set()
    for _ in range(400):
        now += rng.random() * 5
        if rng.random() < 0.1:
            for record in records.values():
                before, whole = (record.phase, record.incarnation, record.lost), rng.random() < 0.6
                lost = record.taken_over(whole, now)
                assert lost == (before[0] is Phase.READY and not whole)
                assert (record.phase, record.incarnation) == before[:2] or before[0] is not Phase.READY or lost
                assert record.phase in (Phase.ABSENT, Phase.READY, Phase.GIVEN_UP), "nothing is half done"
                assert record.lost == before[2] + lost
        for name in to_start(list(records), records, now):
            records[name].started()
            assert (name, records[name].incarnation) not in started
            started.add((name, records[name].incarnation))
        record = records[rng.choice(list(records))]
        if record.phase is Phase.STARTING:
            record.became_ready(now) if rng.random() < 0.7 else record.failed("start", now)
        elif record.phase is Phase.STOPPING:
            record.gone()
        elif record.phase is Phase.GIVEN_UP:
            record.retry()
    assert len(started) > 20


async def test_scaling_while_a_cut_off_removal_goes_on_is_refused_and_no_loop_ends(file: Path) -> None:
    world = World()
    async with lost_controller(world, file) as first:
        scaling = asyncio.create_task(first.operations.scale(1, 30.0))
        await until(lambda: "drain m-1 and hand over" in world.journal)
        scaling.cancel()
        await asyncio.wait({scaling})
    async with controller(world, state_file=file, wait=False) as second:
        await until(lambda: bool(second.operations.under_way))
        for count in (1, 2):
            with pytest.raises(Overloaded, match="undoing what was cut off with the controller is under way"):
                await second.operations.scale(count, 0.0)
        await until(lambda: not second.operations.under_way)
        await second.operations.scale(2, 0.0)
        assert ready(second, 2)()


async def test_a_group_whose_reload_outlived_its_controller_is_known_by_what_it_holds(file: Path) -> None:
    world = World()
    new = ModelConfig(name="m", path="/new", weight_version="2")
    async with lost_controller(world, file) as first:
        await first.drain("m-1", 0.5, hand_over=False)
    world.holds = {"m-1": new}
    async with controller(world, state_file=file, wait=False) as second:
        await until(lambda: world.journal[-1] == "router resumes m-1")
        assert second.wanted_model("m-1") == new
        assert second.wanted_model("m-0").weight_version == "1"

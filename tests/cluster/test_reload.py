"""Reloads by the controller around fake groups: what is drained how, which versions are wanted after a failure."""

import asyncio
import threading
from pathlib import Path

import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.cluster import until
from fakes.pool import World, controller, ready

from nori_cluster.cluster import reconcile, reload
from nori_cluster.cluster.admin_backend import ControllerAdmin
from nori_cluster.cluster.controller import Controller
from nori_cluster.cluster.reload import check_folder, next_model
from nori_cluster.config import ModelConfig
from nori_cluster.errors import CheckpointError, ConfigError, EngineFailure, NotFound, Overloaded

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(reload, "MOVED_SECONDS", 0.02)
    monkeypatch.setattr(reload, "POLL_SECONDS", 0.01)


def model(path: str, version: str) -> ModelConfig:
    return ModelConfig(name="m", path=path, weight_version=version)


def test_versions_count_on_and_a_half_done_reload_keeps_its_own() -> None:
    held = {"a": model("/1", "1"), "b": model("/1", "1")}
    assert next_model(held, "/2").weight_version == "2"
    assert next_model(held, "/1").weight_version == "2", "the same folder may hold other weights now"
    assert next_model(held, "/2", "best").weight_version == "best"
    half = held | {"a": model("/2", "2")}
    assert next_model(half, "/2") == half["a"]
    assert next_model(half, "/3").weight_version == "3"
    assert next_model(half, "/1") == half["b"], "the way back"
    with pytest.raises(ConfigError, match="weight version '1' is that of /1"):
        next_model(half, "/3", "1")
    with pytest.raises(ConfigError, match="absolute"):
        next_model(held, "x/y")


def test_a_folder_is_compared_before_anything_is_drained(tmp_path: Path) -> None:
    old, new = make_tiny_llama(tmp_path / "old"), make_tiny_llama(tmp_path / "new", seed=1)
    check_folder(old, new)
    other = make_tiny_llama(tmp_path / "other", intermediate=128)
    with pytest.raises(CheckpointError, match="intermediate_size is 128, the loaded model has 256"):
        check_folder(old, other)
    check_folder(tmp_path / "gone", other)


async def run(
    made: Controller, folder: Path, policy: str = "wait", *, grace: float = 0.1, max_unavailable: int = 1
) -> None:
    """By the admin plane; raises how it ended."""
    admin = ControllerAdmin(made)
    operation = await admin.reload("m", str(folder), "", policy, max_unavailable, grace)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while not operation.done:
            await asyncio.sleep(0.01)
            found = await admin.get_operation(operation.name)
            assert found is not None
            operation = found
    if operation.error_code:
        raise EngineFailure(operation.error_message)


def versions(made: Controller) -> list[str]:
    return [made.wanted_model(name).weight_version for name in sorted(made.records)]


async def shown(made: Controller) -> list[str]:
    return [group.weight_version for group in await ControllerAdmin(made).list_groups()]


async def test_every_group_in_turn_and_later_ones_too(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        world.left = 0
        await run(made, tmp_path)
        loads = [line for line in world.journal if line.startswith(("reload", "router", "resume"))]
        assert loads == [
            line
            for name in ("m-0", "m-1")
            for line in (f"router drains {name}", f"reload {name} 2", f"resume {name}", f"router resumes {name}")
        ]
        assert versions(made) == await shown(made) == ["2", "2"]
        world.newest("m-1").die()
        await until(lambda: world.newest("m-1").incarnation == 2)
        await until(ready(made, 2))
        assert world.newest("m-1").model.path == str(tmp_path)
        await made.operations.scale(3, 0.0)
        assert world.newest("m-2").model.weight_version == "2"
        assert world.newest("m-0").incarnation == 1


async def test_a_request_that_does_not_end_keeps_its_group_as_it_is(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        with pytest.raises(EngineFailure, match=r"m-0: 3 requests still run after 0.1 s, it keeps version 1; .*m-1"):
            await run(made, tmp_path)
        assert not any(line.startswith("reload") for line in world.journal)
        assert "drain m-0 and hand over" not in world.journal
        assert world.journal[-2:] == ["resume m-0", "router resumes m-0"]
        assert versions(made) == ["1", "1"]


async def test_continue_hands_over_while_there_is_a_group_of_the_old_weights(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        world.left = 0
        await run(made, tmp_path, "continue")
        assert [line for line in world.journal if "hand over" in line] == ["drain m-0 and hand over"]
        assert world.journal.index("drain m-0 and hand over") < world.journal.index("reload m-0 2")


async def test_continue_with_both_at_a_time_hands_over_to_nobody(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        world.left = 0
        await run(made, tmp_path, "continue", max_unavailable=2)
        assert not any("hand over" in line for line in world.journal)
        assert versions(made) == ["2", "2"]


async def test_continue_waits_until_what_was_given_up_has_a_place(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        world.left, world.waiting = 0, [2]
        with pytest.raises(EngineFailure, match="m-0: 2 requests still wait for a group with the weights that they"):
            await run(made, tmp_path, "continue")
        assert versions(made) == ["1", "1"]
        world.waiting = [2, 1, 0]
        await run(made, tmp_path, "continue", grace=5.0)
        assert world.waiting == [0]
        assert versions(made) == ["2", "2"]


async def test_abort_ends_what_runs(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        await run(made, tmp_path, "abort")
        assert [line for line in world.journal if "abort" in line] == ["abort m-0", "abort m-1"]
        assert versions(made) == ["2", "2"]


async def test_a_group_lost_over_it_comes_back_with_what_it_had_and_the_rest_is_not_touched(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        await made.operations.scale(3, 0.0)
        world.left = 0
        world.reloads["m-1"] = [EngineFailure("rank 0 failed: OSError: cannot be read")]
        with pytest.raises(EngineFailure) as told:
            await run(made, tmp_path)
        assert "m-1: rank 0 failed: OSError: cannot be read" in str(told.value)
        assert "weight versions now: m-0 2, m-1 1, m-2 1" in str(told.value)
        await until(lambda: world.newest("m-1").incarnation == 2)
        await until(ready(made, 3))
        assert world.newest("m-1").model == model("/m", "1")
        assert versions(made) == await shown(made) == ["2", "1", "1"]
        await run(made, tmp_path)  # goes on from there
        assert versions(made) == ["2", "2", "2"]
        assert [line for line in world.journal if line.startswith("reload m-0")] == ["reload m-0 2"]


async def test_what_cannot_be_loaded_is_refused_and_the_group_takes_work_again(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        world.left = 0
        world.reloads["m-0"] = [CheckpointError("rank 1: x is stored as F16")]
        with pytest.raises(EngineFailure, match="m-0: rank 1: x is stored as F16"):
            await run(made, tmp_path)
        assert world.journal[-1] == "router resumes m-0"
        assert world.newest("m-0").incarnation == 1


async def test_refused_at_once(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        with pytest.raises(NotFound, match="no model 'x'"):
            await admin.reload("x", "/", "", "wait", 1, None)
        with pytest.raises(ConfigError, match="max_unavailable"):
            await admin.reload("m", "/", "", "wait", 0, None)
        with pytest.raises(ConfigError, match="absolute"):
            await admin.reload("m", "a", "", "wait", 1, None)
        with pytest.raises(EngineFailure, match="does not exist"):
            await run(made, tmp_path / "nowhere")
        made.operations.under_way = "scaling"
        with pytest.raises(EngineFailure, match="scaling is under way"):
            await run(made, tmp_path)
        made.operations.under_way = ""
        assert world.journal == []


async def test_scaling_while_a_folder_is_compared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, compared, go_on = World(), threading.Event(), threading.Event()

    def slow(old: Path, new: Path) -> None:
        compared.set()
        go_on.wait(5)

    monkeypatch.setattr(reload, "check_folder", slow)
    async with controller(world) as made:
        world.left = 0
        reloading = asyncio.create_task(run(made, tmp_path))
        await until(compared.is_set)
        with pytest.raises(Overloaded, match="a reload of weights is under way"):
            await made.operations.scale(3, 0.0)
        with pytest.raises(EngineFailure, match="a reload of weights is under way"):
            await run(made, tmp_path)
        go_on.set()
        await reloading
        assert versions(made) == ["2", "2"]


async def test_an_incarnation_that_came_meanwhile_is_not_touched(tmp_path: Path) -> None:
    """Lost and back while its turn to be emptied had not come: it takes work, and nobody would resume it."""
    world = World()
    async with controller(world, replicas=3) as made:
        world.left, world.waiting = 0, [1]
        reloading = asyncio.create_task(run(made, tmp_path, "continue", grace=0.5, max_unavailable=2))
        await until(lambda: {"m-0", "m-1"} <= set(made.draining) and "drain m-0 and hand over" in world.journal)
        world.newest("m-1").die()
        await until(lambda: world.newest("m-1").incarnation == 2 and "m-1" in made.groups)
        world.waiting = [0]
        with pytest.raises(EngineFailure, match="m-1"):
            await reloading
        second = world.newest("m-1")
        assert second.told == []
        assert not made.draining
        assert made.wanted_model("m-1").weight_version == "1"


async def test_nobody_else_drains_or_resumes_a_group_in_its_turn(tmp_path: Path) -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        world.left, world.waiting = 0, [1]
        reloading = asyncio.create_task(run(made, tmp_path, "continue", grace=5.0))
        await until(lambda: "drain m-0 and hand over" in world.journal)
        for attempt in (admin.resume("m-0"), admin.drain("m-0", 0.0)):
            with pytest.raises(Overloaded, match="a reload of weights works on 'm-0'"):
                await attempt
        with pytest.raises(NotFound):
            await admin.resume("m-7")
        world.waiting = [0]
        await reloading
        await admin.resume("m-0")

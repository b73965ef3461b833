"""The controller around fake groups and a fake router: what it does when any of them fails, and how it ends."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.cluster import until
from fakes.pool import World, controller, ready

from nori_cluster.cluster import controller as controller_module
from nori_cluster.cluster import placement, reconcile, router_keeper
from nori_cluster.cluster.admin_backend import REMEMBERED_OPERATIONS, ControllerAdmin
from nori_cluster.cluster.reconcile import Phase
from nori_cluster.errors import CheckpointError, ConfigError, EngineFailure, NoriError, NotFound, Overloaded
from nori_cluster.routing.base import GroupRegistration, GroupReport, GroupRestarts, GroupState, GroupView, Restarts
from nori_cluster.rpc.admin_types import OperationInfo
from nori_cluster.types import GroupSpec

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(router_keeper, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(router_keeper, "SILENT_SECONDS", 0.1)


# -- groups ----------------------------------------------------------------------------------------------------------


async def test_a_lost_group_is_killed_whole_and_replaced() -> None:
    world = World()
    async with controller(world) as made:
        world.newest("m-1").die("rank 1: the process died")
        await until(lambda: world.newest("m-1").incarnation == 2)
        await until(ready(made, 2))
        assert world.journal == ["kill m-1"]
        assert made.records["m-1"].last_failure == "rank 1: the process died"
        assert made.records["m-0"].incarnation == 1
        assert (await made.state()).first_error is None, "it had started: launch need not give up"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CheckpointError("model.safetensors: cut off"), CheckpointError, "^model.safetensors: cut off$"),
        (TimeoutError(), EngineFailure, "m-1 did not start: TimeoutError"),
        (ValueError("odd"), EngineFailure, "m-1 did not start: odd"),
    ],
)
async def test_the_first_start_of_any_group_that_fails_is_told(
    error: Exception, kind: type[NoriError], text: str
) -> None:
    """Also when another group is up already, and whatever the exception is; everything of it is ended."""
    world = World()
    world.failures["m-1"] = [error]
    async with controller(world, wait=False) as made:
        await until(lambda: "kill m-1" in world.journal)
        with pytest.raises(kind, match=text):
            raise (await made.state()).first_error or AssertionError("no first error")
        await until(ready(made, 2))  # the place is not lost: launch decides


async def test_a_crash_loop_ends_until_somebody_resumes_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "LONGEST_BACKOFF", 0.02)
    world = World()
    async with controller(world) as made:
        world.failures["m-0"] = [EngineFailure("no memory")] * (reconcile.MAX_FAILURES - 1)
        world.newest("m-0").die()
        await until(lambda: made.records["m-0"].phase is Phase.GIVEN_UP)
        assert made.records["m-0"].incarnation == reconcile.MAX_FAILURES
        await asyncio.sleep(0.1)
        assert made.records["m-0"].phase is Phase.GIVEN_UP
        admin = ControllerAdmin(made)
        last = admin.past_events(0)[-1]
        assert (last.kind, last.group) == ("given up", "m-0")
        assert [event.message for event in admin.past_events(0) if event.kind == "lost"][-1] == "no memory"
        await admin.resume("m-0")
        await until(ready(made, 2))
        assert made.records["m-0"].failures == 0


@pytest.mark.parametrize("when", ["before", "while it starts"])
async def test_a_full_disk_is_told_once_and_the_group_starts_when_there_is_room(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for the processes in silence. It is no failure of the group."""
    free = placement.LOG_BYTES
    monkeypatch.setattr(placement.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(reconcile, "PLACE_AGAIN", 0.05)
    monkeypatch.setattr(controller_module, "DISK_SECONDS", 0.02)
    monkeypatch.setattr(controller_module, "TICK_SECONDS", 0.02)
    world = World()
    async with controller(world, state_file=tmp_path / "state") as made:
        if when == "before":
            free -= 1
            world.newest("m-1").die()
        else:
            world.slow = {"m-1"}
            world.newest("m-1").die()
            await until(lambda: world.newest("m-1").incarnation == 2)
            free -= 1
        await until(lambda: bool(made.records["m-1"].unplaceable))
        await asyncio.sleep(0.3)
        tries = 1 if when == "before" else 2
        record = made.records["m-1"]
        assert (record.incarnation, record.lost, record.phase) == (tries, 1, Phase.ABSENT)
        told = [event for event in made.events.past(0) if event.kind == "unplaceable"]
        text = f"needs 2 MiB in {tmp_path} for its logs, and the disk is full"
        assert [(event.group, event.message) for event in told] == [("m-1", text)]
        shown = {group.name: group for group in await ControllerAdmin(made).list_groups()}["m-1"]
        assert shown.last_failure == f"no room: it {text}"
        assert made.records["m-0"].phase is Phase.READY
        world.slow = set()
        free += 1
        await until(ready(made, 2))
        assert made.records["m-1"].unplaceable == ""


def view(name: str, running: int) -> GroupView:
    facts = GroupRegistration(
        group_id=name, incarnation=1, model="m", address="h:1", kv_blocks=8,
        max_context_tokens=64, max_running_sequences=4, max_batched_tokens=64,
    )  # fmt: skip
    report = GroupReport(running_sequences=running)
    return GroupView(registration=facts, state=GroupState.DRAINING, report=report)


async def test_a_drain_ends_when_the_load_that_is_shown_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.left = 0  # the group is empty; the router's last report of it is from before
    world.views = [view("m-0", 1), view("m-1", 2)]
    async with controller(world) as made:
        drain = asyncio.create_task(made.drain("m-0", 30.0))
        await asyncio.sleep(0.3)
        assert not drain.done()
        world.views = [view("m-0", 0), view("m-1", 2)]
        assert await asyncio.wait_for(drain, 1.0) == 0
        assert made.events.past(0)[-1].kind == "drained"
        world.views = [view("m-0", 1)]  # a router that hears no report holds up nobody for long
        monkeypatch.setattr(controller_module, "REPORT_SECONDS", 0.1)
        assert await asyncio.wait_for(made.drain("m-0", 30.0), 1.0) == 0


async def test_events_are_followed_live() -> None:
    world = World()
    async with controller(world) as made:
        admin, seen = ControllerAdmin(made), []

        async def follow() -> None:
            async for event in admin.follow_events(0):
                seen.append((event.sequence, event.group, event.kind, event.message))

        task = asyncio.create_task(follow())
        await until(lambda: len(seen) == 4)
        world.newest("m-1").die("rank 1 (pid 7) is gone; it is in step 12")
        await until(lambda: len(seen) == 7)
        task.cancel()
        assert [number for number, *_ in seen] == list(range(1, 8))
        assert [kind for _, _, kind, _ in seen[4:]] == ["lost", "starting", "ready"]
        assert seen[4][3] == "rank 1 (pid 7) is gone; it is in step 12"


async def test_a_group_that_cannot_be_ended_does_not_block_its_place() -> None:
    world = World()
    world.kill_fails = True
    async with controller(world) as made:
        world.newest("m-0").die()
        await until(lambda: world.newest("m-0").incarnation == 2)
        await until(ready(made, 2))


async def test_gateways_are_told_of_restarts() -> None:
    """By the router, which hears them from the controller; a router that follows hears all of them again."""
    world = World()
    async with controller(world) as made:
        world.newest("m-1").die()
        await until(lambda: world.newest("m-1").incarnation == 2)
        await until(ready(made, 2))
        await made.operations.restart_groups(1, 0.0)

        def group(name: str, lost: int) -> GroupRestarts:
            return GroupRestarts(group_id=name, model="m", lost=lost, on_purpose=1)

        groups = (group("m-0", 0), group("m-1", 1))
        await until(lambda: world.restarts == Restarts(groups=groups))
        world.routers[0].dead = True
        await until(lambda: world.restarts == Restarts(routers=1, groups=groups))


# -- the router ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead", "hangs"])
async def test_a_lost_router_is_replaced_on_its_port_until_it_works(how: str) -> None:
    world = World()
    async with controller(world) as made:
        address = made._router.address
        world.port_taken = True
        setattr(world.routers[0], how, True)
        await until(lambda: len(world.routers) > 3)
        with pytest.raises(NoriError, match="another one starts"):
            await made.router_snapshot()
        world.newest("m-0").die()  # groups are looked after meanwhile
        await until(lambda: world.newest("m-0").incarnation == 2)
        world.port_taken = False
        await until(lambda: made._router._router is world.routers[-1])
        await made.router_snapshot()
        assert made._router.address == address
        assert all(router.dead for router in world.routers[:-1]), "routers that never served were left behind"


# -- stop ------------------------------------------------------------------------------------------------------------


async def test_stop_drains_then_stops_then_kills() -> None:
    world = World()
    async with controller(world) as made:
        await made.stop(0.5)
        order = {name: [entry for entry in world.journal if entry.endswith(name)] for name in ("m-0", "m-1")}
        assert order == {name: [f"drain {name}", f"stop {name}", f"kill {name}"] for name in order}
        assert world.journal[-1] == "router killed"
        assert [record.incarnation for record in made.records.values()] == [1, 1]


async def test_stop_while_groups_start_ends_them() -> None:
    world = World()
    world.slow = {"m-0", "m-1"}
    async with controller(world, wait=False) as made:
        await until(lambda: len(world.made) == 2)
        async with asyncio.timeout(2):
            await made.stop(30.0)
        assert sorted(world.journal) == ["kill m-0", "kill m-1", "router killed"]
        assert not made.groups


async def test_stop_outlives_a_group_that_dies_while_it_drains() -> None:
    world = World()
    async with controller(world) as made:
        stopping = asyncio.create_task(made.stop(5.0))
        await until(lambda: "drain m-1" in world.journal)
        world.newest("m-0").die()
        world.newest("m-1").drains.set_result(0)
        async with asyncio.timeout(2):
            await stopping
        assert not made.groups
        assert len(world.made) == 2, "nothing was started again"


# -- the admin plane -------------------------------------------------------------------------------------------------


async def ended(admin: ControllerAdmin, operation: OperationInfo) -> OperationInfo:
    async with asyncio.timeout(2):
        while True:
            now = await admin.get_operation(operation.name)
            assert now is not None
            if now.done:
                return now
            await asyncio.sleep(0.005)


async def test_drains_end_as_operations() -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        left = await ended(admin, await admin.drain("m-0", 0.5))
        assert left.error_code == 4
        assert left.error_message == "3 sequences still run after 0.5 s; the group takes no new ones"
        world.newest("m-1").drains.set_result(0)
        done = await ended(admin, await admin.drain("m-1", None))
        assert (done.error_code, done.error_message) == (0, "")
        assert world.journal == [
            "router drains m-0", "drain m-0 and hand over", "router drains m-1", "drain m-1",
        ]  # fmt: skip
        await admin.resume("m-0")
        assert world.journal[-2:] == ["resume m-0", "router resumes m-0"]
        kinds = [(event.group, event.kind) for event in admin.past_events(0)]
        assert kinds[-5:] == [
            ("m-0", "draining"), ("m-0", "drained"), ("m-1", "draining"), ("m-1", "drained"), ("m-0", "resumed"),
        ]  # fmt: skip
        with pytest.raises(NotFound, match="there are: m-0, m-1"):
            await admin.drain("m-9", None)
        assert await admin.get_operation("drain-m-9-1") is None


async def test_the_drain_of_a_group_that_dies_ends_with_an_error() -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        operation = await admin.drain("m-0", 30.0)
        await until(lambda: any("drain m-0" in entry for entry in world.journal))
        world.slow = {"m-0"}
        world.newest("m-0").die()
        assert (await ended(admin, operation)).error_message == "the engine process died"
        await until(lambda: made.records["m-0"].phase is Phase.STARTING)
        with pytest.raises(Overloaded, match="starting; try again when it is ready"):
            await admin.drain("m-0", 30.0)


async def test_an_operation_forgotten_while_it_runs_harms_nobody() -> None:
    world = World()
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        first = await admin.drain("m-0", 30.0)
        for _ in range(REMEMBERED_OPERATIONS):
            await admin.drain("m-1", 0.5)
        assert await admin.get_operation(first.name) is None
        world.newest("m-0").drains.set_result(0)
        again = await ended(admin, await admin.drain("m-0", 30.0))
        assert again.error_code == 0


async def test_groups_are_shown_in_every_state() -> None:
    world = World()
    world.failures["m-1"] = [ConfigError("no memory")]
    async with controller(world) as made:
        admin = ControllerAdmin(made)
        before = {group.name: group for group in await admin.list_groups()}
        assert before["m-0"].state is GroupState.STARTING, "the router has not seen it"
        assert before["m-1"].last_failure == "no memory"
        report = GroupReport(step=7, running_sequences=2, free_kv_blocks=5, generated_tokens=9)
        for name, incarnation in (("m-0", 1), ("m-1", 1)):
            facts = GroupRegistration(
                group_id=name, incarnation=incarnation, model="m", address="h:1", kv_blocks=8,
                max_context_tokens=64, max_running_sequences=4, max_batched_tokens=64,
            )  # fmt: skip
            world.views.append(GroupView(registration=facts, state=GroupState.BUSY, report=report))
        groups = {group.name: group for group in await admin.list_groups()}
        assert (groups["m-0"].state, groups["m-0"].step, groups["m-0"].load.total_kv_blocks) == (GroupState.BUSY, 7, 8)
        assert [worker.pid for worker in groups["m-0"].workers] == [11, 12]
        assert groups["m-1"].state is GroupState.STARTING, "the view is of the incarnation that is lost"
        status = await admin.get_status()
        assert (status.models[0].desired_groups, status.models[0].ready_groups) == (2, 1)
        assert status.models[0].load.running_sequences == 2
        assert status.gateways[0].open_requests == 2
        world.slow = {"m-0"}
        world.newest("m-0").die()
        await until(lambda: made.records["m-0"].phase is not Phase.READY)
        gone = {group.name: group for group in await admin.list_groups()}["m-0"]
        assert gone.state in (GroupState.DEAD, GroupState.STARTING)
        world.routers[-1].dead = world.port_taken = True
        with pytest.raises(NoriError, match="router"):
            await admin.get_status()


async def test_a_group_tells_what_a_report_needs() -> None:
    world = World()
    async with controller(world) as made:
        world.newest("m-0").spec = GroupSpec(
            model="m", vocab_size=9, max_model_len=9, num_blocks=9, block_size=16, eos_token_ids=(2,),
            dtype="bfloat16", numerics_id="n", weights_id="w1",
        )  # fmt: skip
        groups = {group.name: group for group in await ControllerAdmin(made).list_groups()}
        facts = dict(groups["m-0"].facts)
        flags = json.loads(facts.pop("flags"))
        assert facts == {"revision": "w1", "weights": "bfloat16", "kv_cache": "bfloat16"}
        assert flags["replicas"] == 2
        assert "model" not in flags
        assert groups["m-1"].facts == {}

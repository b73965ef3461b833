"""Processes of groups and the router killed or stopped; groups drained and rolled."""

import asyncio
import functools
import os
import signal
import time

from drills.load import Load
from drills.stage import Stage

from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import GroupInfo

REPORT_SECONDS = 2.0  # after which a group's report is of now


async def kill_rank(stage: Stage, load: Load) -> str:
    """SIGKILL of one rank of a group."""
    return await _hit_rank(stage, signal.SIGKILL)


async def kill_engine(stage: Stage, load: Load) -> str:
    """SIGKILL of a group's engine process."""
    return await _hit_engine(stage, signal.SIGKILL)


async def stop_rank(stage: Stage, load: Load) -> str:
    """SIGSTOP of one rank: alive and silent."""
    return await _hit_rank(stage, signal.SIGSTOP)


async def stop_engine(stage: Stage, load: Load) -> str:
    """SIGSTOP of an engine process."""
    return await _hit_engine(stage, signal.SIGSTOP)


async def _hit_rank(stage: Stage, number: signal.Signals) -> str:
    group = await stage.somebody()
    stage.hit(group, stage.rng.choice(group.workers).pid, number)
    return ""


async def _hit_engine(stage: Stage, number: signal.Signals) -> str:
    group = await stage.somebody()
    stage.hit(group, group.engine_pid, number)
    return ""


async def kill_both_groups(stage: Stage, load: Load) -> str:
    """No group is ready for a while: streams wait for one."""
    for group in await stage.groups():
        stage.hit(group, group.engine_pid, signal.SIGKILL)
    return ""


async def kill_router(stage: Stage, load: Load) -> str:
    """SIGKILL of the router: another takes its place and port."""
    (pid,) = await asyncio.to_thread(stage.pids_of, "RouterActor")
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    while True:
        now = await asyncio.to_thread(stage.pids_of, "RouterActor")
        if now and pid not in now:
            return f"another router process after {time.monotonic() - begin:.1f} s"
        assert time.monotonic() - begin < 30.0, "no other router within 30 s"
        await asyncio.sleep(0.1)


async def drain_and_resume(stage: Stage, load: Load) -> str:
    """What runs is handed over after half a second."""
    name = (await stage.somebody()).name
    await stage.drain(name, 0.5)
    await stage.admin(lambda a: a.resume(name))
    return ""


async def drain_long(stage: Stage, load: Load) -> str:
    """Requests that run for long end in their group, which takes no new ones meanwhile."""
    await asyncio.sleep(1.0)
    group = max(await stage.groups(), key=lambda g: g.load.running_sequences)
    assert group.load.running_sequences, "nothing runs in any group"
    begin, finished = time.monotonic(), len(load.outcomes)
    await stage.drain(group.name, 50.0)
    took = time.monotonic() - begin
    deadline = time.monotonic() + REPORT_SECONDS
    while (now := await _again(stage, group.name)).load.running_sequences:
        assert time.monotonic() < deadline, f"{now.load.running_sequences} sequences run in a drained group"
        await asyncio.sleep(0.1)
    assert now.engine_pid == group.engine_pid, "the drained group was replaced"
    served = len(load.outcomes) - finished
    await stage.admin(lambda a: a.resume(group.name))
    return f"{group.load.running_sequences} long requests ended in their group within {took:.1f} s; {served} in all"


async def _again(stage: Stage, name: str) -> GroupInfo:
    return next(group for group in await stage.groups() if group.name == name)


async def rollout_restart(stage: Stage, load: Load) -> str:
    """`nori rollout restart`: every group anew, one after the other, what runs handed over after half a second."""
    before = {group.name: group.engine_pid for group in await stage.groups()}
    begin = time.monotonic()
    operation = await stage.admin(lambda admin: admin.wait_operation(admin.restart("tiny", 1, 0.5).name, 90.0))
    took = time.monotonic() - begin
    assert operation.done, "the restart does not end"
    assert not operation.error_code, operation.error_message
    await stage.whole()
    kept = [group.name for group in await stage.groups() if group.engine_pid == before[group.name]]
    assert not kept, f"{kept} were not restarted"
    return f"{len(before)} groups anew in {took:.1f} s"


async def scale_down_and_up(stage: Stage, load: Load) -> str:
    """One group less, its work handed over, and one more again."""
    count = len(await stage.groups())
    for wanted in (count - 1, count):
        begun = await stage.admin(functools.partial(AdminClient.scale, model="tiny", count=wanted))
        operation = await stage.admin(functools.partial(AdminClient.wait_operation, name=begun.name, timeout=60.0))
        assert operation.done, f"scaling to {wanted} does not end"
        assert not operation.error_code, operation.error_message
        await stage.whole()
        now = len(await stage.groups())
        assert now == wanted, f"{now} groups, not {wanted}"
    return ""

"""The front door and the head lost: a gateway, the controller, Ray's own processes. Each gives a verdict of its own.

Requests of a gateway end with it, and all of them with Ray's head: these drills say how many, and that it is bounded.
"""

import asyncio
import os
import signal
import time

import httpx
from drills.load import REFUSED, Load, ask
from drills.stage import FIRST, SECOND, Stage

BOUND = 120.0  # seconds within which a cluster that lost its head is whole again or has ended


async def kill_gateway(stage: Stage, load: Load) -> str:
    """kill -9: its streams end with it, the other gateway's go on; the router and the groups forget it."""
    assert stage.second is not None
    known = await _gateways(stage)
    running = load.running[SECOND]
    load.leaves(SECOND)
    os.kill(stage.second.pid, signal.SIGKILL)
    begin = time.monotonic()
    while len(await _gateways(stage)) >= len(known):
        assert time.monotonic() - begin < 30.0, "the router knows the lost gateway after 30 s"
        await asyncio.sleep(0.1)
    forgotten = time.monotonic() - begin
    await asyncio.to_thread(stage.start_second)
    await _answers(stage, load)
    return (
        f"{running} streams ran in it, {len(load.ended_with_gateway)} ended with it; "
        f"forgotten after {forgotten:.1f} s; its successor answers as before"
    )


async def stop_gateway(stage: Stage, load: Load) -> str:
    """SIGTERM: its streams end whole within the drain time, new ones are refused, the process ends with 0."""
    assert stage.second is not None
    running = load.running[SECOND]
    load.leaves(SECOND)
    os.kill(stage.second.pid, signal.SIGTERM)
    begin = time.monotonic()
    await asyncio.sleep(0.3)
    async with httpx.AsyncClient(base_url=stage.gateways[SECOND], timeout=10.0) as client:
        late = await ask(client, 0, 10)
    assert late.status in (*REFUSED, 0), f"a draining gateway took a request: {late.status}"
    code = await asyncio.to_thread(stage.second.wait, 30.0)
    took = time.monotonic() - begin
    while load.running[SECOND]:
        await asyncio.sleep(0.05)
    cut = len(load.ended_with_gateway)
    assert code == 0, f"its exit code is {code}"
    assert not cut, f"{cut} of {running} streams did not end whole"
    await asyncio.to_thread(stage.start_second)
    await _answers(stage, load)
    return (
        f"{running} streams ran in it and ended whole; exit code 0 after {took:.1f} s; a late request got {late.status}"
    )


async def kill_controller(stage: Stage, load: Load) -> str:
    """Either another takes over and everything goes on, or the cluster ends in order with exit code 1."""
    stage.remember()
    (pid,) = await asyncio.to_thread(stage.pids_of, "Controller")
    groups = await stage.groups()
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    while stage.exit_code() is None and not await _controlled(stage, pid):
        assert time.monotonic() - begin < BOUND, f"neither another controller nor an end within {BOUND:g} s"
        await asyncio.sleep(0.2)
    took = time.monotonic() - begin
    if stage.exit_code() is not None:
        return await _ended(stage, load, begin)
    await stage.whole()
    kept = {g.engine_pid for g in groups} & {g.engine_pid for g in await stage.groups()}
    group = await stage.somebody()  # does the new one watch them?
    stage.hit(group, group.workers[0].pid, signal.SIGKILL)
    await stage.whole()
    return (
        f"RESTARTED: another controller after {took:.1f} s, {len(kept)} of {len(groups)} groups kept their processes; "
        f"a rank killed later was replaced"
    )


async def kill_head(stage: Stage, load: Load) -> str:
    """gcs_server and raylet killed: what is lost is counted, and within two minutes the cluster is whole or ended."""
    stage.remember()
    pids = [pid for name in ("gcs_server", "raylet") for pid in await asyncio.to_thread(stage.pids_of, name)]
    assert len(pids) == 2, f"{len(pids)} processes of Ray's head"
    begin = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while stage.exit_code() is None:
        assert time.monotonic() - begin < BOUND, (
            f"the cluster without its head neither ends nor recovers in {BOUND:g} s"
        )
        await asyncio.sleep(0.2)
    return await _ended(stage, load, begin)


async def _ended(stage: Stage, load: Load, begin: float) -> str:
    """The cluster, hit at `begin`, has ended by itself: with an error, leaving nothing, its streams told."""
    took = time.monotonic() - begin
    for gateway in (FIRST, SECOND):
        load.leaves(gateway)
    stage.ended = True
    assert stage.second is not None
    await asyncio.to_thread(stage.second.end)  # ours: it would wait for groups
    while sum(load.running.values()):
        await asyncio.sleep(0.1)
    code = stage.exit_code()
    assert code == 1, f"the cluster ended with exit code {code}, not 1"
    deadline = time.monotonic() + 15.0
    while left := await asyncio.to_thread(stage.left_behind):
        assert time.monotonic() < deadline, f"the cluster ended and left processes {left} behind"
        await asyncio.sleep(0.5)
    whole = [o for o in load.outcomes if o.whole and o.at > begin]
    cut = [o for o in load.ended_with_gateway if o.at > begin]
    return (
        f"ENDED: exit code 1 after {took:.1f} s, no process left; {len(whole)} requests were still answered whole, "
        f"{len(cut)} accepted ones ended with it, each a right beginning"
    )


async def _gateways(stage: Stage) -> list[str]:
    status = await stage.admin(lambda admin: admin.get_status())
    return [gateway.gateway_id for gateway in status.gateways]


async def _answers(stage: Stage, load: Load) -> None:
    async with httpx.AsyncClient(base_url=stage.gateways[SECOND], timeout=60.0) as client:
        outcome = await ask(client, 1, load.tokens, SECOND)
    assert outcome.whole and load.is_right(outcome), f"the new gateway: {outcome.error or 'other tokens'}"


async def _controlled(stage: Stage, lost: int) -> bool:
    """Whether another controller answers."""
    pids = await asyncio.to_thread(stage.pids_of, "Controller")
    if not set(pids) - {lost}:
        return False
    try:
        await stage.groups()
    except Exception:
        return False
    return True

"""Scaling, a rolling restart and a lost controller, each under streams that must not notice."""

import asyncio
import concurrent.futures
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import Groups
from e2e.test_cluster import complete, nori, stream_of, undisturbed
from ray.util.placement_group import placement_group_table

from nori_cluster.cluster import processes
from nori_cluster.cluster.launch import Cluster
from nori_cluster.cluster.placement import Unplaceable
from nori_cluster.cluster.worker_group import WorkerGroup
from nori_cluster.config import GroupConfig, ModelConfig, ParallelConfig
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.admin import AdminClient

pytestmark = pytest.mark.e2e

UP = (GroupState.READY, GroupState.BUSY)


def every_group_works(http: httpx.Client, groups: Groups) -> None:
    """A group that has just started is ready before every gateway has a connection to it."""
    deadline = time.monotonic() + 20.0
    while not all(group.step for group in groups.read()):
        assert time.monotonic() < deadline, groups.read()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: complete(http), range(8)))


@contextmanager
def streams(http: httpx.Client, groups: Groups, count: int = 4) -> Iterator[None]:
    """Streams that run on every group while the block does its work, and say what they say undisturbed."""
    every_group_works(http, groups)
    groups.until_idle(10.0)
    whole = undisturbed(http)[:count]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(stream_of, http, request) for request in range(count)]
        groups.until(lambda now: all(g.load.running_sequences for g in now), 10.0, "all groups run")
        yield
        ends = [future.result() for future in asked]
    for request, (ids, events) in enumerate(ends):
        assert ids == whole[request], f"stream {request} says something else than undisturbed"
        assert events[-1] == {"done": True}


def command(cluster: Cluster, *arguments: str) -> Any:
    done = nori(*arguments, "--admin", cluster.admin_address, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_scale_up_and_down_under_streams(cluster: Cluster, http: httpx.Client, groups: Groups) -> None:
    with streams(http, groups):
        assert command(cluster, "scale", "tiny", "3")["done"]
        assert {g.name for g in groups.read()} == {"tiny-0", "tiny-1", "tiny-2"}
    groups.until(lambda now: all(g.state in UP for g in now), 5.0, "the router sees all three")
    pids = next([g.engine_pid, *(w.pid for w in g.workers)] for g in groups.read() if g.name == "tiny-2")
    with streams(http, groups, 8):
        assert command(cluster, "scale", "tiny", "2")["done"]
    assert {g.name for g in groups.read()} == {"tiny-0", "tiny-1"}
    assert not any(map(processes.is_alive, pids))
    kinds = [event.kind for event in groups.events() if event.group == "tiny-2"]
    assert kinds == ["starting", "ready", "draining", "drained", "removed"]
    done = nori("scale", "tiny", "17", "--admin", cluster.admin_address)
    assert done.returncode != 0
    assert "a host holds at most 16 groups, not 17" in done.stderr


def test_a_group_for_which_there_is_no_room_says_what_is_missing(cluster: Cluster, tiny_folder: Path) -> None:
    config = GroupConfig(
        model=ModelConfig(name="tiny", path=str(tiny_folder)),
        parallel=ParallelConfig(tensor_parallel_size=500, device="cpu", threads=1),
    )
    group = WorkerGroup("huge-0", 1, config, host="127.0.0.1", port=0, router="127.0.0.1:1")
    began = time.monotonic()

    async def start() -> None:
        try:
            await group.start()
        finally:
            group.kill()

    with pytest.raises(Unplaceable, match=r"needs \{CPU: 501\} on one node, the largest free is \{CPU: \d+\}"):
        asyncio.run(start())
    assert time.monotonic() - began < 30
    assert group._placement is not None
    assert placement_group_table(group._placement)["state"] == "REMOVED"


def test_a_rolling_restart_under_streams(cluster: Cluster, http: httpx.Client, groups: Groups) -> None:
    before = {g.name: g for g in groups.read()}
    with streams(http, groups):
        assert command(cluster, "rollout", "restart", "--grace", "0")["done"]
    for group in groups.until(lambda now: all(g.state in UP for g in now), 10.0, "both serve"):
        old = before[group.name]
        assert group.engine_pid != old.engine_pid
        assert group.incarnation == old.incarnation + 1
        assert (group.failures, group.restarts) == (old.failures, old.restarts + 1)


def test_a_lost_controller_is_replaced_under_streams(cluster: Cluster, http: httpx.Client, groups: Groups) -> None:
    """Every process of every group is the one from before, and streams neither end nor pause."""
    before = {g.name: [g.engine_pid, *(w.pid for w in g.workers)] for g in groups.read()}
    router = cluster._ask("router_pid")
    with AdminClient(cluster.admin_address) as admin:
        counted = admin.get_status().controller_restarts
    with streams(http, groups):
        killed = time.monotonic()
        os.kill(cluster._controller_pid, signal.SIGKILL)
        watching = threading.Thread(target=cluster.look)
        watching.start()
        watching.join(30.0)
        took = time.monotonic() - killed
        assert {g.name: [g.engine_pid, *(w.pid for w in g.workers)] for g in groups.read()} == before
    print(f"adopted {took:.2f} s after the loss, {cluster.takeover_seconds:.2f} s after its notice")
    assert took < 10.0
    assert cluster._ask("router_pid") == router
    with AdminClient(cluster.admin_address) as admin:
        assert admin.get_status().controller_restarts == counted + 1
    assert [event.group for event in groups.events()][-2:] == ["tiny-0", "tiny-1"]
    assert [event.kind for event in groups.events()][-2:] == ["adopted", "adopted"]
    doomed = groups.read()[0]
    os.kill(doomed.engine_pid, signal.SIGKILL)  # and they are watched again
    groups.until(
        lambda now: all(g.state in UP and g.engine_pid not in (0, doomed.engine_pid) for g in now), 60.0, "it is back"
    )
    bereft = groups.read()[1]
    os.kill(bereft.workers[1].pid, signal.SIGKILL)  # a rank that was adopted: its end is seen, not its call's
    groups.until(lambda now: now[1].failures > bereft.failures, 10.0, "the loss of a rank is seen")
    groups.until(lambda now: all(g.state in UP for g in now), 60.0, "all are back")

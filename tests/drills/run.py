"""Drills on a real cluster under load: processes killed, stopped, drained. `make drills`, `make drills-short`.

Passed = no accepted request lost, no token doubled or changed, no pause over 10 s, everything back without a hand.
Batch-invariant mode, so that tokens can be compared with an undisturbed run. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drills.load import Load
from fakes.checkpoints import make_tiny_llama

from nori_cluster.cluster.launch import Cluster
from nori_cluster.config import (
    CacheConfig,
    ClusterConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    Ports,
    SchedulerConfig,
    SpeculativeConfig,
)
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import GroupInfo

ANY_PORTS = Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0)
LONGEST_GAP = 10.0
UP = (GroupState.READY, GroupState.BUSY)


class Stage:
    """The cluster under test, with the hands that a drill needs."""

    def __init__(self, folder: Path, groups: int, rng: random.Random) -> None:
        self.rng = rng
        group = GroupConfig(
            model=ModelConfig(name="tiny", path=str(folder), dtype="float32"),
            cache=CacheConfig(num_blocks=96),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=256),
            parallel=ParallelConfig(tensor_parallel_size=2, device="cpu", threads=1, heartbeat_timeout=3.0),
            numerics=NumericsConfig(batch_invariant=True),
            speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1),
        )
        self.doomed: dict[str, int] = {}  # group → the engine process that must not come back
        self.cluster = Cluster(ClusterConfig(group=group, replicas=groups, ports=ANY_PORTS, drain_timeout=10.0))

    def groups(self) -> list[GroupInfo]:
        with AdminClient(self.cluster.admin_address) as admin:
            return list(admin.list_groups())

    def admin(self, call: Callable[[AdminClient], Any]) -> Any:
        with AdminClient(self.cluster.admin_address, timeout=60.0) as admin:
            return call(admin)

    def somebody(self) -> GroupInfo:
        """A group that takes work."""
        return self.rng.choice([group for group in self.groups() if group.state in UP])

    def hit(self, group: GroupInfo, pid: int, number: signal.Signals) -> None:
        """Signal a process of the group, which must be replaced for it."""
        self.doomed[group.name] = group.engine_pid
        os.kill(pid, number)

    async def whole(self, timeout: float = 90.0) -> None:
        """Until every group takes work, those that were hit with new processes; a router that is being replaced is
        waited out."""
        async with asyncio.timeout(timeout):
            while True:
                try:
                    groups = await asyncio.to_thread(self.groups)
                    if all(g.state in UP and g.engine_pid not in (0, self.doomed.get(g.name)) for g in groups):
                        self.doomed.clear()
                        return
                except Exception as error:  # the admin plane may be between two routers
                    print(f"  … {error}", file=sys.stderr)
                await asyncio.sleep(0.2)


async def kill_rank(stage: Stage) -> None:
    group = stage.somebody()
    stage.hit(group, stage.rng.choice(group.workers).pid, signal.SIGKILL)


async def kill_engine(stage: Stage) -> None:
    group = stage.somebody()
    stage.hit(group, group.engine_pid, signal.SIGKILL)


async def stop_rank(stage: Stage) -> None:
    group = stage.somebody()
    stage.hit(group, stage.rng.choice(group.workers).pid, signal.SIGSTOP)


async def stop_engine(stage: Stage) -> None:
    group = stage.somebody()
    stage.hit(group, group.engine_pid, signal.SIGSTOP)


async def kill_router(stage: Stage) -> None:
    os.kill(await asyncio.to_thread(stage.cluster._ask, "router_pid"), signal.SIGKILL)
    await asyncio.sleep(1.0)


async def drain_and_resume(stage: Stage) -> None:
    name = stage.somebody().name
    operation = await asyncio.to_thread(stage.admin, lambda a: a.wait_operation(a.drain(name, 0.5).name, 30.0))
    assert operation.done and not operation.error_code, operation.error_message
    await asyncio.to_thread(stage.admin, lambda a: a.resume(name))


async def restart_every_group(stage: Stage) -> None:
    """Drain, kill, wait until it is back; one after the other."""
    for group in await asyncio.to_thread(stage.groups):
        await asyncio.to_thread(stage.admin, lambda a, g=group: a.wait_operation(a.drain(g.name, 0.5).name, 30.0))
        stage.hit(group, group.engine_pid, signal.SIGKILL)
        await stage.whole()


async def kill_both_groups(stage: Stage) -> None:
    """No group is ready for a while: streams wait for one."""
    for group in await asyncio.to_thread(stage.groups):
        stage.hit(group, group.engine_pid, signal.SIGKILL)


Drill = Callable[[Stage], Awaitable[None]]
SHORT: list[Drill] = [kill_rank, kill_engine] * 3 + [stop_rank, kill_router, drain_and_resume]
LONG: list[Drill] = [kill_rank] * 25 + [kill_engine] * 25 + [stop_rank] * 3 + [stop_engine] * 3 + [kill_router] * 3
LONG += [drain_and_resume] * 3 + [restart_every_group, kill_both_groups]
MAY_PAUSE = (kill_both_groups,)  # no other ready group exists


async def run(stage: Stage, drills: list[Drill], streams: int, tokens: int) -> dict[str, Any]:
    report: dict[str, Any] = {"drills": 0, "requests": 0, "lost": 0, "changed": 0, "refused": 0, "longest_gap_s": 0.0}
    table: dict[str, dict[str, Any]] = {}
    for number, drill in enumerate(drills):
        load = Load(stage.cluster.http_url, streams, tokens)
        if number == 0:
            await load.learn()
            expected = load._expected
        load._expected = expected
        load.start()
        await asyncio.sleep(0.5 + stage.rng.random())
        begin = time.monotonic()
        await drill(stage)
        await stage.whole()
        recovery = time.monotonic() - begin
        await load.stop()
        row = table.setdefault(
            drill.__name__, {"drills": 0, "requests": 0, "lost": 0, "changed": 0, "gap_s": 0.0, "recovery_s": 0.0}
        )
        gap = max((outcome.gap for outcome in load.outcomes), default=0.0)
        for target in (report, row):
            target["drills"] += 1
            target["requests"] += len(load.outcomes)
            target["lost"] += len(load.lost)
            target["changed"] += len(load.changed)
        report["refused"] += load.refused
        row["gap_s"] = round(max(row["gap_s"], gap), 2)
        row["recovery_s"] = round(max(row["recovery_s"], recovery), 1)
        if drill not in MAY_PAUSE:
            report["longest_gap_s"] = round(max(report["longest_gap_s"], gap), 2)
        print(
            f"{number + 1:3d}/{len(drills)} {drill.__name__:20} {len(load.outcomes):4d} requests, "
            f"{len(load.lost)} lost, {len(load.changed)} changed, "
            f"longest pause {gap:.2f} s, whole again after {recovery:.1f} s",
            flush=True,
        )
        for outcome in load.lost[:3]:
            print(f"      lost: kind {outcome.kind}: {outcome.error or 'no finish'}", flush=True)
    return report | {"by_drill": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="9 drills instead of 64")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny", max_positions=512)
        stage = Stage(model, options.groups, random.Random(options.seed))
        stage.cluster.start()
        try:
            drills = SHORT if options.short else LONG
            report = asyncio.run(run(stage, drills, options.streams, options.tokens))
        finally:
            stage.cluster.stop(0.0)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report |= {"commit": revision.stdout.strip(), "date": datetime.now(UTC).date().isoformat(), "seed": options.seed}
    if options.save:
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if report["lost"] or report["changed"] or report["longest_gap_s"] > LONGEST_GAP:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

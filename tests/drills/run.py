"""Drills on a real cluster under load: processes killed and stopped, lines cut, queues flooded. See docs/drills.md.

Passed = no accepted request lost, no token doubled or changed, no pause over 10 s, everything back without a hand.
Batch-invariant mode, so that tokens can be compared with an undisturbed run. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drills import catalog
from drills.drill import Drill, Result, report_of
from drills.load import Load, Tokens, learn
from drills.stage import FIRST, Missing, Setting, Stage
from fakes.checkpoints import make_tiny_llama

HITS_PER_CLUSTER = 8  # then a fresh one


class Run:
    """Clusters one after the other, each for as many drills as fit it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.skipped: dict[str, str] = {}
        self.unclean: list[str] = []  # ends of clusters that were not as they should
        self._folder = folder
        self._rng = random.Random(seed)
        self._stage: Stage | None = None
        self._made_by: Callable[[], Setting] = Setting
        self._hits = 0
        self._longest: dict[Callable[[], Setting], int] = {}  # tokens of a request, by the kind of cluster
        self._expected: dict[Callable[[], Setting], Tokens] = {}  # a small one can not say what a larger one can

    async def drills(self, drills: list[Drill]) -> list[Result]:
        results: list[Result] = []
        for drill in drills:
            self._longest[drill.setting] = max(drill.tokens, self._longest.get(drill.setting, 0))
        for number, drill in enumerate(drills):
            if drill.name in self.skipped:
                continue
            try:
                stage = await self._stage_for(drill)
            except Missing as missing:
                self.skipped[drill.name] = str(missing)
                print(f"{number + 1:3d}/{len(drills)} {drill.name:22} SKIPPED: {missing}", flush=True)
                continue
            except Exception as error:  # there is no cluster for it
                result = failed(drill, error)
            else:
                result = await self._one(stage, drill)
            results.append(result)
            print(f"{number + 1:3d}/{len(drills)} {result.line()}", flush=True)
            if result.verdict:
                print(f"        {result.verdict}", flush=True)
            if self._stage is not None and (self._stage.ended or result.failure):
                await self.close()
        return results

    async def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            try:
                await asyncio.to_thread(stage.stop)
            except AssertionError as error:
                self.unclean.append(str(error))

    async def _stage_for(self, drill: Drill) -> Stage:
        """The cluster that runs, if it is of the drill's kind and did not lose many groups yet; else a new one."""
        worn = self._hits + drill.hits > HITS_PER_CLUSTER
        if self._stage is not None and (worn or self._made_by is not drill.setting):
            await self.close()
        if self._stage is None:
            self._made_by, self._hits = drill.setting, 0
            self._stage = Stage(self._folder, drill.setting(), self._rng)
            await asyncio.to_thread(self._stage.start)
            await self._stage.whole()
            if drill.setting not in self._expected:
                learned = await learn(self._stage.gateways[FIRST], self._longest[drill.setting])
                self._expected[drill.setting] = learned
        self._hits += drill.hits
        return self._stage

    async def _one(self, stage: Stage, drill: Drill) -> Result:
        load = Load(stage.gateways, drill.streams, drill.tokens, self._expected[drill.setting])
        load.start()
        await asyncio.sleep(0.5 + self._rng.random())
        begin, verdict, failure = time.monotonic(), "", ""
        try:
            verdict = await drill.act(stage, load)
            if not stage.ended:
                await stage.whole()
        except Exception as error:
            failure = reason_of(error)
        recovery = time.monotonic() - begin
        await load.stop()
        for outcome in load.lost[:3]:
            print(f"        lost: kind {outcome.kind} at {outcome.gateway}: {outcome.error or 'no finish'}", flush=True)
        if failure or load.lost or load.changed:
            print(stage.log_tail(), file=sys.stderr)
        return Result(
            name=drill.name,
            requests=len(load.outcomes),
            lost=len(load.lost),
            changed=len(load.changed),
            refused=load.refused,
            gap=load.longest_gap(drill.queues),
            longest_gap=drill.longest_gap,
            recovery=recovery,
            verdict=verdict,
            failure=failure,
        )


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def failed(drill: Drill, error: Exception) -> Result:
    """A drill that could not begin."""
    return Result(
        name=drill.name,
        requests=0,
        lost=0,
        changed=0,
        refused=0,
        gap=0.0,
        longest_gap=drill.longest_gap,
        recovery=0.0,
        failure=reason_of(error),
    )


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m drills.run", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the drills and end")
    parser.add_argument("--short", action="store_true", help="6 kills, 1 stop, 1 router, 1 drain")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these drills in this order")
    parser.add_argument("--repeat", type=int, default=1, help="the whole list so many times")
    parser.add_argument("--seed", type=int, default=1, help="of victims and of the time of each blow")
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(arguments)
    names = catalog.SHORT if options.short else catalog.LONG
    if options.only:
        names = options.only.split(",")
        if unknown := [name for name in names if name not in catalog.BY_NAME]:
            parser.error(f"no drill {unknown[0]!r}; there are: {', '.join(catalog.BY_NAME)}")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    options.drills = catalog.chosen(names, options.repeat)
    return options


async def perform(folder: Path, drills: list[Drill], seed: int) -> dict[str, Any]:
    run = Run(folder, seed)
    try:
        results = await run.drills(drills)
    finally:
        await run.close()
    report = report_of(results, run.skipped)
    if run.unclean:
        report["failed"] += len(run.unclean)
        report["verdicts"]["ends of clusters"] = f"FAILED: {'; '.join(run.unclean)}"
    return report


def main() -> None:
    options = options_of()
    if options.list:
        for drill in catalog.DRILLS:
            print(f"{drill.name:22} {drill.act.__doc__}")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny", max_positions=512)
        report = asyncio.run(perform(model, options.drills, options.seed))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report |= {"commit": revision.stdout.strip(), "date": datetime.now(UTC).date().isoformat(), "seed": options.seed}
    if options.save:
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if report["failed"] or not report["drills"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""The engine's random walk for as long as asked: `make long-walk`. The last line is one JSON object."""

import argparse
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

from engine.walk import Walk

STEPS = 200  # of one walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    start = shown = time.monotonic()
    totals = {"steps": 0, "requests": 0, "refused": 0, "preemptions": 0, "hit_tokens": 0, "evictions": 0, "cut": 0}
    seed = options.seed
    while totals["steps"] < options.steps:
        depth = 1 + seed % 2
        walk = Walk(seed, depth)
        try:
            walk.run(STEPS)
        except Exception as failure:
            raise SystemExit(f"seed {seed}, depth {depth}: {type(failure).__name__}: {failure}") from failure
        totals["steps"] += walk.steps
        totals["requests"] += len(walk.requests)
        totals["refused"] += walk.refused
        totals["cut"] += len(walk.cut)
        totals["preemptions"] += walk.scheduler.preemptions
        totals["hit_tokens"] += walk.scheduler.pool.index.hits
        totals["evictions"] += walk.scheduler.pool.evictions
        seed += 1
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{totals['steps']:,} of {options.steps:,} steps, {seed - options.seed:,} walks", flush=True)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "long_walk": totals,
        "walks": seed - options.seed,
        "first_seed": options.seed,
        "failures": 0,
        "seconds": round(time.monotonic() - start, 1),
        "commit": revision.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if options.save:
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Host cost of the engine without a model, in microseconds per sequence and step: `make bench-host`.

The Scheduler, configuration, load figures and cache events of `nori serve`; a step is: plan, pack it for the workers,
apply the result, read the load, split the news by gateway, encode a StepOutput for each of two gateways. What a worker
does around its model (decode the plan, SlotTable, ForwardBatch, sampling rows) is timed beside it, per row. The last
line is one JSON object.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.rpc.dataplane_server import DataplaneServer, Session
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.types import GroupSpec, RowSampling, StepPlan, StepResult, pack, unpack
from nori_cluster.worker.batch import build_batch, row_lengths
from nori_cluster.worker.sampler import SamplingRows
from nori_cluster.worker.slots import SlotTable

PROMPT, EOS, STOP, PLAIN = 128, 2, 5, 7
WARM_UP = 20
SIZES = (64, 256, 1024)
SAMPLING = RowSampling(temperature=0.8, top_p=0.95, top_k=40, seed=1, candidate=0)


class NoExecutor:
    """Keeps submitted plans; the bench answers them."""

    chains = True

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self) -> StepResult:
        raise NotImplementedError

    def check(self) -> None: ...

    def close(self) -> None: ...


class WorkerSide:
    """What a rank does with a plan before and after its model."""

    def __init__(self, sequences: int, longest: int) -> None:
        self.table = SlotTable(sequences, longest + 1, 16)
        self.decoder = msgspec.msgpack.Decoder(StepPlan)

    def step(self, encoded: bytes, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> float:
        """Seconds per row of the plan."""
        begin = time.perf_counter()
        plan, table = self.decoder.decode(encoded), self.table
        table.drop(unpack(plan.drops))
        for start in plan.starts:
            table.start(start)
        slots = unpack(plan.slots)
        table.append_blocks(slots, plan.blocks[0])
        lengths = row_lengths(table, slots, unpack(plan.counts))
        batch = build_batch(table, slots, lengths, torch.device("cpu"))
        table.advance(slots, lengths)
        sampled = slots[batch.sample_rows]
        SamplingRows.gather(table, sampled, batch.sample_places.astype(np.int32))
        table.append_tokens(sampled, ids)
        return (time.perf_counter() - begin) / len(slots)


class Bench:
    """One engine with `sequences` running, two gateways' sessions, and a stream of replacements."""

    def __init__(self, sequences: int, steps: int, *, prefix_cache: bool, churn: float, depth: int) -> None:
        longest = PROMPT + WARM_UP + steps + sequences + 64
        spec = GroupSpec(
            model="none",
            vocab_size=32000,
            max_model_len=longest,
            num_blocks=sequences * (longest // 16 + 2),
            block_size=16,
            eos_token_ids=(EOS,),
            dtype="none",
            numerics_id="none",
        )
        config = SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(8192, 2 * sequences),
            max_waiting_requests=2 * sequences,
            depth=depth,
            enable_prefix_caching=prefix_cache,
        )
        self.sequences, self.churn = sequences, 0.0  # nobody ends before all have started
        self.scheduler = Scheduler(config, spec)
        self.executor = NoExecutor(depth)
        core = EngineCore(self.scheduler, self.executor)
        self.server = DataplaneServer(core, spec, "bench", 1, lambda failure: None)
        self.sessions = [Session(number, 0) for number in (1, 2)]
        self.server._sessions = {session.number: session for session in self.sessions}
        self.encoder = msgspec.msgpack.Encoder()
        self.encoded: deque[bytes] = deque()
        self.worker = WorkerSide(sequences, longest)
        self.worker_us: list[float] = []
        self.rng = np.random.default_rng(0)
        self.started = 0
        for _ in range(sequences):
            self.add()
        while len(self.scheduler.waiting):
            self.step()
        self.churn = churn

    def add(self) -> None:
        """A fresh prompt; every other one without max_tokens."""
        self.started += 1
        session = self.sessions[self.started % 2]
        longest = self.scheduler.spec.max_model_len
        request = SequenceRequest(
            key=session.key(self.started),
            prompt_token_ids=tuple(self.rng.integers(10, 32000, PROMPT).tolist()),
            sampling=SAMPLING,
            max_tokens=longest if self.started % 4 < 2 else longest - PROMPT,
            stop_token_ids=(STOP,),
        )
        session.live.add(request.key)
        self.scheduler.submit(request, 0.0)

    def answer(self, plan: StepPlan) -> tuple[StepResult, int]:
        """A plain token for every row that samples, EOS for the share that ends; how many end."""
        record = self.scheduler._in_flight[0]
        assert record.step == plan.step
        samples = record.samples.astype(np.int32)
        ids = np.full(int(samples.sum()), PLAIN, dtype=np.int32)
        ends = self.rng.random(len(ids)) < self.churn
        ids[ends] = EOS
        alive = self.scheduler.columns.alive[record.slots[record.samples]]
        return StepResult(step=plan.step, counts=pack(samples), ids=pack(ids)), int((ends & alive).sum())

    def step(self) -> float:
        """Seconds of host work of one step."""
        start = time.perf_counter()
        while len(self.executor.plans) < self.executor.depth:
            plan = self.scheduler.plan(0.0)
            if plan is None:
                break
            self.encoded.append(self.encoder.encode(plan))
            self.executor.submit(plan)
        spent = time.perf_counter() - start
        result, ended = self.answer(self.executor.plans.popleft())
        self.worker_us.append(self.worker.step(self.encoded.popleft(), unpack(result.ids)) * 1e6)
        start = time.perf_counter()
        deltas = self.scheduler.apply(result, 0.0)
        self.server._engine._measure()
        self.server._deliver(deltas)
        for session in self.sessions:
            message = session.take_step_output()
            if message is not None:
                pb.ExchangeResponse(step_output=message).SerializeToString()
        spent += time.perf_counter() - start
        assert ended == len(deltas.finishes)
        start = time.perf_counter()
        for _ in range(ended):
            self.add()
        return spent + time.perf_counter() - start

    def measure(self, steps: int) -> list[float]:
        """Microseconds per sequence and step."""
        for _ in range(WARM_UP):
            self.step()
        self.worker_us.clear()
        return [self.step() / self.sequences * 1e6 for _ in range(steps)]


def case(sequences: int, steps: int, rounds: int, **options: Any) -> dict[str, Any]:
    benches = [Bench(sequences, steps, **options) for _ in range(rounds)]
    times = [t for bench in benches for t in bench.measure(steps)]
    worker = [t for bench in benches for t in bench.worker_us]
    return {"sequences": sequences, **options, "us": spread(times), "worker_us": spread(worker)}


def spread(times: list[float]) -> dict[str, float]:
    names = ("p10", "p50", "p90", "p99")
    return dict(zip(names, np.percentile(times, [10, 50, 90, 99]).round(3).tolist(), strict=True))


def bare_loop() -> float:
    """Microseconds of 1,000 turns of an empty Python loop: how fast this machine is just now."""
    start = time.perf_counter()
    for _ in range(200_000):
        pass
    return (time.perf_counter() - start) * 1e6 / 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    rows = []
    for depth in (1, 2):
        for prefix_cache in (True, False):
            for churn in (0.0, 0.1):
                for size in SIZES:
                    choice = {"prefix_cache": prefix_cache, "churn": churn, "depth": depth}
                    rows.append(case(size, options.steps, options.rounds, **choice))
                    row = rows[-1]
                    print(
                        f"{size:5d} sequences  depth {depth}  cache {prefix_cache!s:5}  churn {churn:.0%}  "
                        f"{row['us']}  worker {row['worker_us']['p50']}"
                    )
    steady = [row for row in rows if row["depth"] == 1 and row["prefix_cache"] and not row["churn"]]
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "us_per_sequence_step": {str(row["sequences"]): row["us"]["p50"] for row in steady},
        "worker_us_per_row": {str(row["sequences"]): row["worker_us"]["p50"] for row in steady},
        "bare_loop_us_per_1000": round(statistics.median(bare_loop() for _ in range(5)), 1),
        "cases": rows,
        "commit": revision.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
    }
    if options.save:
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

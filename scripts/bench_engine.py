"""Host cost of the engine without a model: Scheduler.plan + pack + apply, per sequence and step, in steady decode.

`make bench`. The executor answers at once with one token per row that samples; no data plane, no gateway, one thread.
"""

import argparse
import json
import platform
import statistics
import time

import numpy as np

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import GroupSpec, RowSampling, StepPlan, StepResult, pack, unpack

PROMPT = 128
WARM_UP = 20
SAMPLING = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0)


def scheduler_with(sequences: int, steps: int) -> Scheduler:
    """A scheduler whose `sequences` prompts are all computed; every one of them decodes for the next `steps` steps."""
    longest = PROMPT + WARM_UP + steps + sequences + 16
    spec = GroupSpec(
        model="none",
        vocab_size=32000,
        max_model_len=longest,
        num_blocks=sequences * (longest // 16 + 2),
        block_size=16,
        eos_token_ids=(2,),
        dtype="none",
        numerics_id="none",
    )
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=8192, max_waiting_requests=sequences)
    scheduler = Scheduler(config, spec)
    prompt = tuple(range(3, 3 + PROMPT))
    for key in range(sequences):
        scheduler.submit(
            SequenceRequest(
                key=key, prompt_token_ids=prompt, sampling=SAMPLING, max_tokens=longest - PROMPT, stop_token_ids=(5,)
            ),
            0.0,
        )
    while True:
        plan = scheduler.plan(0.0)
        assert plan is not None
        rows = len(unpack(plan.slots))
        prefill = int(unpack(plan.counts).sum()) > rows
        scheduler.apply(answer(plan, scheduler), 0.0)
        if rows == sequences and not prefill:
            return scheduler


def answer(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    """Token 7 for every row that reaches its sequence's known length."""
    slots, counts = unpack(plan.slots), unpack(plan.counts)
    samples = (scheduler.columns.computed[slots] + counts >= scheduler.columns.known[slots]).astype(np.int32)
    return StepResult(step=plan.step, counts=pack(samples), ids=pack(np.full(int(samples.sum()), 7)))


def measure(sequences: int, steps: int) -> list[float]:
    """Microseconds per sequence and step of each timed step; making the answer is not timed."""
    scheduler = scheduler_with(sequences, steps)
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        assert len(unpack(plan.slots)) == sequences
        result = answer(plan, scheduler)
        applying = time.perf_counter()
        scheduler.apply(result, 0.0)
        times.append((planned - start + time.perf_counter() - applying) / sequences * 1e6)
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"Scheduler.plan + apply, steady decode, prompt {PROMPT}, {steps} steps, median (p99) per sequence and step")
    medians = {}
    for sequences in (64, 256, 1024):
        times = sorted(measure(sequences, steps))
        medians[str(sequences)] = round(statistics.median(times), 3)
        print(f"{sequences:5} sequences  {medians[str(sequences)]:7.3f} µs  ({times[int(len(times) * 0.99)]:.3f} µs)")
    print(json.dumps({"us_per_sequence_step": medians, "python": platform.python_version(), "numpy": np.__version__}))


if __name__ == "__main__":
    main()

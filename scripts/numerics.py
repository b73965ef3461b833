"""What batch-invariant mode promises and costs, on a real model: `make numerics`.

bits: one sequence in batches, in cuts, beside other rows, over cache hits and resumed, with the mode and without; over
tensor-parallel processes with it. cost: tokens per second of decoding and of prompts, with the mode and without. load:
requests of mixed load against the same requests alone. Without the mode a request may say something else at a near tie
(the perturbed scores of both tokens within 1e-3 in float32, 0.1 in bfloat16), else it counts as changed; with the mode
nothing may differ. The last line is one JSON object; the exit code is 1 when a promise is broken.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes.mixing import Mixer, Row, differences

from nori_cluster.checkpoint.source import resolve
from nori_cluster.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    SchedulerConfig,
)
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import GroupSpec, RowSampling
from nori_cluster.worker.inline import InlineExecutor, load_inline
from nori_cluster.worker.sampler import BLOCK, noise

ROOT = Path(__file__).resolve().parent.parent
TIE = {"float32": 1e-3, "bfloat16": 0.1}
RATE = 0.002  # near ties per request that float32 may have
DECODE, PROMPT = 24, 64
Outputs = dict[int, list[int]]


class Model:
    """One loaded worker; each run gets a scheduler of its own."""

    def __init__(self, folder: Path, dtype: str, batch_invariant: bool, threads: int | None) -> None:
        self.executor: InlineExecutor
        self.spec: GroupSpec
        self.executor, self.spec = load_inline(
            GroupConfig(
                model=ModelConfig(name="model", path=str(folder), dtype=dtype, max_model_len=2048),  # type: ignore[arg-type]
                cache=CacheConfig(num_blocks=800),
                scheduler=SchedulerConfig(max_num_seqs=32),
                parallel=ParallelConfig(device="cpu", threads=threads),
                numerics=NumericsConfig(batch_invariant=batch_invariant),
            )
        )

    def run(self, requests: Sequence[SequenceRequest], **limits: Any) -> tuple[Outputs, list[float]]:
        """Tokens by key, and the seconds of each step."""
        scheduler = SchedulerConfig(**({"max_num_seqs": 32} | limits)).resolve("cpu")
        core = EngineCore(Scheduler(scheduler, self.spec), self.executor)
        outputs: Outputs = {request.key: [] for request in requests}
        seconds = []
        for request in requests:
            core.submit(request, 0.0)
        while core.has_work:
            start = time.perf_counter()
            deltas = core.step(0.0)
            seconds.append(time.perf_counter() - start)
            if deltas is not None:
                ends = np.cumsum(deltas.counts)
                for key, first, end in zip(deltas.keys.tolist(), ends - deltas.counts, ends, strict=True):
                    outputs[key] += deltas.ids[first:end].tolist()
        return outputs, seconds


class Load:
    """Requests cut from a text: half greedy, half at temperature 0.7 to 1, a third with a prefix in common."""

    def __init__(self, folder: Path) -> None:
        text = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/decisions/*.md")))
        self._tokens = Tokenizer.from_folder(folder).encode((ROOT / "README.md").read_text() + text)

    def requests(self, count: int, seed: int = 0) -> list[SequenceRequest]:
        rng = np.random.default_rng(seed)
        common = self._tokens[:48]
        found = []
        for key in range(count):
            length = int(
                rng.choice([rng.integers(1, 24), rng.integers(24, 80), rng.integers(80, 160)], p=[0.5, 0.4, 0.1])
            )
            at = int(rng.integers(0, len(self._tokens) - length))
            prompt = [*(common if rng.random() < 1 / 3 else []), *self._tokens[at : at + length]]
            temperature = float(rng.choice([0.0, 0.0, 0.7, 1.0]))
            found.append(self._request(key, prompt, int(rng.integers(2, 9)), temperature))
        return found

    def equal(self, count: int, length: int, output: int) -> list[SequenceRequest]:
        return [self._request(key, self._tokens[key : key + length], output, 0.0) for key in range(count)]

    @staticmethod
    def _request(key: int, prompt: list[int], output: int, temperature: float) -> SequenceRequest:
        sampling = RowSampling(temperature, 1.0, 0, key, 0)
        return SequenceRequest(
            key=key, prompt_token_ids=tuple(prompt), sampling=sampling, max_tokens=output, ignore_eos=True
        )


def bits(model: Model, every: int, singles: int) -> dict[str, int]:
    """Ways of each kind that gave other bits than the whole prompt alone."""
    found = differences(model.executor.worker, 150, every=every, singles=singles)
    return {kind: len(ways) for kind, ways in found.items()}


def ranks(folder: Path, dtype: str, size: int) -> str:
    """ "equal", or what the ranks said instead."""
    script = ROOT / "tests" / "worker" / "invariant_rank.py"
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            subprocess.Popen(
                [sys.executable, script, folder, dtype, str(rank), str(size), f"{scratch}/store", "140", "8"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = {process.communicate(timeout=600)[0].strip() for process in processes}
    return outputs.pop() if len(outputs) == 1 else f"the ranks disagree: {sorted(outputs)}"


def cost(models: dict[bool, Model], load: Load) -> list[dict[str, Any]]:
    """Tokens per second, the better of two rounds; prompts: interleaved."""
    rows = []
    for batch in (1, 8, 32):
        best = {
            mode: max(batch / statistics.median(_decode_seconds(models[mode], load, batch)) for _ in range(2))
            for mode in models
        }
        rows.append({"what": f"decode, batch {batch}", "off": round(best[False], 1), "on": round(best[True], 1)})
    for length in (256, 768):
        requests = load.equal(2, length, 1)
        rates = {mode: [0.0] for mode in models}
        for mode in (False, True, False, True):
            seconds = models[mode].run(requests, enable_prefix_caching=False)[1]
            rates[mode].append(2 * length / sum(seconds))
        rows.append(
            {"what": f"prompts of {length}", "off": round(max(rates[False]), 1), "on": round(max(rates[True]), 1)}
        )
    return rows


def _decode_seconds(model: Model, load: Load, batch: int) -> list[float]:
    _, seconds = model.run(load.equal(batch, PROMPT, DECODE), enable_prefix_caching=False, max_num_batched_tokens=8192)
    return seconds[1:]


def mixed_load(model: Model, requests: list[SequenceRequest], dtype: str) -> dict[str, Any]:
    """All at once (chunks of at most 96 tokens, prefix cache) against each alone without a cache."""
    together, seconds = model.run(requests, max_num_batched_tokens=96)
    ties, changed = [], []
    for number, request in enumerate(requests, 1):
        if number % 100 == 0:
            print(
                f"{dtype} load: {number} requests compared, {len(ties)} near ties, {len(changed)} changed", flush=True
            )
        alone = model.run([request], enable_prefix_caching=False)[0][request.key]
        if alone != together[request.key]:
            gap = score_gap(model, request, alone, together[request.key])
            (ties if gap <= TIE[dtype] else changed).append(round(gap, 6))
    return {
        "requests": len(requests),
        "steps": len(seconds),
        "near_ties": len(ties),
        "changed": len(changed),
        "gaps": sorted(ties + changed),
    }


def score_gap(model: Model, request: SequenceRequest, one: list[int], other: list[int]) -> float:
    """Distance of the perturbed scores of the two tokens at the first place where the outputs differ."""
    place = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    tokens = [*request.prompt_token_ids, *one[:place]]
    row = Row(tokens)
    (logits,) = Mixer(model.executor.worker).step([(row, len(tokens))])
    assert logits is not None
    scores, pair = logits[-1].double(), [one[place], other[place]]
    sampling = request.sampling
    if sampling.temperature == 0:
        return abs(float(scores[pair[0]] - scores[pair[1]]))
    scaled = (scores - scores.max()) / sampling.temperature
    blocks = -(-len(scaled) // BLOCK)
    padded = torch.nn.functional.pad(scaled, (0, blocks * BLOCK - len(scaled)), value=float("-inf")).view(blocks, BLOCK)
    coarse, fine = noise(
        np.array([sampling.seed], np.uint64),
        np.array([sampling.candidate], np.uint32),
        np.array([place], np.int32),
        blocks,
    )
    a, b = pair
    if a // BLOCK != b // BLOCK:
        level = padded.logsumexp(dim=-1) + torch.from_numpy(coarse[0])
        return abs(float(level[a // BLOCK] - level[b // BLOCK]))
    level = padded[a // BLOCK] + torch.from_numpy(fine[0])
    return abs(float(level[a % BLOCK] - level[b % BLOCK]))


def measure(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    models = {mode: Model(folder, dtype, mode, options.threads) for mode in (False, True)}
    load = Load(folder)
    result: dict[str, Any] = {"dtype": dtype, "bits": {}, "load": {}}
    for mode, model in models.items():
        result["bits"]["on" if mode else "off"] = bits(model, options.every, options.singles)
    print(f"{dtype} bits, ways that differ: {result['bits']}", flush=True)
    result["cost"] = cost(models, load)
    for row in result["cost"]:
        print(f"{dtype} {row['what']:18} {row['off']:8} tok/s, {row['on']:8} with the mode", flush=True)
    count = options.requests if dtype == "float32" else options.requests // 4
    for mode, model in models.items():
        found = mixed_load(model, load.requests(count // 2 if mode else count), dtype)
        result["load"]["on" if mode else "off"] = found
        print(f"{dtype} load {'with' if mode else 'without'} the mode: {found}", flush=True)
    return result


def broken(report: dict[str, Any]) -> list[str]:
    """Promises that the figures contradict."""
    found = [f"TP {size}: {said}" for size, said in report["tensor_parallel"].items() if said != "equal"]
    for result in report["results"]:
        on, off = result["load"]["on"], result["load"]["off"]
        if any(result["bits"]["on"].values()) or on["near_ties"] or on["changed"]:
            found.append(f"{result['dtype']}: bits differ in batch-invariant mode")
        if off["changed"]:
            found.append(f"{result['dtype']}: {off['changed']} requests changed without a near tie")
        if result["dtype"] == "float32" and off["near_ties"] > RATE * off["requests"]:
            found.append(f"{off['near_ties']} near ties in {off['requests']} requests")
    return found


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(os.sched_getaffinity(0)),
        "gpu": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], choices=TIE)
    parser.add_argument(
        "--requests",
        type=int,
        default=520,
        help="of mixed load in float32; a quarter in bfloat16, half of each with the mode",
    )
    parser.add_argument("--every", type=int, default=30, help="try each n-th place to cut the sequence of 150 tokens")
    parser.add_argument("--singles", type=int, default=24, help="most tokens that one way computes one by one")
    parser.add_argument("--ranks", type=int, nargs="*", default=[3], help="tensor-parallel sizes to try")
    parser.add_argument("--threads", type=int, help="torch threads; on a machine shared with others 1 is steadier")
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    folder, start = resolve(options.model), time.perf_counter()
    said = {str(size): ranks(folder, "float32", size) for size in options.ranks}
    print(f"tensor parallel: {said}", flush=True)
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "what": "batch-invariant mode: bits, cost, near ties",
        "commit": revision.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": options.model,
        "machine": machine() | {"threads": options.threads or len(os.sched_getaffinity(0))},
        "tensor_parallel": said,
        "results": [measure(folder, options, dtype) for dtype in options.dtypes],
        "seconds": 0.0,
    }
    report["seconds"] = round(time.perf_counter() - start, 1)
    report["broken"] = broken(report)
    if options.save:
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

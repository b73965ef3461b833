"""What the engine does in this process, without sockets: LLM(...).generate timed as a whole. Metrics per round.

Every call gets prompts that no call had before, so no prefix cache answers them.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from nori_cluster.bench.conditions import Conditions, parallelism
from nori_cluster.bench.environment import Device, Machine, cpu_device, software
from nori_cluster.bench.metrics import percentiles
from nori_cluster.bench.report import Batch
from nori_cluster.bench.workload import FIRST_ID
from nori_cluster.config import GroupConfig
from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.llm import LLM
from nori_cluster.types import GroupSpec, SamplingParams
from nori_cluster.version import __version__

START_SECONDS = 900.0
Show = Callable[[str, int, int], None]  # what, how many are done, of how many
Metrics = dict[str, float]


class StartFailed(NoriError):
    """The process that was to start ended without its first token."""


def throughput(llm: LLM, batch: Batch, rounds: int, show: Show = lambda what, done, total: None) -> list[Metrics]:
    """Tokens per second of `batch.size` prompts given at once."""
    calls = _Calls(llm, batch)
    calls.warm_up(show)
    found = []
    for number in range(rounds):
        show("rounds", number, rounds)
        seconds = calls.timed()
        output, total = batch.size * batch.output, batch.size * (batch.input + batch.output)
        found.append(
            {"output_tok_s": output / seconds, "total_tok_s": total / seconds, "request_s": batch.size / seconds}
        )
    return found


def latency(
    llm: LLM, batch: Batch, repeats: int, rounds: int, show: Show = lambda what, done, total: None
) -> list[Metrics]:
    """Milliseconds from the call to its last token, over `repeats` calls per round."""
    calls = _Calls(llm, batch)
    calls.warm_up(show)
    found = []
    for number in range(rounds):
        seconds = []
        for repeat in range(repeats):
            show("calls", number * repeats + repeat, rounds * repeats)
            seconds.append(calls.timed())
        values = percentiles(seconds)
        assert values is not None
        rate = batch.size * batch.output * repeats / sum(seconds)
        found.append(
            {"latency_p50": values.p50, "latency_p90": values.p90, "latency_p99": values.p99, "output_tok_s": rate}
        )
    return found


class _Calls:
    """The calls of one measurement, each with prompts of its own."""

    def __init__(self, llm: LLM, batch: Batch) -> None:
        room = llm.spec.max_model_len
        if batch.input + batch.output > room:
            raise ConfigError(f"--input {batch.input} and --output {batch.output} exceed the model's {room} tokens")
        self._llm = llm
        self._batch = batch
        self._random = np.random.default_rng(batch.seed)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=batch.output, ignore_eos=True)

    def warm_up(self, show: Show) -> None:
        for number in range(self._batch.warmup):
            show("warming up", number, self._batch.warmup)
            self.timed()

    def timed(self) -> float:
        """Seconds of one call. Raises NoriError when an output is not as long as asked."""
        vocab = self._llm.spec.vocab_size
        low = FIRST_ID if vocab > 2 * FIRST_ID else 3
        prompts = self._random.integers(low, vocab, (self._batch.size, self._batch.input)).tolist()
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, self._sampling)
        seconds = time.perf_counter() - start
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {self._batch.output}:
            raise NoriError(f"outputs have {sorted(lengths)} tokens, not {self._batch.output} as asked")
        return seconds


def conditions(spec: GroupSpec, config: GroupConfig, host: Machine, cache_state: str) -> Conditions:
    """Everything is known here."""
    device = _device(config, host)
    flags = msgspec.to_builtins(config)
    del flags["model"]["path"]
    return Conditions().known(
        "in process",
        server=f"Nori Cluster {__version__} in process",
        model=spec.model,
        revision=spec.weights_id.partition("@")[0],
        weights=spec.dtype,
        kv_cache=spec.dtype,
        parallelism=parallelism(1, 1),
        devices=(device,),
        clocks=device.clocks,
        software=software(),
        flags=msgspec.json.encode(flags).decode(),
        cache_state=cache_state,
        numerics_id=spec.numerics_id,
    )


def _device(config: GroupConfig, host: Machine) -> Device:
    on_gpu = host.gpus and config.parallel.device != "cpu"
    return msgspec.structs.replace(host.gpus[0], count=1) if on_gpu else cpu_device(host)


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What a fresh process tells at its first token. moments: phase → system-wide monotonic time at its end."""

    began: float
    moments: dict[str, float]
    tasks: dict[str, float]
    spec: GroupSpec
    config: GroupConfig


class StartJob(msgspec.Struct, frozen=True, kw_only=True):
    """For the fresh process. settings: keywords of LLM."""

    model: str
    settings: dict[str, Any]
    input: int


def startup(job: StartJob, rounds: int, show: Show = lambda what, done, total: None) -> tuple[list[Metrics], Started]:
    """Milliseconds of each phase from the start of a fresh process to its first token; one process after another.

    Raises StartFailed with the process's last words.
    """
    found = []
    for number in range(rounds):
        show("starts", number, rounds)
        spawned = time.monotonic()
        last = _start_once(job)
        ends = [("process", last.began), *last.moments.items()]
        metrics, before = {}, spawned
        for phase, end in ends:
            metrics[f"{phase}_ms"] = (end - before) * 1e3
            before = end
        metrics |= {f"load/{name.replace(' ', '_')}_ms": seconds * 1e3 for name, seconds in last.tasks.items()}
        found.append({**metrics, "total_ms": (before - spawned) * 1e3})
    return found, last


def _start_once(job: StartJob) -> Started:
    command = [sys.executable, "-m", "nori_cluster.bench.first_token"]
    text = msgspec.json.encode(job)
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartFailed(f"no first token within {START_SECONDS:g} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise StartFailed(f"the process ended with code {done.returncode}: {words[-1] if words else 'no word'}")
    return msgspec.json.decode(lines[-1], type=Started)

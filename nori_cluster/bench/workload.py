"""LoadSpec → the requests themselves: when each is due, its prompt, how much it asks for.

Every request is a function of (spec, number): client processes make theirs without talking to each other, and the
same spec and seed give the same requests again. Prompts are token ids; for chat each id stands for a common word.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.bench.arrivals import due_times
from nori_cluster.bench.records import Lengths, LoadSpec, Slo
from nori_cluster.bench.traces import BLOCK_TOKENS, read_trace
from nori_cluster.bench.words import WORDS
from nori_cluster.errors import ConfigError

FIRST_ID = 100  # ids below are control tokens in many vocabularies
MAX_LENGTH = 1 << 24
LENGTHS, PROMPT, WARMUP, PREFIX, BLOCK = 2, 3, 4, 5, 6  # names of random streams
OWN_FIELDS = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"}

Ids = NDArray[np.int32]


class Planned(msgspec.Struct, frozen=True):
    """One request to be. due: seconds after the start; None in a closed loop. number < 0: a warm-up request."""

    number: int
    due: float | None
    input: int
    output: int


class Workload:
    """The requests of a spec. total: how many; None = as many as fit the duration (closed loop).

    Raises ConfigError (TraceError for a file) when the spec cannot work.
    """

    def __init__(self, spec: LoadSpec) -> None:
        check_spec(spec)
        self.spec = spec
        self._due: NDArray[np.float64] | None = None
        self._rows = []
        self.total = spec.requests
        if spec.arrival == "trace":
            rows = read_trace(Path(spec.trace or ""), spec.trace_format)[: spec.requests]
            end = math.inf if spec.duration is None else spec.duration
            self._rows = [row for row in rows if row.at / spec.trace_speed < end]
            self._due = np.array([row.at / spec.trace_speed for row in self._rows])
        elif spec.arrival != "closed":
            self._due = due_times(spec)
        if self._due is not None:
            self.total = len(self._due)
        self._prefix = self._ids((PREFIX, 0), spec.shared_prefix)
        self._block = lru_cache(maxsize=4096)(self._make_block)  # 8 MiB of blocks

    def plans(self, part: int = 0, parts: int = 1) -> Iterator[Planned]:
        """Every parts-th request in order of time, from number `part`. Endless where total is None."""
        number = part
        while self.total is None or number < self.total:
            yield self.plan(number)
            number += parts

    def plan(self, number: int) -> Planned:
        """Negative numbers are warm-up: requests of the same kind, with prompts of their own."""
        due = None if self._due is None or number < 0 else float(self._due[number])
        if self._rows:
            row = self._rows[number if number >= 0 else -(number + 1) % len(self._rows)]
            return Planned(number, due, _cut(row.input, self.spec.input), _cut(row.output, self.spec.output))
        random = self._random(LENGTHS, number)
        return Planned(number, due, draw(self.spec.input, random), draw(self.spec.output, random))

    def prompt(self, plan: Planned) -> Ids:
        """Token ids [plan.input]."""
        if plan.number >= 0 and self._rows and (blocks := self._rows[plan.number].blocks):
            return np.concatenate([self._block(block) for block in blocks])[: plan.input]
        own = self._ids((WARMUP if plan.number < 0 else PROMPT, abs(plan.number)), plan.input)
        shared = min(len(self._prefix), plan.input)
        own[:shared] = self._prefix[:shared]
        return own

    def text(self, prompt: Ids) -> str:
        """For chat: one common English word per id, of one token in most vocabularies."""
        return " ".join([WORDS[id_ % len(WORDS)] for id_ in prompt.tolist()])

    def _make_block(self, block: int) -> Ids:
        return self._ids((BLOCK, block), BLOCK_TOKENS)

    def _ids(self, stream: tuple[int, int], count: int) -> Ids:
        return self._random(*stream).integers(FIRST_ID, self.spec.vocab_size, count, dtype=np.int32)

    def _random(self, stream: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64((self.spec.seed, stream, int(number < 0), abs(number))))


def prompt_digest(prompt: Ids) -> str:
    """Names a prompt in a file of reference tokens."""
    return hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()


def draw(lengths: Lengths, random: np.random.Generator) -> int:
    """One length. lognormal: median = exp(mu), mean = exp(mu + sigma² / 2), hence sigma² = 2 ln(mean / median)."""
    if lengths.kind == "fixed":
        return lengths.median
    assert lengths.mean is not None, "check_spec asks for it"
    sigma = math.sqrt(2 * math.log(lengths.mean / lengths.median))
    return _cut(round(random.lognormal(math.log(lengths.median), sigma)), lengths)


def _cut(tokens: int, lengths: Lengths) -> int:
    most = MAX_LENGTH if lengths.maximum is None else lengths.maximum
    return max(lengths.minimum, min(tokens, most))


def check_spec(spec: LoadSpec) -> None:
    """Raises ConfigError naming the flag."""
    _check_load(spec)
    _check_bounds(spec)
    for side, lengths in (("input", spec.input), ("output", spec.output)):
        _check_lengths(side, lengths, from_trace=spec.arrival == "trace")
    shortest = spec.input.median if spec.input.kind == "fixed" else spec.input.minimum
    if spec.shared_prefix < 0 or (spec.input.kind == "fixed" and spec.shared_prefix > shortest):
        raise ConfigError(f"--shared-prefix {spec.shared_prefix} must lie between 0 and the input's {shortest} tokens")
    if spec.shared_prefix and spec.arrival == "trace":
        raise ConfigError("--shared-prefix does not go with --trace: a trace says itself what is shared")
    if spec.vocab_size <= FIRST_ID:
        raise ConfigError(f"--vocab-size must be more than {FIRST_ID}, not {spec.vocab_size}")
    if taken := sorted(OWN_FIELDS & spec.sampling.keys()):
        raise ConfigError(f"--sampling must not hold {', '.join(taken)}: the load itself sets it")


def _check_load(spec: LoadSpec) -> None:
    open_loop = spec.arrival in {"poisson", "gamma", "constant"}
    if open_loop and not (spec.rate is not None and 0 < spec.rate < math.inf):
        raise ConfigError(f"{spec.arrival} arrivals need --rate: requests per second, more than 0 (not {spec.rate})")
    if not open_loop and spec.rate is not None:
        raise ConfigError(f"--rate does not go with {spec.arrival} arrivals")
    if not 0 < spec.burstiness < math.inf:
        raise ConfigError(f"--burstiness must be more than 0, not {spec.burstiness} (1 = Poisson, lower = burstier)")
    if spec.burstiness != 1 and spec.arrival != "gamma":
        raise ConfigError(f"--burstiness goes with gamma arrivals, not with {spec.arrival}")
    if spec.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, not {spec.concurrency}")
    if (spec.trace is not None) != (spec.arrival == "trace"):
        raise ConfigError("trace arrivals need --trace FILE" if spec.trace is None else "--trace needs trace arrivals")
    if not 0 < spec.trace_speed < math.inf:
        raise ConfigError(f"--trace-speed must be more than 0, not {spec.trace_speed}")


def _check_bounds(spec: LoadSpec) -> None:
    if spec.requests is None and spec.duration is None and spec.arrival != "trace":
        raise ConfigError("say when the run ends: --requests N or --duration SECONDS")
    if spec.requests is not None and spec.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {spec.requests}")
    if spec.duration is not None and not 0 < spec.duration < math.inf:
        raise ConfigError(f"--duration must be more than 0 seconds, not {spec.duration}")
    if not 0 < spec.timeout < math.inf:
        raise ConfigError(f"--timeout must be more than 0 seconds, not {spec.timeout}")
    if spec.warmup < 0:
        raise ConfigError(f"--warmup must not be negative, not {spec.warmup}")
    if spec.seed < 0:
        raise ConfigError(f"--seed must not be negative, not {spec.seed}")
    if spec.processes < 1 or (spec.arrival == "closed" and spec.processes > spec.concurrency):
        raise ConfigError(
            f"--processes must be at least 1 and, in a closed loop, at most the concurrency ({spec.concurrency}), "
            f"not {spec.processes}"
        )


def _check_lengths(side: str, lengths: Lengths, from_trace: bool) -> None:
    """from_trace: only minimum and maximum are used."""
    flag = f"--{side}"
    most = MAX_LENGTH if lengths.maximum is None else lengths.maximum
    if not 1 <= lengths.minimum <= most <= MAX_LENGTH:
        raise ConfigError(f"--max-{side}: {lengths.minimum} to {most} is no range of lengths between 1 and 2^24")
    if from_trace:
        return
    if not 1 <= lengths.median <= MAX_LENGTH:
        raise ConfigError(f"{flag} must be at least 1 token, not {lengths.median}")
    if lengths.kind == "lognormal" and (lengths.mean is None or not lengths.median <= lengths.mean < math.inf):
        raise ConfigError(
            f"{flag}: a lognormal needs a median and a mean at or above it, not {lengths.median} and {lengths.mean}"
        )
    if not lengths.minimum <= lengths.median <= most:
        raise ConfigError(
            f"{flag}: the median {lengths.median} lies outside [{lengths.minimum}, {most}] (--max-{side})"
        )


def check_slo(slo: Slo) -> None:
    """Raises ConfigError naming the flag."""
    for name in Slo.__struct_fields__:
        bound = getattr(slo, name)
        if bound is not None and not 0 < bound < math.inf:
            raise ConfigError(f"--slo-{name} must be more than 0 ms, not {bound:g}: no request could meet it")
    if slo.e2e is not None and slo.ttft is not None and slo.e2e < slo.ttft:
        raise ConfigError(f"--slo-e2e {slo.e2e:g} ms is below --slo-ttft {slo.ttft:g} ms: drop the looser bound")

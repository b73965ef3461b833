"""When requests of an open loop are due. Pure: a spec and its seed give the same times in every process.

workload → due times → runner, which sends at them whatever the server does.
"""

import numpy as np
from numpy.typing import NDArray

from nori_cluster.bench.records import LoadSpec

GAPS = 1  # names the random stream of the gaps, apart from lengths and prompts
CHUNK = 4096  # gaps drawn at a time


def gaps(spec: LoadSpec, count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Seconds between arrivals, mean 1 / rate. gamma of shape k: coefficient of variation 1 / sqrt(k)."""
    assert spec.rate is not None, "an open loop has a rate"
    if spec.arrival == "constant":
        return np.full(count, 1.0 / spec.rate)
    if spec.arrival == "poisson":
        return random.exponential(1.0 / spec.rate, count)
    return random.gamma(spec.burstiness, 1.0 / (spec.rate * spec.burstiness), count)


def due_times(spec: LoadSpec) -> NDArray[np.float64]:
    """Seconds from the start, ascending, the first at 0; bounded by spec.requests, spec.duration or both."""
    assert spec.requests is not None or spec.duration is not None, "a run has an end"
    random = np.random.default_rng((spec.seed, GAPS))
    parts = [np.zeros(1)]
    count, end = 1, 0.0
    while (spec.requests is None or count < spec.requests) and (spec.duration is None or end < spec.duration):
        parts.append(end + np.cumsum(gaps(spec, CHUNK, random)))
        count, end = count + CHUNK, float(parts[-1][-1])
    times = np.concatenate(parts)[: spec.requests]
    return times if spec.duration is None else times[times < spec.duration]

"""Arrival times: statistics of each process with fixed seeds, bounds, repetition."""

import numpy as np
import pytest

from nori_cluster.bench.arrivals import due_times
from nori_cluster.bench.records import LoadSpec

pytestmark = pytest.mark.unit


def spacing(spec: LoadSpec) -> np.ndarray:
    return np.diff(due_times(spec))


@pytest.mark.parametrize("seed", range(3))
def test_poisson_gaps_are_exponential(seed: int) -> None:
    gaps = spacing(LoadSpec(arrival="poisson", rate=20.0, requests=20_000, seed=seed))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 20, rel=0.05)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(shape: float) -> None:
    gaps = spacing(LoadSpec(arrival="gamma", rate=5.0, burstiness=shape, requests=40_000, seed=3))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / np.sqrt(shape), rel=0.05)


def test_constant_gaps() -> None:
    times = due_times(LoadSpec(arrival="constant", rate=4.0, requests=9))
    assert times == pytest.approx(np.arange(9) / 4)


def test_the_run_ends_where_it_is_told_to() -> None:
    by_time = due_times(LoadSpec(arrival="constant", rate=10.0, duration=2.0))
    assert len(by_time) == 20
    assert by_time[-1] < 2.0
    both = due_times(LoadSpec(arrival="constant", rate=10.0, duration=2.0, requests=5))
    assert len(both) == 5
    many = due_times(LoadSpec(arrival="poisson", rate=5000.0, duration=3.0, seed=1))  # more than one chunk of gaps
    assert len(many) == pytest.approx(15_000, rel=0.05)
    assert np.all(np.diff(many) >= 0)


def test_same_seed_same_times_and_a_longer_run_begins_alike() -> None:
    short = due_times(LoadSpec(arrival="poisson", rate=7.0, requests=50, seed=5))
    again = due_times(LoadSpec(arrival="poisson", rate=7.0, requests=50, seed=5))
    longer = due_times(LoadSpec(arrival="poisson", rate=7.0, requests=9000, seed=5))
    other = due_times(LoadSpec(arrival="poisson", rate=7.0, requests=50, seed=6))
    assert short[0] == 0
    assert np.array_equal(short, again)
    assert np.array_equal(short, longer[:50])
    assert not np.array_equal(short, other)

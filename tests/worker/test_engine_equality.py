"""Scheduler and worker together on a tiny model in float32: whatever is shared, cut, preempted or resumed, each request
says exactly what it says alone. (Logits have a standard deviation of 3: a near tie would have to lie within 1e-5.)"""

from pathlib import Path

import numpy as np
import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.engine import Engine

from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import RowControls, RowSampling

pytestmark = pytest.mark.contract
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("equality") / "tiny")


def ask(
    key: int,
    prompt,
    *,
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    candidate: int = 0,
    bias=(),
    **more,
):
    controls = RowControls(bias_ids=tuple(b[0] for b in bias), bias_values=tuple(b[1] for b in bias)) if bias else None
    sampling = RowSampling(temperature, 1.0, 0, seed, candidate, controls=controls)
    fields = dict(ignore_eos=True) | more
    return SequenceRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens, **fields)


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 380, count).tolist()


def alone(folder: Path, *requests: SequenceRequest) -> dict[int, list[int]]:
    """Each by itself, one after the other, without a prefix cache."""
    engine = Engine(folder, enable_prefix_caching=False)
    outputs: dict[int, list[int]] = {}
    for request in requests:
        outputs |= engine.run(request)
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [256, 32])
def test_f26_sixteen_prompts_with_a_shared_prefix(folder: Path, budget: int, depth: int) -> None:
    """F26: at once, also with a budget that cuts the shared part, also with one aborted in its first step."""
    prefix = ids(0, 48)
    requests = [ask(key, [*prefix, 60 + key]) for key in range(16)]
    want = alone(folder, *requests)
    engine = Engine(folder, depth=depth, max_num_batched_tokens=budget, max_num_seqs=16)
    assert engine.run(*requests) == want
    assert sum(cached == 48 for cached in engine.cached.values()) == 15
    engine = Engine(folder, depth=depth, max_num_batched_tokens=budget, max_num_seqs=16)
    got = engine.run(*requests, abort_first=0)
    assert {key: got[key] for key in range(1, 16)} == {key: want[key] for key in range(1, 16)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_f31_the_same_prompt_three_times_and_its_continuation(folder: Path, length: int, depth: int) -> None:
    """F31: a whole prompt in the cache changes nothing; nor do two at once, nor prompt + output as a new prompt."""
    prompt = ids(length, length)
    engine = Engine(folder, depth=depth)
    (want,) = alone(folder, ask(0, prompt, max_tokens=6)).values()
    for key in (1, 2, 3):
        assert engine.run(ask(key, prompt, max_tokens=6)) == {key: want}
        assert engine.cached[key] == (0 if key == 1 else (length - 1) // BLOCK * BLOCK)
    assert engine.run(ask(4, [*prompt, *want])) == alone(folder, ask(4, [*prompt, *want]))
    assert engine.run(ask(5, prompt, max_tokens=6), ask(6, prompt, max_tokens=6)) == {5: want, 6: want}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}, {"bias": [(30, 2.5), (31, -4.0)]}])
@pytest.mark.parametrize("count", [2, 3])
def test_f28_preemption_is_not_seen(folder: Path, count: int, sampling: dict, cache: bool, depth: int) -> None:
    """F28: 8 blocks of 16 for two or three requests of 106 tokens; exactly 90 tokens each, those of a run alone."""
    requests = [ask(key, ids(key, 16), max_tokens=90, **sampling) for key in range(count)]
    engine = Engine(folder, depth=depth, blocks=8, enable_prefix_caching=cache)
    assert engine.run(*requests) == alone(folder, *requests)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.pool.free == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_f32_a_seeded_request_beside_others(folder: Path, depth: int) -> None:
    """F32: a seeded request says the same beside every mate; siblings differ from each other and repeat."""
    prompt = ids(3, 20)
    mine = ask(0, prompt, max_tokens=16, temperature=0.8, seed=42)
    (want,) = alone(folder, mine).values()
    mates = {
        "unseeded": [ask(1, ids(4, 9), max_tokens=30, temperature=1.0, seed=2**63 + 11)],
        "seed 7": [ask(1, prompt, max_tokens=16, temperature=0.8, seed=7)],
        "greedy": [ask(1, ids(5, 9), max_tokens=30), ask(2, ids(6, 40), max_tokens=3)],
        "forced": [ask(1, ids(5, 9), max_tokens=12, bias=[(44, 100.0)])],
        "sibling": [ask(1, prompt, max_tokens=16, temperature=0.8, seed=42, candidate=1)],
    }
    for name, others in mates.items():
        for order in ([mine, *others], [*others, mine]):
            got = Engine(folder, depth=depth).run(*order)
            assert got[0] == want, name
            for other in others:
                assert got[other.key] == alone(folder, other)[other.key], name
        if name in ("sibling", "seed 7"):
            assert got[1] != want


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_preempting_hitting_run_equals_runs_alone(folder: Path, seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = [ids(100 + i, 32) for i in range(3)]
    requests = []
    for key in range(24):
        prompt = [
            *pieces[rng.integers(3)],
            *pieces[rng.integers(3)][: rng.integers(33)],
            *ids(key, int(rng.integers(1, 9))),
        ]
        warm = bool(rng.integers(2))
        requests.append(
            ask(key, prompt, max_tokens=int(rng.integers(1, 40)), temperature=0.9 if warm else 0.0, seed=key)
        )
    engine = Engine(folder, depth=depth, blocks=20, max_num_batched_tokens=48)
    assert engine.run(*requests) == alone(folder, *requests)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.pool.index.hits > 500
    assert engine.scheduler.pool.evictions > 0

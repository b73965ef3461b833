"""Requests of a load: lengths, prompts, what is shared, that a seed repeats them, what a spec must not hold."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nori_cluster.bench.records import Lengths, LoadSpec, Slo
from nori_cluster.bench.workload import Workload, check_slo, prompt_digest
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit
FIXED = LoadSpec(requests=20, input=Lengths(median=40), output=Lengths(median=9))


def changed(**fields: Any) -> LoadSpec:
    return LoadSpec(**{"requests": 20, "input": Lengths(median=40), **fields})


def everything(spec: LoadSpec) -> list[tuple[Any, bytes]]:
    workload = Workload(spec)
    return [(plan, workload.prompt(plan).tobytes()) for plan in workload.plans()]


def test_fixed_lengths_and_prompts_that_share_nothing() -> None:
    workload = Workload(FIXED)
    plans = list(workload.plans())
    assert {(p.input, p.output, p.due) for p in plans} == {(40, 9, None)}
    prompts = [workload.prompt(plan) for plan in plans]
    assert all(prompt.shape == (40,) and prompt.min() >= 100 and prompt.max() < 32_000 for prompt in prompts)
    assert len({int(prompt[0]) for prompt in prompts}) > 15


def test_the_same_seed_gives_the_same_requests_whoever_makes_them() -> None:
    spec = changed(
        arrival="gamma", rate=4.0, burstiness=0.5, output=Lengths(kind="lognormal", median=30, mean=50), seed=11
    )
    assert everything(spec) == everything(spec)
    halves = [list(Workload(spec).plans(part, 2)) for part in range(2)]
    merged = sorted(itertools.chain(*halves), key=lambda plan: plan.number)
    assert merged == list(Workload(spec).plans())
    assert everything(spec) != everything(changed(arrival="gamma", rate=4.0, burstiness=0.5, seed=12))


def test_warm_up_requests_are_like_the_others_but_have_prompts_of_their_own() -> None:
    workload = Workload(FIXED)
    warm, plan = workload.plan(-1), workload.plan(1)
    assert (warm.input, warm.output) == (40, 9)
    assert prompt_digest(workload.prompt(warm)) != prompt_digest(workload.prompt(plan))


def test_a_shared_prefix() -> None:
    workload = Workload(changed(shared_prefix=25))
    prompts = [workload.prompt(plan) for plan in workload.plans()]
    assert all(np.array_equal(prompt[:25], prompts[0][:25]) for prompt in prompts)
    assert len({int(prompt[25]) for prompt in prompts}) > 15


def test_lognormal_lengths_have_the_median_and_the_mean() -> None:
    lengths = Lengths(kind="lognormal", median=129, mean=211)
    workload = Workload(changed(requests=20_000, output=lengths))
    drawn = np.array([plan.output for plan in workload.plans()])
    assert np.median(drawn) == pytest.approx(129, rel=0.03)
    assert drawn.mean() == pytest.approx(211, rel=0.04)
    cut = Workload(
        changed(requests=2000, output=Lengths(kind="lognormal", median=129, mean=211, minimum=50, maximum=300))
    )
    drawn = np.array([plan.output for plan in cut.plans()])
    assert (drawn.min(), drawn.max()) == (50, 300)


def test_a_closed_loop_with_a_duration_never_runs_out() -> None:
    workload = Workload(LoadSpec(duration=5.0))
    assert workload.total is None
    assert next(itertools.islice(workload.plans(), 10_000, None)).number == 10_000


def test_text_of_a_chat_is_one_word_per_token() -> None:
    workload = Workload(FIXED)
    text = workload.text(workload.prompt(workload.plan(0)))
    assert len(text.split(" ")) == 40


MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 1300, "output_length": 6, "hash_ids": [0, 1, 3]}
{"timestamp": 3000, "input_length": 700, "output_length": 7, "hash_ids": [9, 1]}
"""


def test_mooncake_ids_become_shared_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    workload = Workload(LoadSpec(arrival="trace", trace=str(tmp_path / "t.jsonl"), trace_speed=2.0))
    plans = list(workload.plans())
    assert [plan.due for plan in plans] == [0.0, 1.0, 1.5]
    first, second, third = (workload.prompt(plan) for plan in plans)
    assert [len(first), len(second), len(third)] == [1100, 1300, 700]
    assert np.array_equal(first[:1024], second[:1024])
    assert not np.array_equal(first[1024:1100], second[1024:1100])
    assert np.array_equal(third[512:], first[512:700])  # the same block, at the same place of another beginning
    assert not np.array_equal(third[:512], first[:512])
    assert workload.plan(-1).input in {1100, 1300, 700}


def test_a_trace_is_cut_in_time_number_and_length(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    spec = {"arrival": "trace", "trace": str(tmp_path / "t.jsonl"), "input": Lengths(maximum=600)}
    assert [plan.input for plan in Workload(LoadSpec(**spec)).plans()] == [600, 600, 600]
    assert Workload(LoadSpec(**spec, duration=2.5)).total == 2
    assert Workload(LoadSpec(**spec, requests=1)).total == 1


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"arrival": "poisson"}, "--rate"),
        ({"arrival": "poisson", "rate": 0.0}, "--rate"),
        ({"arrival": "constant", "rate": float("nan")}, "--rate"),
        ({"rate": 3.0}, "--rate"),
        ({"arrival": "gamma", "rate": 1.0, "burstiness": 0.0}, "--burstiness"),
        ({"arrival": "poisson", "rate": 1.0, "burstiness": 0.5}, "--burstiness"),
        ({"arrival": "trace"}, "--trace"),
        ({"trace": "x"}, "--trace"),
        ({"concurrency": 0}, "--concurrency"),
        ({"requests": None}, "--requests"),
        ({"requests": 0}, "--requests"),
        ({"duration": -1.0}, "--duration"),
        ({"timeout": 0.0}, "--timeout"),
        ({"warmup": -1}, "--warmup"),
        ({"seed": -1}, "--seed"),
        ({"processes": 9}, "--processes"),
        ({"vocab_size": 100}, "--vocab-size"),
        ({"shared_prefix": 41}, "--shared-prefix"),
        ({"sampling": {"stream": False}}, "--sampling"),
        ({"output": Lengths(median=0)}, "--output"),
        ({"output": Lengths(kind="lognormal", median=10)}, "--output"),
        ({"output": Lengths(kind="lognormal", median=10, mean=9.0)}, "--output"),
        ({"output": Lengths(kind="lognormal", median=10, mean=12.0, maximum=9)}, "--output"),
        ({"input": Lengths(minimum=5, maximum=4)}, "--max-input"),
        ({"output": Lengths(median=128, maximum=64)}, "--output"),
    ],
)
def test_a_spec_that_cannot_work_names_its_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Workload(changed(**fields))


def test_impossible_service_levels() -> None:
    check_slo(Slo())
    check_slo(Slo(ttft=None, tpot=None))
    for slo in (Slo(ttft=0), Slo(tpot=-1), Slo(e2e=float("nan")), Slo(ttft=500, e2e=100)):
        with pytest.raises(ConfigError, match="--slo-"):
            check_slo(slo)

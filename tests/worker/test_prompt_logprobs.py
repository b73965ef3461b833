"""Prompt logprobs: one entry per prompt token but the first, equal to a forward pass, whatever is cached or cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.checkpoints import make_tiny_llama
from fakes.engine import Engine
from fakes.stepping import group_config, load_worker, sequence_logits

from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import RowControls, RowSampling

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("prompt_logprobs") / "tiny")


def ask(key: int, prompt: list[int], top: int = 2, **more: object) -> SequenceRequest:
    sampling = RowSampling(0.0, 1.0, 0, 0, 0, controls=RowControls(prompt_logprobs=top) if top >= 0 else None)
    fields = {"max_tokens": 1, "ignore_eos": True} | more
    return SequenceRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


def check(folder: Path, prompt: list[int], found: list[tuple[float, dict[int, float]]], top: int = 2) -> None:
    worker = load_worker(group_config(folder))
    table = torch.log_softmax(sequence_logits(worker, prompt).double(), -1)
    assert len(found) == len(prompt) - 1
    for place, (chosen, tops) in enumerate(found):
        assert chosen == pytest.approx(float(table[place, prompt[place + 1]]), abs=1e-4)
        best = table[place].topk(top) if top else None
        assert list(tops) == (best.indices.tolist() if best else [])
        assert list(tops.values()) == pytest.approx(best.values.tolist() if best else [], abs=1e-4)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("length", [2, 16, 17, 33])
def test_f13_asked_twice_with_a_warm_cache(folder: Path, length: int, cache: bool) -> None:
    """F13: a cached position is computed again, so every reply has every entry, in any order of requests."""
    prompt = list(range(100, 100 + length))
    longer = prompt[:32] + list(range(200, 216))
    engine = Engine(folder, enable_prefix_caching=cache)
    engine.run(ask(9, prompt, top=-1))
    for key, tokens in enumerate([prompt, prompt, longer, prompt]):
        engine.run(ask(key, tokens))
        check(folder, tokens, engine.prompt_logprobs[key])
    assert engine.cached[9] == 0
    engine.run(ask(10, prompt, top=-1))
    assert engine.cached[10] == (16 * ((length - 1) // 16) if cache else 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_preemption_and_company(folder: Path, depth: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 380, n).tolist() for n in (90, 40, 70, 1, 55)]
    engine = Engine(folder, depth=depth, blocks=9, max_num_batched_tokens=24)
    asked = [ask(key, prompt, top=key % 3, max_tokens=20) for key, prompt in enumerate(prompts)]
    engine.run(*asked)
    assert engine.scheduler.preemptions > 0
    for key, prompt in enumerate(prompts):
        if len(prompt) > 1:
            check(folder, prompt, engine.prompt_logprobs[key], top=key % 3)
    assert 3 not in engine.prompt_logprobs


def test_only_the_prompt_is_scored_after_resumption(folder: Path) -> None:
    prompt = list(range(30, 50))
    engine = Engine(folder)
    engine.run(ask(0, [*prompt, 60, 61], resumed_tokens=2, max_tokens=4))
    check(folder, prompt, engine.prompt_logprobs[0])

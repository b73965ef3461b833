"""Drafts change how fast tokens come, never which: speculative runs against plain ones on a tiny model."""

from pathlib import Path

import numpy as np
import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.engine import Engine

from nori_cluster.config import SpeculativeConfig
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import RowControls, RowSampling

pytestmark = pytest.mark.contract
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("speculation") / "tiny")


def requests(count: int) -> list[SequenceRequest]:
    """Greedy and seeded ones, penalties, logprobs, stop ids; a strong bias makes some repeat themselves."""
    rng = np.random.default_rng(5)
    made = []
    for key in range(count):
        controls = [
            None,
            RowControls(bias_ids=(40, 41), bias_values=(9.0, 9.0)),
            RowControls(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
            RowControls(
                bias_ids=(50,), bias_values=(14.0,), bad_words=((50, 50, 50, 50),), min_tokens=9, late_ids=(60,)
            ),
        ][key % 4]
        warm = 0.8 if key % 3 == 0 else 0.0
        sampling = RowSampling(warm, 0.95, 0, key, 0, logprobs=2 if key % 2 else -1, controls=controls)
        prompt = rng.integers(5, 12 if key % 2 else 380, rng.integers(1, 40)).tolist()
        made.append(
            SequenceRequest(
                key=key,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                max_tokens=int(rng.integers(1, 50)),
                stop_token_ids=(41, 60) if key % 5 == 0 else (),
                ignore_eos=True,
            )
        )
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [64, 9])
def test_speculation_changes_no_token(folder: Path, blocks: int, depth: int) -> None:
    asked = requests(24)
    plain = Engine(folder)
    want = plain.run(*asked)
    engine = Engine(folder, depth=depth, blocks=blocks, speculative=NGRAM, max_num_batched_tokens=40)
    assert engine.run(*asked) == want
    assert engine.scheduler.accepted_drafts > 50
    assert engine.scheduler.proposed_drafts > engine.scheduler.accepted_drafts
    for key, finish in engine.finishes.items():
        assert finish[:3] == plain.finishes[key][:3]
        for (got, got_top), (wanted, wanted_top) in zip(engine.logprobs[key], plain.logprobs[key], strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)
            assert list(got_top) == list(wanted_top)
    if blocks == 9:
        assert engine.scheduler.preemptions > 0
    kept = sum(finish.accepted_drafts for finish in engine.finishes.values())
    assert kept == engine.scheduler.accepted_drafts or depth == 2  # depth 2: results of ended sequences are dropped


def test_copying_takes_fewer_steps(folder: Path) -> None:
    """A sequence made to say one token over and over: four tokens a step with three drafts."""
    sampling = RowSampling(0.0, 1.0, 0, 0, 0, controls=RowControls(bias_ids=(7,), bias_values=(100.0,)))
    asked = SequenceRequest(key=0, prompt_token_ids=(5, 6), sampling=sampling, max_tokens=41, ignore_eos=True)
    engine = Engine(folder, speculative=NGRAM)
    assert engine.run(asked) == {0: [7] * 41}
    assert engine.scheduler.step <= 14
    assert engine.finishes[0].accepted_drafts >= 28

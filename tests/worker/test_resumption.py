"""A request cut at any token and continued from prompt and tokens equals the uncut one, whatever it asks for.

In batch-invariant mode, where equality is exact: the continuation recomputes as a prefill what was decoded before.
"""

from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.engine import Engine

from nori_cluster.config import NumericsConfig, SpeculativeConfig
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import Constraint, FinishReason, RowControls, RowSampling

pytestmark = pytest.mark.contract
INVARIANT = NumericsConfig(batch_invariant=True)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
LENGTH = 24
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
PROMPT = list(range(20, 37))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("resumption") / "tiny")


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "second candidate": {"temperature": 1.0, "seed": 7, "candidate": 1},
    "filters": {"temperature": 1.3, "top_k": 30, "seed": 2, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.1, "frequency_penalty": 0.6, "temperature": 0.7, "seed": 3},
    "bias": {"bias_ids": (40, 41), "bias_values": (4.0, -9.0)},
    "allowed": {"allowed_ids": tuple(range(30, 60)), "temperature": 1.0, "seed": 4},
    "bad words": {"bias_ids": (50,), "bias_values": (12.0,), "bad_words": ((50, 50, 50), (50, 51))},
    "min_tokens": {"min_tokens": 15, "late_ids": (44,), "bias_ids": (44,), "bias_values": (50.0,)},
    "logprobs": {"logprobs": 3, "temperature": 0.6, "seed": 5},
    "stop id": {"temperature": 1.0, "seed": 11, "stop_token_ids": tuple(range(5, 45))},
    "regex": {"constraint": Constraint("regex", "[a-z]{3} [0-9]{2,9}"), "temperature": 1.0, "seed": 6},
    "schema": {
        "constraint": Constraint("json_schema", SCHEMA),
        "temperature": 1.5, "seed": 8,
    },
}  # fmt: skip


def request(key: int, settings: dict[str, Any], generated: list[int]) -> SequenceRequest:
    plain: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "candidate": 0} | settings
    stop = plain.pop("stop_token_ids", ())
    controls = {name: plain.pop(name) for name in RowControls.__struct_fields__ if name in plain}
    return SequenceRequest(
        key=key,
        prompt_token_ids=(*PROMPT, *generated),
        resumed_tokens=len(generated),
        sampling=RowSampling(**plain, controls=RowControls(**controls) if controls else None),
        max_tokens=LENGTH,
        stop_token_ids=stop,
        ignore_eos="constraint" not in settings,
    )


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("feature", FEATURES)
def test_cut_at_any_token(folder: Path, feature: str, speculative: SpeculativeConfig | None) -> None:
    settings = FEATURES[feature]
    first = Engine(folder, numerics=INVARIANT)
    whole = first.run(request(0, settings, []))[0]
    end = first.finishes[0]
    assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
    other = Engine(folder, numerics=INVARIANT, speculative=speculative, max_num_batched_tokens=40)
    cuts = range(1, len(whole))
    found = other.run(*(request(cut, settings, whole[:cut]) for cut in cuts))
    for cut in cuts:
        assert found[cut] == whole[cut:], f"cut after {cut} tokens"
        assert other.finishes[cut][1:4] == end[1:4]
        assert other.logprobs[cut] == first.logprobs[0][cut:]

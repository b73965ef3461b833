"""Llama against the reference library on tiny checkpoints: logits, chunking, and a mutation for each quirk."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.checkpoints import LLAMA3_ROPE, make_tiny_llama
from fakes.stepping import GREEDY, Driver, group_config, load_worker, sequence_logits
from transformers import LlamaForCausalLM

from nori_cluster.checkpoint.hf_config import read_config
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import RopeSpec, inverse_frequencies
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models.decoder import Decoder
from nori_cluster.models.llama import Llama
from nori_cluster.quant import QUANT
from nori_cluster.quant.none import Unquantized
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
TOLERANCE = 1e-4
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3_ROPE},
    "all heads": {"heads": 4, "kv_heads": 4},
    "one kv head, wide heads": {"heads": 6, "kv_heads": 1, "head_dim": 24, "hidden": 96},
    "theta and eps": {"rope_theta": 500.0, "norm_eps": 0.05},
    "odd vocabulary": {"vocab": 131, "tokenizer": False},
}


def prompt(length: int, vocab: int, seed: int = 3) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference_library(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_llama(tmp_path / "m", **KINDS[kind])
    worker = load_worker(group_config(folder))
    tokens = prompt(300, worker.model.spec.vocab_size)
    expected = reference_logits(folder, tokens)
    assert 2 < expected.std() < 5
    assert relative_error(sequence_logits(worker, tokens), expected) < TOLERANCE


def test_bfloat16_is_close(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    worker = load_worker(group_config(folder, dtype="bfloat16"))
    tokens = prompt(100, 384)
    expected = reference_logits(folder, tokens)  # the same bf16 weights in float32 arithmetic
    theirs = relative_error(reference_logits(folder, tokens, torch.bfloat16), expected)
    assert relative_error(sequence_logits(worker, tokens), expected) < 2 * theirs < 0.1


@pytest.mark.parametrize("chunks", [[1] * 40, [16, 16, 8], [17, 1, 1, 21], [39, 1], [5, 30, 5]])
def test_chunked_equals_one_shot(tmp_path: Path, chunks: list[int]) -> None:
    worker = load_worker(group_config(make_tiny_llama(tmp_path / "m", rope_scaling=LLAMA3_ROPE)))
    tokens = prompt(40, 384)
    whole = sequence_logits(worker, tokens)
    assert relative_error(sequence_logits(worker, tokens, chunks), whole) < 1e-5


def test_rows_together_equal_rows_alone(tmp_path: Path) -> None:
    """Prefill, chunk and decode rows in the same steps give each row what it gets alone."""
    worker = load_worker(group_config(make_tiny_llama(tmp_path / "m")))
    lengths = [1, 2, 15, 16, 17, 33, 70, 120]
    prompts = [prompt(length, 384, seed=length) for length in lengths]
    alone = []
    for tokens in prompts:
        driver = Driver(worker)
        driver.start(0, tokens)
        alone.append(driver.generate([0], 12)[0])
    driver = Driver(worker)
    together: dict[int, list[int]] = {slot: [] for slot in range(len(prompts))}
    left = dict(enumerate(lengths))
    for round_number in range(200):
        if round_number < len(prompts):
            driver.start(round_number, prompts[round_number], GREEDY)
        rows = {}
        for slot in range(min(round_number + 1, len(prompts))):
            if len(together[slot]) < 12:
                rows[slot] = min(left[slot], 13) if left[slot] else 1
        if not rows:
            break
        result = driver.step(rows)
        assert result is not None
        new = iter(torch.frombuffer(bytearray(result.ids), dtype=torch.int32).tolist() if result.ids else [])
        for slot, count in rows.items():
            left[slot] = max(0, left[slot] - count)
            if not left[slot]:
                together[slot].append(next(new))
    assert [together[slot] for slot in range(len(prompts))] == alone


def _swap_kv_heads(worker: Worker) -> None:
    for layer in worker.model.layers:
        q = layer.attention.qkv.weight[: 8 * 16].view(2, 4, 16, -1)  # KV head, query head in its group
        q.copy_(q.clone().view(4, 2, 16, -1).transpose(0, 1))  # as if head h read KV head h % 2


def _no_bias(worker: Worker) -> None:
    for module in worker.model.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()


def _norm_eps(worker: Worker) -> None:
    for module in worker.model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-5


def _frequencies(spec: RopeSpec) -> Any:
    def change(worker: Worker) -> None:
        worker.model.frequencies = [inverse_frequencies(spec, worker.model.spec.head_dim)]

    return change


def _magnitude(worker: Worker) -> None:
    worker.model.ropes = [dataclasses.replace(rope, magnitude=1.0) for rope in worker.model.ropes]


def _untied_head(worker: Worker) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(worker.model.head.weight.shape, generator=generator)
    worker.model.head.weight = torch.nn.Parameter(weight * 3 / 128**0.5, requires_grad=False)


def _norm_weights(worker: Worker) -> None:
    worker.model.norm.weight.fill_(1.0)


MUTATIONS = {
    "rope theta": ({"rope_theta": 500.0}, _frequencies(RopeSpec(10000.0))),
    "llama3 scaling": ({"rope_scaling": LLAMA3_ROPE}, _frequencies(RopeSpec(10000.0))),
    "linear scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, _frequencies(RopeSpec(10000.0))),
    "yarn frequencies": ({"rope_scaling": YARN_ROPE}, _frequencies(RopeSpec(10000.0))),
    "yarn magnitude": ({"rope_scaling": YARN_ROPE}, _magnitude),
    "norm eps": ({"norm_eps": 0.05}, _norm_eps),
    "GQA mapping": ({}, _swap_kv_heads),
    "bias": ({"attention_bias": True, "mlp_bias": True}, _no_bias),
    "tied head": ({"tied": True}, _untied_head),
    "final norm weight": ({}, _norm_weights),
}


@pytest.mark.parametrize("quirk", MUTATIONS)
def test_each_quirk_matters(tmp_path: Path, quirk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching it off exceeds a hundred times the tolerance, so the tests above would notice."""
    monkeypatch.setattr(Unquantized, "after_load", lambda self, layer: None)  # weights stay where they can be changed
    settings, mutate = MUTATIONS[quirk]
    folder = make_tiny_llama(tmp_path / "m", **settings)
    worker = load_worker(group_config(folder))
    tokens = prompt(120, 384)
    expected = reference_logits(folder, tokens)
    assert relative_error(sequence_logits(worker, tokens), expected) < TOLERANCE
    with torch.inference_mode():
        mutate(worker)
    assert relative_error(sequence_logits(worker, tokens), expected) > 100 * TOLERANCE


ROPES_SERVED: list[dict[str, Any]] = [
    {"rope_scaling": LLAMA3_ROPE},
    {"rope_scaling": LLAMA3_ROPE | {"type": "yarn"}},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": None},
    {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0}, "rope_theta": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": YARN_ROPE},
    {"rope_scaling": YARN_ROPE | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": YARN_ROPE | {"mscale": 2.0, "mscale_all_dim": 0.5}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
]


@pytest.mark.parametrize("config", ROPES_SERVED)
def test_f37_rope_kinds_served(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_tiny_llama(tmp_path / "m", max_positions=256, config=config)
    worker = load_worker(group_config(folder))
    tokens = prompt(200, 384)
    assert relative_error(sequence_logits(worker, tokens), reference_logits(folder, tokens)) < TOLERANCE


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "dynamic"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        (YARN_ROPE | {"beta_fast": -1}, "beta_fast"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "banana", "factor": 2}, "banana"),
        ({"rope_type": "llama3"}, "factor"),
        ({"type": "linear"}, "factor"),
        (LLAMA3_ROPE | {"factor": "8"}, "factor"),
        (LLAMA3_ROPE | {"factor": -1.0}, "factor"),
        ({k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}, "original_max_position"),
    ],
)
def test_f37_other_rope_kinds_are_refused_by_name(tmp_path: Path, scaling: dict[str, Any], named: str) -> None:
    folder = make_tiny_llama(tmp_path / "m", config={"rope_scaling": scaling}, tokenizer=False)
    with pytest.raises(CheckpointError, match=named):
        load_worker(group_config(folder))


def test_weights_name_every_parameter_once(tmp_path: Path) -> None:
    from_config = Llama.spec_from_hf(read_config(make_tiny_llama(tmp_path / "m", tokenizer=False)))
    for spec in (from_config, dataclasses.replace(from_config, tied=True, qkv_bias=True, out_bias=True, mlp_bias=True)):
        sources = list(Llama.weights(spec))
        assert len({s.checkpoint for s in sources}) == len(sources)
        context = LayerContext(SoloGroup(), torch.float32, torch.device("cpu"), QUANT["none"])
        parameters = {name for name, _ in Decoder(spec, context).named_parameters()}
        assert parameters == {f"{s.module}.{s.parameter}" for s in sources}

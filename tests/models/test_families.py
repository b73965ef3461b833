"""Every family against the reference library on tiny checkpoints: logits, greedy tokens, chunks, cached prefixes, two
ranks, and for each quirk a model without it that must disagree."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.families import FAMILIES, VOCAB, WINDOW, make_tiny, reference
from fakes.mixing import Mixer, Row, differences
from fakes.stepping import GREEDY, Driver, group_config, load_worker, rank_logits, sequence_logits
from fakes.threaded import on_ranks

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.checkpoint.hf_config import CheckpointConfig, read_config
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.errors import CheckpointError, ConfigError
from nori_cluster.layers.rope import RopeSpec
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models import MODELS, REFUSED
from nori_cluster.models.base import ModelSpec
from nori_cluster.models.decoder import Decoder
from nori_cluster.quant import QUANT
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
TOLERANCE = 1e-4
NEAR_TIE = 1e-3  # a logit this close to the best may win with other rounding
LENGTH = 300
TOKENS = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


class Checkpoints:
    """Folders by family, made once; with the reference library's logits of TOKENS."""

    def __init__(self, root: Path) -> None:
        self.folder: Callable[[str], Path] = lru_cache(lambda name: make_tiny(root / name.replace(" ", "_"), name))
        self.logits: Callable[[str], torch.Tensor] = lru_cache(self._logits)

    @torch.no_grad()
    def _logits(self, name: str) -> torch.Tensor:
        return reference(self.folder(name))(torch.tensor([TOKENS])).logits[0].float()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("families"))


def load(folder: Path) -> Worker:
    return load_worker(group_config(folder, max_num_seqs=4, num_blocks=64))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_reference_library(checkpoints: Checkpoints, name: str) -> None:
    expected = checkpoints.logits(name)
    assert 2 < expected.std() < 5
    worker = load(checkpoints.folder(name))
    whole = sequence_logits(worker, TOKENS)
    assert relative_error(whole, expected) < TOLERANCE
    chunked = sequence_logits(worker, TOKENS, [40, 1, 1, 23, 100, 35, 99, 1])
    assert relative_error(chunked, whole) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_reference_librarys(checkpoints: Checkpoints, name: str) -> None:
    """64 tokens, each the best of the reference library's logits for what came before it, or as good as the best."""
    worker = load(checkpoints.folder(name))
    driver = Driver(worker)
    prompt = TOKENS[:50]
    driver.start(0, prompt, GREEDY)
    tokens = driver.generate([0], 64)[0]
    with torch.no_grad():
        logits = reference(checkpoints.folder(name))(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert len(tokens) == 64
    assert (logits.max(dim=1).values - chosen).max() < NEAR_TIE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cached_prefix_gives_what_a_cold_one_does(checkpoints: Checkpoints, name: str) -> None:
    """Hits inside and beyond the window, with other rows beside."""
    worker = load_worker(group_config(checkpoints.folder(name), num_blocks=400))
    mixer = Mixer(worker)
    size, expected = worker.cache.block_size, checkpoints.logits(name)
    owner = Row(TOKENS)
    mixer.sequence(TOKENS, (LENGTH,), 0, owner)
    for blocks in (1, 3, (LENGTH - 1) // size):
        hit = Row(TOKENS, owner.blocks[:blocks], blocks * size)
        first = min(LENGTH - blocks * size - 1, 5)
        found = mixer.sequence(TOKENS, (first, LENGTH - blocks * size - first), 3, hit)
        logits = torch.cat([part for part in found if part is not None])
        assert relative_error(logits, expected[blocks * size :]) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite", "smollm3", "qwen3 moe, window"])
def test_batch_invariant_mode_keeps_bits(checkpoints: Checkpoints, name: str) -> None:
    """Few cuts; tests/worker/test_invariance.py tries many of them on Llama."""
    config = group_config(checkpoints.folder(name), num_blocks=400, batch_invariant=True)
    assert not any(differences(load_worker(config), every=70, singles=8).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_one(checkpoints: Checkpoints, name: str) -> None:
    folder = checkpoints.folder(name)

    def work(group: Any) -> torch.Tensor | None:
        return rank_logits(load_worker(group_config(folder, tp=2, num_blocks=64), group), TOKENS, [200, 1, 99])

    first, second = on_ranks(2, work)
    assert second is None
    assert first is not None
    assert relative_error(first, checkpoints.logits(name)) < TOLERANCE


PLAIN = (AttentionPattern(),) * 3


def without_window(spec: ModelSpec) -> ModelSpec:
    return replace(spec, patterns=tuple(replace(pattern, window=0) for pattern in spec.patterns))


def windows_swapped(spec: ModelSpec) -> ModelSpec:
    other = {0: WINDOW, WINDOW: 0}
    return replace(spec, patterns=tuple(replace(pattern, window=other[pattern.window]) for pattern in spec.patterns))


def without_score_cap(spec: ModelSpec) -> ModelSpec:
    return replace(spec, patterns=tuple(replace(pattern, softcap=0.0) for pattern in spec.patterns))


def experts(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, experts=spec.experts and replace(spec.experts, **fields))


def changed(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **fields)


QUIRKS: dict[tuple[str, str], Callable[[ModelSpec], ModelSpec]] = {
    ("mistral", "window"): without_window,
    ("mistral", "window off by one"): changed(patterns=(AttentionPattern(WINDOW + 1),) * 3),
    ("qwen2", "biases"): changed(qkv_bias=False),
    ("qwen2 windows, tied", "windows"): without_window,
    ("qwen2 windows, tied", "which layers"): windows_swapped,
    ("qwen3", "norms of q and k"): changed(qk_norm=""),
    ("phi3", "window"): without_window,
    ("gemma2", "windows"): without_window,
    ("gemma2", "which layers"): windows_swapped,
    ("gemma2", "cap of scores"): without_score_cap,
    ("gemma2", "cap of logits"): changed(logits_softcap=0.0),
    ("gemma2", "score scale"): changed(attention_scale=None),
    ("gemma2", "embedding scale"): changed(embedding_scale=1.0),
    ("gemma2", "norm offset"): changed(norm_offset=False),
    ("gemma2", "norms after"): changed(post_norms=False),
    ("gemma2", "gelu"): changed(activation="silu"),
    ("gemma3", "windows"): without_window,
    ("gemma3", "norms of q and k"): changed(qk_norm=""),
    ("gemma3", "local rope"): lambda spec: replace(spec, ropes=(spec.rope,) * 3),
    ("gemma3", "rope scaling"): lambda spec: replace(
        spec, ropes=tuple(replace(rope, kind="default") if rope else None for rope in spec.ropes)
    ),
    ("olmo2", "norms of q and k"): changed(qk_norm=""),
    ("granite", "embedding scale"): changed(embedding_scale=1.0),
    ("granite", "residual scale"): changed(residual_scale=1.0),
    ("granite", "score scale"): changed(attention_scale=None),
    ("granite", "logits divisor"): changed(logits_divisor=1.0),
    ("mixtral", "window"): without_window,
    ("mixtral", "normalised"): experts(normalised=False),
    ("mixtral", "experts per token"): experts(chosen=1),
    ("qwen3 moe", "norms of q and k"): changed(qk_norm=""),
    ("qwen3 moe", "normalised"): experts(normalised=False),
    ("qwen3 moe", "experts per token"): experts(chosen=2),
    ("qwen3 moe, window", "not normalised"): experts(normalised=True),
    ("qwen3 moe, window", "window"): without_window,
    ("smollm3", "layers without positions"): changed(ropes=()),
}


@pytest.mark.parametrize(("name", "quirk"), QUIRKS)
def test_each_quirk_matters(checkpoints: Checkpoints, name: str, quirk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the logits are off by more than a hundred times the tolerance, so the tests above would notice."""
    family = MODELS[FAMILIES[name].architecture]
    honest = family.spec_from_hf
    change = QUIRKS[name, quirk]

    def mutated(config: CheckpointConfig) -> ModelSpec:
        spec = honest(config)
        assert change(spec) != spec
        return change(spec)

    monkeypatch.setattr(family, "spec_from_hf", staticmethod(mutated))
    found = sequence_logits(load(checkpoints.folder(name)), TOKENS)
    assert relative_error(found, checkpoints.logits(name)) > 100 * TOLERANCE


def test_olmo2_norms_come_after(checkpoints: Checkpoints) -> None:
    worker = load(checkpoints.folder("olmo2"))
    for layer in worker.model.layers:
        layer.attention_norm, layer.attention_post_norm = layer.attention_post_norm, None
    error = relative_error(sequence_logits(worker, TOKENS), checkpoints.logits("olmo2"))
    assert error > 100 * TOLERANCE


def test_phi3_parts_are_fused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    family = MODELS["Phi3ForCausalLM"]
    spec = family.spec_from_hf(read_config(checkpoints.folder("phi3")))
    monkeypatch.setattr(family, "spec_from_hf", staticmethod(lambda config: replace(spec, fused=False)))
    with pytest.raises(CheckpointError, match="tensors are missing"):
        load(checkpoints.folder("phi3"))


@pytest.mark.parametrize("layers", [(True, True, True), (True, False, False)])
def test_qwen3_moe_says_which_layers_have_experts(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, layers: tuple[bool, ...]
) -> None:
    family = MODELS["Qwen3MoeForCausalLM"]
    spec = experts(layers=layers)(family.spec_from_hf(read_config(checkpoints.folder("qwen3 moe"))))
    monkeypatch.setattr(family, "spec_from_hf", staticmethod(lambda config: spec))
    with pytest.raises(CheckpointError, match="tensors are missing"):
        load(checkpoints.folder("qwen3 moe"))


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_name_every_parameter(checkpoints: Checkpoints, name: str) -> None:
    family = MODELS[FAMILIES[name].architecture]
    spec = family.spec_from_hf(read_config(checkpoints.folder(name)))
    sources = list(family.weights(spec))
    assert len({(source.checkpoint, source.part) for source in sources}) == len(sources)
    context = LayerContext(SoloGroup(), torch.float32, torch.device("cpu"), QUANT["none"])
    parameters = {parameter for parameter, _ in Decoder(spec, context).named_parameters()}
    assert parameters == {f"{source.module}.{source.parameter}" for source in sources}


def test_every_architecture_has_a_checkpoint_here() -> None:
    """Llama has its own file."""
    assert {tiny.architecture for tiny in FAMILIES.values()} | {"LlamaForCausalLM"} == set(MODELS)


@pytest.mark.parametrize("name", [*REFUSED, "BananaForCausalLM"])
def test_other_architectures_are_refused_with_what_is_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*supported: Gemma2ForCausalLM.*SmolLM3ForCausalLM"):
        MODELS[name]


def config_of(name: str, folder: Path, **raw: Any) -> CheckpointConfig:
    config = read_config(folder)
    return CheckpointConfig(**{key: getattr(config, key) for key in config.__struct_fields__} | {"raw": raw})


def test_gemma3_files_of_the_older_form(checkpoints: Checkpoints) -> None:
    """rope_theta, rope_scaling and rope_local_base_freq beside one another; every sixth layer sees everything."""
    raw = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    spec = MODELS["Gemma3ForCausalLM"].spec_from_hf(config_of("gemma3", checkpoints.folder("gemma3"), **raw))
    assert spec.rope == RopeSpec(1e6, "linear", 8.0)
    assert spec.ropes == (RopeSpec(1e4),) * 3
    assert spec.patterns == (AttentionPattern(4096),) * 3
    assert spec.tied


def test_gemma3_with_one_rope_given(checkpoints: Checkpoints) -> None:
    """What an object for a kind of layer lacks comes from beside it, each kind's own."""
    raw = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 5e5}
    spec = MODELS["Gemma3ForCausalLM"].spec_from_hf(config_of("gemma3", checkpoints.folder("gemma3"), **raw))
    assert spec.rope == RopeSpec(5e5, "linear", 8.0)
    assert spec.ropes == (RopeSpec(1e4),) * 3


def test_qwen2_with_the_switch_and_no_window_sees_everything(checkpoints: Checkpoints) -> None:
    raw = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}
    assert not MODELS["Qwen2ForCausalLM"].spec_from_hf(config_of("qwen2", checkpoints.folder("qwen2"), **raw)).patterns


REFUSED_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"hidden_act": "gelu"}, "hidden_act"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}}, "longrope"),
    ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"final_logit_softcapping": -1}, "final_logit_softcapping"),
    ("granite", {"logits_scaling": True}, "logits_scaling"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("qwen3 moe", {"mlp_only_layers": [3]}, "mlp_only_layers"),
    ("qwen3 moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ("qwen3 moe", {"moe_intermediate_size": 0.5}, "moe_intermediate_size"),
    ("qwen3 moe", {"num_experts": 10**9}, "num_experts"),
    ("qwen2", {"rms_norm_eps": "small"}, "rms_norm_eps"),
    ("qwen2", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
    ("qwen2", {"layer_types": [{}] * 3}, "layer_types"),
    ("qwen3", {"attention_bias": "false"}, "attention_bias"),
    ("qwen3", {"head_dim": 24.5}, "head_dim"),
    ("mistral", {"sliding_window": 0.5}, "sliding_window"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma3", {"rope_parameters": ["full_attention"]}, "rope_parameters"),
    ("granite", {"embedding_multiplier": 10**400}, "embedding_multiplier"),
    ("olmo2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta"),
    ("olmo2", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
    ("phi3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}, "yarn"),
    ("smollm3", {"no_rope_layers": ["1", "0", "1"]}, "no_rope_layers"),
]


@pytest.mark.parametrize(("name", "raw", "key"), REFUSED_SETTINGS)
def test_settings_that_are_not_served_are_named(
    checkpoints: Checkpoints, name: str, raw: dict[str, Any], key: str
) -> None:
    with pytest.raises(CheckpointError, match=key):
        MODELS[FAMILIES[name].architecture].spec_from_hf(config_of(name, checkpoints.folder(name), **raw))

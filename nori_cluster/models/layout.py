"""What the families share: the spec of a plain pre-norm decoder, and the tensor names that most checkpoints use."""

from collections.abc import Iterator
from typing import Any

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import positive, rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec, WeightSource

Modules = tuple[tuple[str, str, tuple[str, ...]], ...]  # theirs, ours, parts
_SPLIT: Modules = (
    ("self_attn.q_proj", "attention.qkv", ("q",)),
    ("self_attn.k_proj", "attention.qkv", ("k",)),
    ("self_attn.v_proj", "attention.qkv", ("v",)),
    ("self_attn.o_proj", "attention.out", ("",)),
)
_SPLIT_MLP: Modules = (
    ("mlp.gate_proj", "mlp.gate_up", ("gate",)),
    ("mlp.up_proj", "mlp.gate_up", ("up",)),
    ("mlp.down_proj", "mlp.down", ("",)),
)
_FUSED: Modules = (("self_attn.qkv_proj", "attention.qkv", ("q", "k", "v")), _SPLIT[-1])
_FUSED_MLP: Modules = (("mlp.gate_up_proj", "mlp.gate_up", ("gate", "up")), _SPLIT_MLP[-1])
_EXPERT_NAMES = "mlp", "gate_proj", "up_proj", "down_proj"
_NORMS = {  # (pre_norms, post_norms)
    (True, False): {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    (False, True): {
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    (True, True): {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}
_QK_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
MOST_EXPERTS = 4096  # of a layer: far above what any model has, so that hostile files cost no memory
_MASKS = ("full_attention", "sliding_attention")


def plain_spec(
    config: HFConfig, *, default_theta: float = 10000.0, default_eps: float = 1e-6, **rest: Any
) -> ModelSpec:
    """rest: fields of ModelSpec that the family has otherwise. Raises CheckpointError naming the key."""
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "norm_eps": number(config, "rms_norm_eps", default_eps),
        "tied": config.tie_word_embeddings,
    }
    if "rope" not in rest:
        fields["rope"] = rope_from_hf(config.raw, default_theta)
    return ModelSpec(**fields | rest)


def require(config: HFConfig, model: str, key: str, only: Any) -> None:
    """CheckpointError when config.json gives `key` another value than the only one that is served."""
    value = config.raw.get(key)
    if value is not None and value != only:
        raise CheckpointError(f"config.json: {key} {value!r} is not supported for {model}; supported: {only}")


def number(config: HFConfig, key: str, default: float) -> float:
    """A positive number, or the default where it is missing or null."""
    value = config.raw.get(key)
    return default if value is None else positive(value, f"config.json: {key}")


def count(config: HFConfig, keys: tuple[str, ...], default: int, most: int = 1 << 31, least: int = 1) -> int:
    """A whole number from `least` to `most` by the first of the keys that config.json has, or the default."""
    key = next((key for key in keys if config.raw.get(key) is not None), keys[0])
    value = config.raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"config.json: {key} must be a whole number from {least} to {most}, not {value!r:.80}")
    return value


def flag(config: HFConfig, key: str, default: bool = False) -> bool:
    """true or false, or the default where it is missing or null."""
    value = config.raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, not {value!r:.80}")
    return default if value is None else value


def window_of(config: HFConfig, default: int, switch: str = "") -> int:
    """sliding_window in tokens, `default` where it is missing; 0 where it is null or `switch`, a key, is not true."""
    value = config.raw.get("sliding_window", default or None)
    if value is None or (switch and not flag(config, switch)):
        return 0
    return count(config, ("sliding_window",), default)


def sliding(config: HFConfig, default: list[str]) -> list[bool]:
    """Which layers have a window: layer_types of config.json, or the family's default where it is missing."""
    kinds = config.raw.get("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers or any(k not in _MASKS for k in kinds):
        raise CheckpointError(
            f"config.json: layer_types must name {' or '.join(_MASKS)} for each of {config.num_hidden_layers} layers"
        )
    return [kind == "sliding_attention" for kind in kinds]


def every_nth_full(config: HFConfig, nth: int) -> list[str]:
    """layer_types where the nth, 2nth, … layer sees everything and the others a window."""
    return [_MASKS[bool((index + 1) % nth)] for index in range(config.num_hidden_layers)]


def windows(window: int, layers: list[bool], softcap: float = 0.0) -> tuple[AttentionPattern, ...]:
    """The patterns of layers that have the window or see everything; empty when there is nothing to say.

    CheckpointError when a layer should have a window and there is none.
    """
    if any(layers) and not window:
        raise CheckpointError("config.json: layer_types has sliding_attention, but there is no sliding_window")
    patterns = tuple(AttentionPattern(window if has else 0, softcap) for has in layers)
    return patterns if set(patterns) != {AttentionPattern()} else ()


def hf_weights(spec: ModelSpec, expert_names: tuple[str, str, str, str] = _EXPERT_NAMES) -> Iterator[WeightSource]:
    """Tensor names of transformers' checkpoints, in the layout that the spec says.

    expert_names: of the block of experts in a layer, and of an expert's three products.
    """
    yield WeightSource("model.embed_tokens.weight", "embed")
    yield WeightSource("model.norm.weight", "norm")
    if not spec.tied:
        yield WeightSource("lm_head.weight", "head")
    norms = _NORMS[spec.pre_norms, spec.post_norms] | (_QK_NORMS if spec.qk_norm else {})
    biased = {"attention.qkv": spec.qkv_bias, "attention.out": spec.out_bias}
    for index in range(spec.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        for name, module in norms.items():
            yield WeightSource(f"{theirs}{name}.weight", ours + module)
        modules = _FUSED if spec.fused else _SPLIT
        if spec.experts is not None and spec.experts.layers[index]:
            yield from _experts(theirs, ours, spec.experts.count, expert_names)
        else:
            modules += _FUSED_MLP if spec.fused else _SPLIT_MLP
        for name, module, parts in modules:
            for part in parts:
                yield WeightSource(f"{theirs}{name}.weight", ours + module, "weight", part)
                if biased.get(module, spec.mlp_bias):
                    yield WeightSource(f"{theirs}{name}.bias", ours + module, "bias", part)


def _experts(theirs: str, ours: str, count: int, names: tuple[str, str, str, str]) -> Iterator[WeightSource]:
    block, gate, up, down = names
    yield WeightSource(f"{theirs}{block}.gate.weight", f"{ours}mlp.router")
    for index in range(count):
        at, expert = f"{theirs}{block}.experts.{index}.", f"{ours}mlp.experts.{index}."
        yield WeightSource(f"{at}{gate}.weight", expert + "gate_up", part="gate")
        yield WeightSource(f"{at}{up}.weight", expert + "gate_up", part="up")
        yield WeightSource(f"{at}{down}.weight", expert + "down")


def hf_ignored(name: str, spec: ModelSpec) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")

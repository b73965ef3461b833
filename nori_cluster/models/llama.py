"""Llama 2 and 3, and what shares their architecture (SmolLM2, TinyLlama, …)."""

from collections.abc import Iterator

from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec, WeightSource

_LAYER = (
    ("self_attn.q_proj", "attention.qkv", "q"),
    ("self_attn.k_proj", "attention.qkv", "k"),
    ("self_attn.v_proj", "attention.qkv", "v"),
    ("self_attn.o_proj", "attention.out", ""),
    ("mlp.gate_proj", "mlp.gate_up", "gate"),
    ("mlp.up_proj", "mlp.gate_up", "up"),
    ("mlp.down_proj", "mlp.down", ""),
)
_NORMS = (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm"))


class Llama:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        raw = config.raw
        activation = raw.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported for Llama; supported: silu")
        bias = bool(raw.get("attention_bias", False))
        return ModelSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope_from_hf(raw),
            tied=config.tie_word_embeddings,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> Iterator[WeightSource]:
        yield WeightSource("model.embed_tokens.weight", "embed")
        yield WeightSource("model.norm.weight", "norm")
        if not spec.tied:
            yield WeightSource("lm_head.weight", "head")
        for index in range(spec.num_layers):
            theirs, ours = f"model.layers.{index}.", f"layers.{index}."
            for name, module in _NORMS:
                yield WeightSource(f"{theirs}{name}.weight", ours + module)
            for name, module, part in _LAYER:
                yield WeightSource(f"{theirs}{name}.weight", ours + module, "weight", part)
                if spec.mlp_bias if name.startswith("mlp") else spec.qkv_bias:
                    yield WeightSource(f"{theirs}{name}.bias", ours + module, "bias", part)

    @staticmethod
    def ignored(name: str, spec: ModelSpec) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")

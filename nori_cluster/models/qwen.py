"""Qwen 2 and 2.5 (biases on q, k and v), Qwen 3 dense and of experts (norms of q and k); windows on the upper layers if
at all."""

from dataclasses import replace

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.errors import CheckpointError
from nori_cluster.models.base import ExpertsSpec, HFConfig, ModelSpec
from nori_cluster.models.layout import count, hf_ignored, hf_weights, number, plain_spec, require, sliding, windows


def _patterns(config: HFConfig) -> tuple[AttentionPattern, ...]:
    window = int(number(config, "sliding_window", 4096)) if config.raw.get("use_sliding_window") else 0
    first = int(number(config, "max_window_layers", 28, -1))
    full, slide = "full_attention", "sliding_attention"
    kinds = [slide if window and index >= first else full for index in range(config.num_hidden_layers)]
    return windows(window, sliding(config, kinds))


class Qwen2:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Qwen2", "hidden_act", "silu")
        return plain_spec(config, qkv_bias=True, patterns=_patterns(config))

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)


class Qwen3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Qwen3", "hidden_act", "silu")
        bias = bool(config.raw.get("attention_bias", False))
        head_dim = int(number(config, "head_dim", 128))
        patterns = _patterns(config)
        return plain_spec(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias, qk_norm="head", patterns=patterns)

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)


class Qwen3Moe:
    """A ModelFamily. Every decoder_sparse_step-th layer has experts, except mlp_only_layers; all have the window."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        layers, experts = config.num_hidden_layers, count(config, ("num_experts", "num_local_experts"), 128)
        step = count(config, ("decoder_sparse_step",), 1)
        dense, normalised = config.raw.get("mlp_only_layers") or [], config.raw.get("norm_topk_prob", False)
        if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
            raise CheckpointError(f"config.json: mlp_only_layers must list layers below {layers}, not {dense!r:.80}")
        if not isinstance(normalised, bool):
            raise CheckpointError(f"config.json: norm_topk_prob must be true or false, not {normalised!r:.80}")
        window = int(number(config, "sliding_window", 4096)) if config.raw.get("use_sliding_window") else 0
        return replace(
            Qwen3.spec_from_hf(config),
            head_dim=config.head_dim,
            patterns=windows(window, [True] * layers),
            experts=ExpertsSpec(
                count=experts,
                chosen=count(config, ("num_experts_per_tok",), 8, experts),
                inner=count(config, ("moe_intermediate_size",), 768),
                normalised=normalised,
                layers=tuple((index + 1) % step == 0 and index not in dense for index in range(layers)),
            ),
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

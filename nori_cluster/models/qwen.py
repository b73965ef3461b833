"""Qwen 2 and 2.5 (biases on q, k and v), Qwen 3 dense and of experts (norms of q and k); windows on the upper layers if
at all."""

from dataclasses import replace

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.errors import CheckpointError
from nori_cluster.models.base import ExpertsSpec, HFConfig, ModelSpec
from nori_cluster.models.layout import (
    MOST_EXPERTS,
    count,
    flag,
    hf_ignored,
    hf_weights,
    plain_spec,
    require,
    sliding,
    window_of,
    windows,
)


def _patterns(config: HFConfig) -> tuple[AttentionPattern, ...]:
    window = window_of(config, 4096, "use_sliding_window")
    first = count(config, ("max_window_layers",), 28, least=0)
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
        bias = flag(config, "attention_bias")
        head_dim = count(config, ("head_dim",), 128)
        patterns = _patterns(config)
        return plain_spec(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias, qk_norm="head", patterns=patterns)

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)


class Qwen3Moe:
    """A ModelFamily. Every decoder_sparse_step-th layer has experts, except mlp_only_layers; all have the window."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        layers, experts = (
            config.num_hidden_layers,
            count(config, ("num_experts", "num_local_experts"), 128, MOST_EXPERTS),
        )
        step = count(config, ("decoder_sparse_step",), 1)
        dense = config.raw.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
            raise CheckpointError(f"config.json: mlp_only_layers must list layers below {layers}, not {dense!r:.80}")
        window = window_of(config, 4096, "use_sliding_window")
        return replace(
            Qwen3.spec_from_hf(config),
            head_dim=config.head_dim,
            patterns=windows(window, [window > 0] * layers),
            experts=ExpertsSpec(
                count=experts,
                chosen=count(config, ("num_experts_per_tok",), 8, experts),
                inner=count(config, ("moe_intermediate_size",), 768),
                normalised=flag(config, "norm_topk_prob"),
                layers=tuple((index + 1) % step == 0 and index not in dense for index in range(layers)),
            ),
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

"""Qwen 2 and 2.5 (biases on q, k and v) and Qwen 3 dense (norms of q and k); windows on the upper layers if at all."""

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, number, plain_spec, require, sliding, windows


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

"""Phi-3 with one rope at all lengths: q|k|v and gate|up are one tensor each. longrope is refused by name."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, number, plain_spec, require, windows


class Phi3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Phi3", "hidden_act", "silu")
        window = int(number(config, "sliding_window", 0))
        patterns = windows(window, [True] * config.num_hidden_layers)
        return plain_spec(config, default_eps=1e-5, fused=True, patterns=patterns)

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

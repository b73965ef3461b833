"""Mistral: Llama whose every layer has a window, in the versions that have one."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, plain_spec, require, sliding, window_of, windows


class Mistral:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Mistral", "hidden_act", "silu")
        window = window_of(config, 4096)
        kind = "sliding_attention" if window else "full_attention"
        layers = sliding(config, [kind] * config.num_hidden_layers)
        return plain_spec(config, patterns=windows(window, layers))

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

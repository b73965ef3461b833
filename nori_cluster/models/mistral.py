"""Mistral: Llama whose every layer has a window, in the versions that have one."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, number, plain_spec, require, sliding, windows


class Mistral:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Mistral", "hidden_act", "silu")
        window = 0 if config.raw.get("sliding_window", 4096) is None else int(number(config, "sliding_window", 4096))
        layers = sliding(config, ["sliding_attention"] * config.num_hidden_layers)
        return plain_spec(config, patterns=windows(window, layers))

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

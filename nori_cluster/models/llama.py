"""Llama 2 and 3, and what shares their architecture (SmolLM2, TinyLlama, …)."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import flag, hf_ignored, hf_weights, plain_spec, require


class Llama:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Llama", "hidden_act", "silu")
        bias = flag(config, "attention_bias")
        return plain_spec(config, qkv_bias=bias, out_bias=bias, mlp_bias=flag(config, "mlp_bias"))

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

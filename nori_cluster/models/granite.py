"""Granite: Llama with a factor each on embeddings, scores, residuals and logits."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import flag, hf_ignored, hf_weights, number, plain_spec, require


class Granite:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Granite", "hidden_act", "silu")
        bias = flag(config, "attention_bias")
        return plain_spec(
            config,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias"),
            embedding_scale=number(config, "embedding_multiplier", 1.0),
            residual_scale=number(config, "residual_multiplier", 1.0),
            attention_scale=number(config, "attention_multiplier", 1.0),
            logits_divisor=number(config, "logits_scaling", 1.0),
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

"""OLMo 2: norms after attention and feed-forward only, and of q and k over all heads together."""

from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import flag, hf_ignored, hf_weights, plain_spec, require


class Olmo2:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Olmo2", "hidden_act", "silu")
        bias = flag(config, "attention_bias")
        return plain_spec(
            config,
            default_eps=1e-5,
            qkv_bias=bias,
            out_bias=bias,
            pre_norms=False,
            post_norms=True,
            qk_norm="whole",
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

"""SmolLM 3: Llama whose every fourth layer has no positions."""

from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import (
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


class SmolLM3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "SmolLM3", "hidden_act", "silu")
        raw, layers = config.raw, config.num_hidden_layers
        bias = flag(config, "attention_bias")
        nth = count(config, ("no_rope_layer_interval",), 4)
        turned = raw.get("no_rope_layers")  # 1 where the layer has positions, whatever the name says
        turned = [(index + 1) % nth for index in range(layers)] if turned is None else turned
        if not isinstance(turned, list) or len(turned) < layers or not all(isinstance(each, int) for each in turned):
            raise CheckpointError(f"config.json: no_rope_layers must have a number for each of {layers} layers")
        rope = rope_from_hf(raw, 2e6)
        window = window_of(config, 0, "use_sliding_window")
        kinds = ["sliding_attention" if window and not turned[index] else "full_attention" for index in range(layers)]
        return plain_spec(
            config,
            tied=flag(config, "tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=flag(config, "mlp_bias"),
            rope=rope,
            ropes=tuple(rope if turned[index] else None for index in range(layers)),
            patterns=windows(window, sliding(config, kinds)),
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

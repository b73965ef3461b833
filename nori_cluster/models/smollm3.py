"""SmolLM 3: Llama whose every fourth layer has no positions."""

from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, number, plain_spec, require, sliding, windows


class SmolLM3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "SmolLM3", "hidden_act", "silu")
        raw, count = config.raw, config.num_hidden_layers
        bias = bool(raw.get("attention_bias", False))
        nth = int(number(config, "no_rope_layer_interval", 4))
        turned = raw.get("no_rope_layers")  # 1 where the layer has positions, whatever the name says
        turned = [(index + 1) % nth for index in range(count)] if turned is None else turned
        if not isinstance(turned, list) or len(turned) < count:
            raise CheckpointError(f"config.json: no_rope_layers must have a number for each of {count} layers")
        rope = rope_from_hf(raw, 2e6)
        window = int(number(config, "sliding_window", 0)) if raw.get("use_sliding_window") else 0
        kinds = ["sliding_attention" if window and not turned[index] else "full_attention" for index in range(count)]
        return plain_spec(
            config,
            tied=bool(raw.get("tie_word_embeddings", True)),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            rope=rope,
            ropes=tuple(rope if turned[index] else None for index in range(count)),
            patterns=windows(window, sliding(config, kinds)),
        )

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

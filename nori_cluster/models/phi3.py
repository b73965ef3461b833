"""Phi-3 with one rope at all lengths: q|k|v and gate|up are one tensor each. longrope is refused by name."""

from nori_cluster.errors import CheckpointError
from nori_cluster.layers.rope import RopeSpec, rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import hf_ignored, hf_weights, plain_spec, require, window_of, windows


class Phi3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Phi3", "hidden_act", "silu")
        rope = rope_from_hf(config.raw)
        if rope != RopeSpec(rope.theta):
            raise CheckpointError(f"config.json: rope type {rope.kind!r} is not supported for Phi3; supported: default")
        window = window_of(config, 0)
        patterns = windows(window, [window > 0] * config.num_hidden_layers)
        return plain_spec(config, default_eps=1e-5, fused=True, rope=rope, patterns=patterns)

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)

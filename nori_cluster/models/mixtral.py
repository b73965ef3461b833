"""Mixtral: Mistral whose feed-forward blocks are experts, with weights that add up to 1."""

from functools import partial

from nori_cluster.models.base import ExpertsSpec, HFConfig, ModelSpec
from nori_cluster.models.layout import (
    MOST_EXPERTS,
    count,
    hf_ignored,
    hf_weights,
    plain_spec,
    require,
    window_of,
    windows,
)

_NAMES = "block_sparse_moe", "w1", "w3", "w2"


class Mixtral:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        require(config, "Mixtral", "hidden_act", "silu")
        layers, window = config.num_hidden_layers, window_of(config, 0)
        experts = count(config, ("num_local_experts", "num_experts"), 8, MOST_EXPERTS)
        return plain_spec(
            config,
            default_theta=1e6,
            default_eps=1e-5,
            patterns=windows(window, [window > 0] * layers),
            experts=ExpertsSpec(
                count=experts,
                chosen=count(config, ("num_experts_per_tok",), 2, experts),
                inner=config.intermediate_size,
                normalised=True,
                layers=(True,) * layers,
            ),
        )

    weights = staticmethod(partial(hf_weights, expert_names=_NAMES))
    ignored = staticmethod(hf_ignored)

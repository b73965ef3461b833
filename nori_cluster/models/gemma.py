"""Gemma 2 and Gemma 3 (text): norms on both sides with weights stored minus one, scaled embeddings, gelu, windows.

Gemma 2 caps scores and logits softly; Gemma 3 has norms of q and k, and another rope where there is a window.
"""

from typing import Any

from nori_cluster.layers.rope import RopeSpec, rope_from_hf
from nori_cluster.models.base import HFConfig, ModelSpec
from nori_cluster.models.layout import (
    count,
    every_nth_full,
    flag,
    hf_ignored,
    hf_weights,
    number,
    plain_spec,
    require,
    sliding,
    window_of,
    windows,
)

_FORM = ("hidden_activation", "gelu_pytorch_tanh")


def _spec(config: HFConfig, model: str, layers: list[bool], caps: tuple[float, float], **rest: Any) -> ModelSpec:
    """caps: of scores and of logits when config.json has none; null there is none."""
    require(config, model, *_FORM)
    require(config, model, "use_bidirectional_attention", False)
    bias, raw = flag(config, "attention_bias"), config.raw
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    scores, logits = (
        0.0 if name in raw and raw[name] is None else number(config, name, cap)
        for name, cap in zip(names, caps, strict=True)
    )
    window = window_of(config, 4096)
    return plain_spec(
        config,
        head_dim=count(config, ("head_dim",), 256),
        tied=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        activation=_FORM[1],
        post_norms=True,
        norm_offset=True,
        attention_scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        patterns=windows(window, layers, scores),
        logits_softcap=logits,
        **rest,
    )


class Gemma2:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        return _spec(config, "Gemma2", sliding(config, every_nth_full(config, 2)), (50.0, 30.0))

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)


class Gemma3:
    """A ModelFamily."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        nth = count(config, ("sliding_window_pattern",), 6)
        layers = sliding(config, every_nth_full(config, nth))
        full, local = _ropes(config)
        ropes = tuple(local if has_window else full for has_window in layers)
        return _spec(config, "Gemma3", layers, (0.0, 0.0), qk_norm="head", rope=full, ropes=ropes)

    weights = staticmethod(hf_weights)
    ignored = staticmethod(hf_ignored)


def _ropes(config: HFConfig) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers that see everything and of those with a window; rope_parameters has one object for each kind, in
    older files rope_theta and rope_scaling are of the former alone."""
    raw = config.raw
    local = number(config, "rope_local_base_freq", 10000.0)
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not {"full_attention", "sliding_attention"} & nested.keys():
        return rope_from_hf(raw, 1e6), RopeSpec(local)
    rest = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
    kinds = ("full_attention", number(config, "rope_theta", 1e6)), ("sliding_attention", local)
    ropes = [rope_from_hf({**rest, "rope_parameters": nested.get(kind)}, theta) for kind, theta in kinds]
    return ropes[0], ropes[1]

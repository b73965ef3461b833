"""What a model file says: its shape as a ModelSpec, and which checkpoint tensor fills which parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from nori_cluster.attention.base import AttentionPattern
from nori_cluster.layers.rope import RopeSpec


class HFConfig(Protocol):
    """The checkpoint's config as the checkpoint package reads it: common numbers checked, the rest in raw."""

    @property
    def raw(self) -> Mapping[str, Any]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """count: experts of a layer, `chosen` of them for each token; inner: width of one. normalised: the weights of the
    chosen add up to 1. layers: which have experts, for each layer; the others have a plain feed-forward block."""

    count: int
    chosen: int
    inner: int
    normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the decoder is built from; sizes are of the whole model. What only some families have is off.

    patterns, ropes: one for each layer, or empty when no layer has a window or soft cap and all have `rope`; a rope of
    None leaves the layer without positions. attention_scale: of the scores, head_dim ** -0.5 when None.
    pre_norms, post_norms: before and after attention and feed-forward. qk_norm: of queries and keys, over each head or
    over all heads together. norm_offset: weights are stored minus one. fused: q|k|v and gate|up are one tensor each.
    embedding_scale (rounded to the run dtype), residual_scale: factors; logits_divisor, logits_softcap: of the logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    patterns: tuple[AttentionPattern, ...] = ()
    ropes: tuple[RopeSpec | None, ...] = ()
    attention_scale: float | None = None
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    norm_offset: bool = False
    fused: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    experts: ExpertsSpec | None = None

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def feed_forward_numbers(self) -> int:
        """How many a token needs at once in the widest feed-forward block."""
        dense = 3 * self.intermediate_size
        if self.experts is None:
            return dense
        each = 3 * self.experts.inner + 6 * self.hidden_size  # in, out, sorted back, and float32 products
        return max(dense, self.experts.chosen * each)


class WeightSource(NamedTuple):
    """checkpoint: tensor name in the files. module: path of the layer in the decoder. part: see Sharded.shard."""

    checkpoint: str
    module: str
    parameter: str = "weight"
    part: str = ""


class ModelFamily(Protocol):
    """One file in models/, one line in the registry."""

    @staticmethod
    def spec_from_hf(config: HFConfig) -> ModelSpec:
        """Raises CheckpointError naming the key that is missing or not supported."""

    @staticmethod
    def weights(spec: ModelSpec) -> Iterator[WeightSource]:
        """Every checkpoint tensor that fills a parameter, each once, or once for each part it is fused of."""

    @staticmethod
    def ignored(name: str, spec: ModelSpec) -> bool:
        """Whether a tensor in the files that fills nothing is known to be harmless."""

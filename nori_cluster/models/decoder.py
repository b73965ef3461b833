"""The decoder that all families share: embed, then per layer attention and feed-forward with norms around, norm, head.

What a spec has switched off costs no torch call.
"""

from typing import Any

import torch
from torch import nn

from nori_cluster.attention.base import AttentionBackend
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.layers.attention import HeadNorm, SelfAttention
from nori_cluster.layers.embedding import VocabEmbedding, VocabHead
from nori_cluster.layers.mlp import GatedMLP
from nori_cluster.layers.moe import ExpertsMLP
from nori_cluster.layers.norm import OffsetRMSNorm, RMSNorm, SplitRMSNorm
from nori_cluster.layers.rope import Rotation, inverse_frequencies
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models.base import ModelSpec


def _norm(size: int, spec: ModelSpec, context: LayerContext) -> RMSNorm:
    return (OffsetRMSNorm if spec.norm_offset else RMSNorm)(size, spec.norm_eps, context)


def _attention(spec: ModelSpec, context: LayerContext) -> SelfAttention:
    norms: tuple[HeadNorm, HeadNorm] | None = None
    if spec.qk_norm == "head":
        norms = _norm(spec.head_dim, spec, context), _norm(spec.head_dim, spec, context)
    elif spec.qk_norm == "whole":
        sizes = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        norms = SplitRMSNorm(sizes[0], spec.norm_eps, context), SplitRMSNorm(sizes[1], spec.norm_eps, context)
    return SelfAttention(
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        qkv_bias=spec.qkv_bias,
        out_bias=spec.out_bias,
        context=context,
        fused=spec.fused,
        norms=norms,
    )


def _feed_forward(spec: ModelSpec, index: int, context: LayerContext) -> nn.Module:
    if spec.experts is None or not spec.experts.layers[index]:
        return GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            context=context,
            activation=spec.activation,
            fused=spec.fused,
        )
    return ExpertsMLP(
        spec.hidden_size,
        spec.experts.inner,
        spec.experts.count,
        spec.experts.chosen,
        normalised=spec.experts.normalised,
        context=context,
        activation=spec.activation,
    )


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, context: LayerContext) -> None:
        super().__init__()
        self.index = index
        self.residual_scale = spec.residual_scale
        self.attention_norm = _norm(spec.hidden_size, spec, context) if spec.pre_norms else None
        self.attention = _attention(spec, context)
        self.attention_post_norm = _norm(spec.hidden_size, spec, context) if spec.post_norms else None
        self.mlp_norm = _norm(spec.hidden_size, spec, context) if spec.pre_norms else None
        self.mlp = _feed_forward(spec, index, context)
        self.mlp_post_norm = _norm(spec.hidden_size, spec, context) if spec.post_norms else None

    def forward(self, x: torch.Tensor, rotation: Rotation | None, backend: AttentionBackend, plan: Any) -> torch.Tensor:
        y = x if self.attention_norm is None else self.attention_norm(x)
        y = self.attention(y, self.index, rotation, backend, plan)
        if self.attention_post_norm is not None:
            y = self.attention_post_norm(y)
        x = torch.add(x, y, alpha=self.residual_scale)
        y = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            y = self.mlp_post_norm(y)
        return torch.add(x, y, alpha=self.residual_scale)


class Decoder(nn.Module):
    """Parameters are uninitialised until worker/loader.py filled every one."""

    def __init__(self, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        self.embed = VocabEmbedding(spec.vocab_size, spec.hidden_size, context)
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=context.dtype))
        self.layers = nn.ModuleList(DecoderLayer(spec, index, context) for index in range(spec.num_layers))
        self.norm = _norm(spec.hidden_size, spec, context)
        self.head = VocabHead(spec.vocab_size, spec.hidden_size, context)
        if spec.tied:
            self.head.weight = self.embed.weight
        ropes = spec.ropes or (spec.rope,) * spec.num_layers
        assert len(ropes) == spec.num_layers
        self.ropes = [rope for rope in dict.fromkeys(ropes) if rope is not None]
        self.frequencies = [inverse_frequencies(rope, spec.head_dim).to(context.device) for rope in self.ropes]
        self.rope_of_layer = [-1 if rope is None else self.ropes.index(rope) for rope in ropes]  # -1: none

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        """[T, hidden] before the final norm."""
        x = self.embedded(batch)
        plan = backend.plan(batch)
        rotations = self.rotations(batch, x.dtype)
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, rotations[rope], backend, plan)
        return x

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        x: torch.Tensor = self.embed(batch.token_ids)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def rotations(self, batch: ForwardBatch, dtype: torch.dtype) -> list[Rotation | None]:
        """One for each rope of the model, and None last; rope_of_layer says which is whose."""
        pairs = zip(self.frequencies, self.ropes, strict=True)
        return [*(Rotation(batch.positions, each, dtype, rope.magnitude) for each, rope in pairs), None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Rows of forward's result → float32 [n, vocab] on rank 0, None on other ranks."""
        logits: torch.Tensor | None = self.head(self.norm(hidden))
        if logits is None:
            return None
        if self.spec.logits_divisor != 1.0:
            logits = logits / self.spec.logits_divisor
        if cap := self.spec.logits_softcap:
            logits = logits.div(cap).tanh_().mul_(cap)
        return logits

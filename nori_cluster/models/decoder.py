"""The pre-norm decoder: embed, then per layer attention and feed-forward each behind a norm, then norm and head."""

from typing import Any

import torch
from torch import nn

from nori_cluster.attention.base import AttentionBackend
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.layers.attention import SelfAttention
from nori_cluster.layers.embedding import VocabEmbedding, VocabHead
from nori_cluster.layers.mlp import GatedMLP
from nori_cluster.layers.norm import RMSNorm
from nori_cluster.layers.rope import Rotation, inverse_frequencies
from nori_cluster.layers.shard import LayerContext
from nori_cluster.models.base import ModelSpec


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, context: LayerContext) -> None:
        super().__init__()
        self.index = index
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, context)
        self.attention = SelfAttention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            context=context,
        )
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, context)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, context=context)

    def forward(self, x: torch.Tensor, rotation: Rotation, backend: AttentionBackend, plan: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), self.index, rotation, backend, plan)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Decoder(nn.Module):
    """Parameters are uninitialised until worker/loader.py filled every one."""

    def __init__(self, spec: ModelSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        self.embed = VocabEmbedding(spec.vocab_size, spec.hidden_size, context)
        self.layers = nn.ModuleList(DecoderLayer(spec, index, context) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, context)
        self.head = VocabHead(spec.vocab_size, spec.hidden_size, context)
        if spec.tied:
            self.head.weight = self.embed.weight
        self.frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(context.device)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        """[T, hidden] before the final norm."""
        x: torch.Tensor = self.embed(batch.token_ids)
        plan = backend.plan(batch)
        rotation = Rotation(batch.positions, self.frequencies, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, backend, plan)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Rows of forward's result → float32 [n, vocab] on rank 0, None on other ranks."""
        logits: torch.Tensor | None = self.head(self.norm(hidden))
        return logits

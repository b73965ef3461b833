"""Grouped-query self-attention with rotary positions; the backend owns KV and softmax, this file the projections."""

from typing import Any

import torch
from torch import nn

from nori_cluster.attention.base import AttentionBackend
from nori_cluster.layers.linear import ColumnLinear, RowLinear
from nori_cluster.layers.rope import Rotation
from nori_cluster.layers.shard import LayerContext


class SelfAttention(nn.Module):
    """[T, hidden] → [T, hidden] for one layer. heads, kv_heads: of the whole model; each rank has its share."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        context: LayerContext,
    ) -> None:
        super().__init__()
        parts = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        self.qkv = ColumnLinear(hidden, parts, bias=qkv_bias, context=context)
        self.out = RowLinear(heads * head_dim, hidden, bias=out_bias, context=context)
        self.heads = heads // context.group.size
        self.kv_heads = kv_heads // context.group.size
        self.head_dim = head_dim

    def forward(
        self, x: torch.Tensor, layer: int, rotation: Rotation, backend: AttentionBackend, plan: Any
    ) -> torch.Tensor:
        mixed = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 · kv heads, dim]
        turning = self.heads + self.kv_heads
        turned = rotation.apply(mixed[:, :turning])
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        result: torch.Tensor = self.out(backend.forward(layer, q, k, mixed[:, turning:], plan).flatten(1))
        return result

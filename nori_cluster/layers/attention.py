"""Grouped-query self-attention with rotary positions; the backend owns KV and softmax, this file the projections."""

from typing import Any

import torch
from torch import nn

from nori_cluster.attention.base import AttentionBackend
from nori_cluster.layers.linear import ColumnLinear, RowLinear
from nori_cluster.layers.norm import RMSNorm, SplitRMSNorm
from nori_cluster.layers.rope import Rotation
from nori_cluster.layers.shard import LayerContext

HeadNorm = RMSNorm | SplitRMSNorm


class SelfAttention(nn.Module):
    """[T, hidden] → [T, hidden] for one layer. heads, kv_heads: of the whole model; each rank has its share.

    norms: of queries and keys before rotation, over each head or (SplitRMSNorm) over all heads of the model together.
    fused: see ColumnLinear.
    """

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
        fused: bool = False,
        norms: tuple[HeadNorm, HeadNorm] | None = None,
    ) -> None:
        super().__init__()
        parts = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        self.qkv = ColumnLinear(hidden, parts, bias=qkv_bias, context=context, fused=fused)
        self.out = RowLinear(heads * head_dim, hidden, bias=out_bias, context=context)
        self.heads = heads // context.group.size
        self.kv_heads = kv_heads // context.group.size
        self.head_dim = head_dim
        self.q_norm: HeadNorm | None = norms[0] if norms else None
        self.k_norm: HeadNorm | None = norms[1] if norms else None

    def forward(
        self, x: torch.Tensor, layer: int, rotation: Rotation | None, backend: AttentionBackend, plan: Any
    ) -> torch.Tensor:
        mixed = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 · kv heads, dim]
        turning = self.heads + self.kv_heads
        turned = mixed[:, :turning]
        if self.q_norm is not None:
            turned = self._normed(turned)
        if rotation is not None:
            turned = rotation.apply(turned)
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        result: torch.Tensor = self.out(backend.forward(layer, q, k, mixed[:, turning:], plan).flatten(1))
        return result

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Queries and keys [T, heads + kv heads, dim] → the same, each through its norm."""
        assert self.q_norm is not None and self.k_norm is not None
        q, k = x[:, : self.heads], x[:, self.heads :]
        if isinstance(self.q_norm, SplitRMSNorm):
            q, k = self.q_norm(q.flatten(1)).view(q.shape), self.k_norm(k.flatten(1)).view(k.shape)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat((q, k), dim=1)

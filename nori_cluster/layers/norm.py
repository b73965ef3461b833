"""Root-mean-square norms, computed in float32 (Zhang and Sennrich 2019): Llama's, Gemma's, and one over all ranks."""

import torch
from torch import nn

from nori_cluster.layers.shard import LayerContext, Shard, whole


class RMSNorm(nn.Module):
    """[n, hidden] → [n, hidden]: x / sqrt(mean(x²) + eps) · weight."""

    def __init__(self, hidden: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.eps = eps
        weight = torch.empty(hidden, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def shard(self, parameter: str, part: str) -> Shard:
        return whole(tuple(self.weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype) * self.weight


class OffsetRMSNorm(RMSNorm):
    """Gemma's: x / sqrt(mean(x²) + eps) · (1 + weight), rounded to the run dtype at the end only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale * (1.0 + self.weight.float())).to(x.dtype)


class SplitRMSNorm(nn.Module):
    """RMSNorm of rows split over the ranks: [n, size / ranks] → the same shape, by one all-reduce of [n, 1]."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.group, self.size, self.eps = context.group, size, eps
        self.local = size // self.group.size
        weight = torch.empty(self.local, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def shard(self, parameter: str, part: str) -> Shard:
        first = self.group.rank * self.local
        return Shard((self.size,), (slice(first, first + self.local),), (slice(0, self.local),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = self.group.all_reduce(wide.square().sum(dim=-1, keepdim=True))
        return (wide * (squares / self.size + self.eps).rsqrt()).to(x.dtype) * self.weight

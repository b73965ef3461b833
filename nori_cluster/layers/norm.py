"""Root-mean-square norm, computed in float32 (Zhang and Sennrich 2019, as Llama has it)."""

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

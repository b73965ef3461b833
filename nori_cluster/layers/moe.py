"""The feed-forward block of experts: a router picks a few of them for each token; each is split over all ranks.

Tokens are sorted by expert, so that each expert that got any makes one product of them; no call is per token.
"""

import torch
from torch import nn

from nori_cluster.layers.mlp import GatedMLP
from nori_cluster.layers.shard import LayerContext, Shard, whole
from nori_cluster.quant.none import Unquantized


class Router(nn.Module):
    """[n, hidden] → the `chosen` most probable experts of each token: float32 weights and int64 ids [n, chosen].

    Whole on every rank and float32 whatever the run dtype: rounding may change who is chosen. normalised: weights add
    up to 1, otherwise they are probabilities among all experts.
    """

    def __init__(self, hidden: int, experts: int, chosen: int, normalised: bool, context: LayerContext) -> None:
        super().__init__()
        self.shape, self.chosen, self.normalised = (experts, hidden), chosen, normalised
        self.quant = context.method(Unquantized)
        self.quant.create_weights(self, experts, hidden, torch.float32, context.device)

    def shard(self, parameter: str, part: str) -> Shard:
        return whole(self.shape)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.quant.apply(self, x.float()).softmax(dim=-1).topk(self.chosen, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, ids


class ExpertsMLP(nn.Module):
    """[n, hidden] → [n, hidden]: the sum of the chosen experts by the router's weights; one all-reduce for all.

    experts: how many; inner: the width of each, of which a rank has its share.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        chosen: int,
        *,
        normalised: bool,
        context: LayerContext,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.group = context.group
        self.router = Router(hidden, experts, chosen, normalised, context)
        self.experts = nn.ModuleList(
            GatedMLP(hidden, inner, bias=False, context=context, activation=activation, reduce=False)
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        order = ids.flatten().argsort(stable=True)  # [n · chosen] by expert, and by token within one
        counts = ids.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = torch.split(x[order // ids.shape[1]], counts)
        found = [expert(part) for expert, part in zip(self.experts, rows, strict=True) if len(part)]
        parts = x.new_empty(len(order), x.shape[1])
        if found:
            parts[order] = torch.cat(found)
        mixed = (parts.view(*ids.shape, x.shape[1]).float() * weights.unsqueeze(-1)).sum(dim=1)
        return self.group.all_reduce(mixed.to(x.dtype))

"""The gated feed-forward block: down(silu(gate(x)) · up(x)); gate and up are one matrix, split alike over the ranks."""

import torch
from torch import nn
from torch.nn.functional import silu

from nori_cluster.layers.linear import ColumnLinear, RowLinear
from nori_cluster.layers.shard import LayerContext


def even_silu(x: torch.Tensor) -> torch.Tensor:
    """silu whose bits do not depend on an element's place: torch's float32 silu has one formula for whole vectors and
    another for the elements left over, and which those are depends on the number of rows and threads."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


class GatedMLP(nn.Module):
    """[n, hidden] → [n, hidden]."""

    def __init__(self, hidden: int, inner: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(hidden, {"gate": inner, "up": inner}, bias=bias, context=context)
        self.down = RowLinear(inner, hidden, bias=bias, context=context)
        self.activation = even_silu if context.batch_invariant else silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(self.activation(gate).mul_(up))
        return result

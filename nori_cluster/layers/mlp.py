"""The gated feed-forward block: down(act(gate(x)) · up(x)); gate and up are one matrix, split alike over the ranks."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import gelu, silu

from nori_cluster.layers.linear import ColumnLinear, RowLinear
from nori_cluster.layers.shard import LayerContext


def even_silu(x: torch.Tensor) -> torch.Tensor:
    """silu whose bits do not depend on an element's place: torch's float32 silu has one formula for whole vectors and
    another for the elements left over, and which those are depends on the number of rows and threads."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def even_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """gelu by its tanh formula, likewise: (1 + tanh(u)) / 2 = 1 / (exp(-2u) + 1), which cancels nowhere."""
    wide = x.float()
    turn = (wide + 0.044715 * wide * wide * wide).mul_(-2 * math.sqrt(2 / math.pi)).exp_().add_(1.0)
    return (wide / turn).to(x.dtype)


# config.json's name of an activation → it, and its twin of batch-invariant mode
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "silu": (silu, even_silu),
    "gelu_pytorch_tanh": (partial(gelu, approximate="tanh"), even_gelu_tanh),
}


class GatedMLP(nn.Module):
    """[n, hidden] → [n, hidden]. activation: a name of ACTIVATIONS. fused: see ColumnLinear; reduce: see RowLinear."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        context: LayerContext,
        activation: str = "silu",
        fused: bool = False,
        reduce: bool = True,
    ) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(hidden, {"gate": inner, "up": inner}, bias=bias, context=context, fused=fused)
        self.down = RowLinear(inner, hidden, bias=bias, context=context, reduce=reduce)
        self.activation = ACTIVATIONS[activation][context.batch_invariant]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(self.activation(gate).mul_(up))
        return result

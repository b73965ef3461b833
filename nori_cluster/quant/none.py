"""Weights as they are in the run dtype; on a CPU the product is written in the form measured fastest for its batch."""

from typing import Final

import torch
from torch import nn
from torch.nn.functional import linear

# Measured with two threads (docs/decisions): `W @ Xᵀ` against linear(X, W). float32 on AVX-512: 3 to 5 times as fast
# for 2 to 4 rows, equal from 256; on AVX2 slower below 16 rows. One row is worth computing twice to leave gemv, which
# runs on one thread. bfloat16 gains from 16 rows on.
_WIDE: Final = torch.backends.cpu.get_cpu_capability() == "AVX512"
_FIRST_TURNED: Final = {torch.float32: 1 if _WIDE else 16, torch.bfloat16: 16}
_LAST_TURNED: Final = 255


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, columns] times weight [rows, columns] transposed → [n, rows], possibly a view of transposed memory."""
    count = x.shape[0]
    first = _FIRST_TURNED.get(x.dtype)
    if x.device.type != "cpu" or first is None or not first <= count <= _LAST_TURNED:
        return linear(x, weight)
    if count == 1:
        return torch.mm(weight, x.repeat(2, 1).t())[:, :1].t()
    return torch.mm(weight, x.contiguous().t()).t()  # contiguous rows: the other order is several times slower


class Unquantized:
    """A plain weight [rows, columns]."""

    def create_weights(
        self, layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def after_load(self, layer: nn.Module) -> None:
        return

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        return product(x, weight)

"""Batch-invariant mode for any method that has one: products of whole tiles of rows, the last filled up with zeros.

Kernels choose their loops by the number of rows; those of a few rows sum in another order (docs/decisions/0006).
"""

import torch
from torch import nn
from torch.nn.functional import pad

from nori_cluster.device.tiles import ROW_TILE
from nori_cluster.quant.base import QuantMethod


class RowTiles:
    """A QuantMethod around another one."""

    def __init__(self, method: QuantMethod) -> None:
        self.method = method

    @staticmethod
    def batch_invariant(dtype: torch.dtype, device: torch.device) -> bool:
        return True

    def create_weights(
        self, layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.method.create_weights(layer, rows, columns, dtype, device)

    def after_load(self, layer: nn.Module) -> None:
        self.method.after_load(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % ROW_TILE
        if not missing:
            return self.method.apply(layer, x)
        return self.method.apply(layer, pad(x, (0, 0, 0, missing)))[: len(x)]

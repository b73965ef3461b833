"""What a linear layer needs of a quantization method. The layer owns sharding and bias, the method the numbers."""

from typing import Protocol

import torch
from torch import nn


class QuantMethod(Protocol):
    """One per layer, so it may keep what it prepared. Weights are logically [rows, columns] of this rank's shard."""

    @staticmethod
    def batch_invariant(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a row's bits depend on that row and the weight alone, given whole tiles of rows (device/tiles)."""

    def create_weights(
        self, layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Register the parameters the checkpoint fills, uninitialised, on `layer`."""

    def after_load(self, layer: nn.Module) -> None:
        """All parameters are filled: repack them if that pays."""

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """[n, columns] → [n, rows], without bias."""

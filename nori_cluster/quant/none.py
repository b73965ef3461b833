"""Weights as they are in the run dtype. On x86 CPUs they are packed once for oneDNN, which pays at every batch size."""

from typing import Final

import torch
from torch import nn
from torch.nn.functional import linear

# docs/decisions/0004: 1.3 to 4 times as fast as linear() for 1 to 32 rows, never slower. The operators are those that
# torch.compile uses when it freezes a model; where they are missing the plain weight stays.
_PACKABLE: Final = {torch.float32, torch.bfloat16}
_CAN_PACK: Final = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    return _CAN_PACK and device.type == "cpu" and dtype in _PACKABLE


class Unquantized:
    """A plain weight [rows, columns], or its packed form in place of it."""

    def __init__(self) -> None:
        self._packed: torch.Tensor | None = None

    @staticmethod
    def batch_invariant(dtype: torch.dtype, device: torch.device) -> bool:
        return _packs(dtype, device)

    def create_weights(
        self, layer: nn.Module, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def after_load(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").data
        if _packs(weight.dtype, weight.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            layer.register_parameter("weight", None)  # its memory is free unless another layer shares it

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            return linear(x, weight)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return result

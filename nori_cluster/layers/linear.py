"""Linear layers split over the ranks: by output column (qkv, gate|up) or by input row with one all-reduce."""

from collections.abc import Mapping

import torch
from torch import nn

from nori_cluster.layers.shard import LayerContext, Shard


def _bias(rows: int, context: LayerContext) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, dtype=context.dtype, device=context.device), requires_grad=False)


class ColumnLinear(nn.Module):
    """[n, columns] → [n, rows / size]: each rank holds an equal share of the rows of every part, parts in order.

    parts: name of each part → its rows in full. fused: the checkpoint has all parts in one tensor, in this order.
    """

    def __init__(
        self, columns: int, parts: Mapping[str, int], *, bias: bool, context: LayerContext, fused: bool = False
    ) -> None:
        super().__init__()
        size, self.rank = context.group.size, context.group.rank
        assert all(rows % size == 0 for rows in parts.values()), "validate_parallel comes first"
        self.columns = columns
        self.parts = dict(parts)
        self.fused = fused
        self.local = {name: rows // size for name, rows in parts.items()}
        self.quant = context.method()
        self.quant.create_weights(self, sum(self.local.values()), columns, context.dtype, context.device)
        self.bias = _bias(sum(self.local.values()), context) if bias else None

    def shard(self, parameter: str, part: str) -> Shard:
        names = list(self.parts)
        start = sum(self.local[name] for name in names[: names.index(part)])
        rows = self.local[part]
        before = sum(self.parts[name] for name in names[: names.index(part)]) if self.fused else 0
        stored = sum(self.parts.values()) if self.fused else self.parts[part]
        first = before + self.rank * rows
        source, target = slice(first, first + rows), slice(start, start + rows)
        if parameter == "bias":
            return Shard((stored,), (source,), (target,))
        every = slice(0, self.columns)
        return Shard((stored, self.columns), (source, every), (target, every))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.quant.apply(self, x)
        return y if self.bias is None else y.add_(self.bias)


class RowLinear(nn.Module):
    """[n, columns / size] → [n, rows]: each rank holds a share of the columns; the sum over ranks is the result.

    reduce: False leaves the sum over ranks to the caller, and there is no bias.
    """

    def __init__(self, columns: int, rows: int, *, bias: bool, context: LayerContext, reduce: bool = True) -> None:
        super().__init__()
        assert reduce or not bias, "each rank would add it"
        self.group, self.reduce = context.group, reduce
        assert columns % self.group.size == 0, "validate_parallel comes first"
        self.columns, self.rows = columns, rows
        self.local = columns // self.group.size
        self.quant = context.method()
        self.quant.create_weights(self, rows, self.local, context.dtype, context.device)
        self.bias = _bias(rows, context) if bias else None

    def shard(self, parameter: str, part: str) -> Shard:
        every = slice(0, self.rows)
        if parameter == "bias":
            return Shard((self.rows,), (every,), (every,))
        start = self.group.rank * self.local
        source, target = slice(start, start + self.local), slice(0, self.local)
        return Shard((self.rows, self.columns), (every, source), (every, target))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.quant.apply(self, x)
        if self.reduce:
            y = self.group.all_reduce(y)
        return y if self.bias is None else y.add_(self.bias)

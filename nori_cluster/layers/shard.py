"""Where a checkpoint tensor goes on this rank. Layers answer `shard`, the loader reads exactly that."""

from dataclasses import dataclass
from typing import Protocol

import torch

from nori_cluster.device.parallel import TPGroup
from nori_cluster.quant.base import QuantMethod
from nori_cluster.quant.row_tiles import RowTiles


@dataclass(frozen=True, slots=True)
class Shard:
    """full: shape of the whole checkpoint tensor. source: what this rank reads of it. target: where it goes.

    A target larger than its source is padding: the loader fills the rest with zeros.
    """

    full: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def whole(shape: tuple[int, ...]) -> Shard:
    """The tensor unsplit, into the whole parameter."""
    everything = tuple(slice(0, size) for size in shape)
    return Shard(shape, everything, everything)


class Sharded(Protocol):
    """A layer with parameters that the loader fills."""

    def shard(self, parameter: str, part: str) -> Shard:
        """parameter: name within the layer. part: which of several merged checkpoint tensors ("" when only one)."""


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What every layer is built with: the ranks, where its numbers live, how its weights are stored.

    batch_invariant: a row's bits must not depend on the rows beside it.
    """

    group: TPGroup
    dtype: torch.dtype
    device: torch.device
    quant: type[QuantMethod]
    batch_invariant: bool = False

    def method(self, kind: type[QuantMethod] | None = None) -> QuantMethod:
        """The quantization method of one layer; kind: another one than the model's."""
        method = (kind or self.quant)()
        return RowTiles(method) if self.batch_invariant else method

"""Writes safetensors shard by shard and chunk by chunk, so that a model larger than memory can be converted.

The library's own writer wants every tensor of a file in memory at once.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from nori_cluster.checkpoint.safetensors_header import BITS

DEFAULT_SHARD_BYTES = 5 << 30


class PlannedTensor(msgspec.Struct, frozen=True):
    """A tensor to write. chunks: gives its bytes in order, a piece at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def size(self) -> int:
        bits = BITS[self.dtype]
        for dim in self.shape:
            bits *= dim
        return bits // 8


def write_shards(
    folder: Path, tensors: Sequence[PlannedTensor], *, shard_bytes: int, advance: Callable[[int], None]
) -> None:
    """model.safetensors, or numbered shards with an index when they hold more than shard_bytes. Synced to disk."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], advance)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, advance)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    total = sum(tensor.size for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """In order; a tensor larger than shard_bytes gets a file of its own."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    return shards


def _write_file(path: Path, tensors: Sequence[PlannedTensor], advance: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks():
                file.write(chunk)
                advance(len(chunk))
                written += len(chunk)
            assert written == tensor.size, (tensor.name, written, tensor.size)
        file.flush()
        os.fsync(file.fileno())

"""One safetensors file's header, trusted in nothing: every size is checked against the file before it is used.

safetensors_index puts the headers of a folder together. The format: 8 bytes little-endian length, a JSON object, data.
"""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.errors import CheckpointError

MAX_HEADER_BYTES = 25 << 20  # the largest known are under 2 MB
MAX_DIMS = 16
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor lies. start, end: absolute byte offsets in the file. dtype: safetensors' name (BF16, F32 …)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one file, in its order. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for without end
            raise CheckpointError(f"{path}: cannot be read: not an ordinary file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header_bytes = _header_length(path, file.read(8), size)
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(path, text)
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    entries = {name: _entry(path, name, value, data) for name, value in header.items()}
    _check_layout(path, entries, data, size)
    return entries


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        hint = "; it looks like a pickle, which is never loaded" if _looks_pickled(prefix) else ""
        raise CheckpointError(f"{path}: header length {length} exceeds the file's {size} bytes{hint}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header length {length} exceeds the limit of {MAX_HEADER_BYTES} bytes")
    return int(length)


def _looks_pickled(prefix: bytes) -> bool:
    return prefix.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04"))


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a map of strings")
    return dict(header)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {next(n for n in names if names.count(n) > 1)!r}")
    return found


def _entry(path: Path, name: str, value: Any, data: int) -> TensorEntry:
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r:.40}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: bad shape {shape!r:.80}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: bad data_offsets {offsets!r:.80}")
    bits = BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: shape {shape} of {dtype} needs {bits / 8:g} bytes, data_offsets give {offsets[1] - offsets[0]}"
        )
    return TensorEntry(path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _counts(values: Any) -> bool:
    """A list of integers from 0 to 2^63."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data: int, size: int) -> None:
    """The data section is covered exactly once: no overlap, no hole, nothing missing or left over."""
    at = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > size:
            raise CheckpointError(
                f"{path}: cut short: tensor {name!r:.200} ends at byte {entry.end}, the file has {size} bytes"
            )
        if entry.start != at:
            kind = "overlaps the one before it" if entry.start < at else f"leaves a hole of {entry.start - at} bytes"
            raise CheckpointError(f"{path}: tensor {name!r:.200} {kind}")
        at = entry.end
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor")

"""A GGUF file's metadata and tensor directory, parsed with every count and length checked against the file.

gguf.py converts what this lists; the gguf package only ever sees the raw blocks of checked tensors (its own reader
trusts the header and is slow to open). Format: ggml docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.errors import CheckpointError

VERSIONS = (2, 3)
MAX_KEYS = 10_000
MAX_TENSORS = 1_000_000
MAX_ARRAY = 4_000_000
MAX_NAME = 65_535
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


class GgufTensor(msgspec.Struct, frozen=True):
    """shape: as in numpy, rows first. start, size: absolute byte range in the file. type: ggml's name (Q4_1, F32 …)."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    size: int


class GgufFile:
    """An open, checked file. metadata: key → value (arrays as lists). tensors: by name, in file order."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's quantized blocks, uint8 [rows, bytes per row]; a 1-D tensor is one row."""
        rows = 1 if len(tensor.shape) == 1 else int(np.prod(tensor.shape[:-1]))
        return self._data[tensor.start : tensor.start + tensor.size].reshape(rows, -1)


def open_gguf(path: Path) -> GgufFile:
    """Parse and check. Raises CheckpointError naming the file and what is wrong."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise CheckpointError(f"{path}: too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                metadata, tensors = _Parser(path, view).parse()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return GgufFile(path, metadata, tensors)


class _Parser:
    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._view[:4] != b"GGUF":
            raise self._error("not a GGUF file")
        self._at = 4
        version = self._scalar("<I", "version")
        if version not in VERSIONS:
            raise self._error(f"GGUF version {version}; versions 2 and 3 (little-endian) are read")
        tensor_count = self._count("tensor count", MAX_TENSORS, 24)
        key_count = self._count("key count", MAX_KEYS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("key", MAX_NAME)
            if key in metadata:
                raise self._error(f"key {key!r:.200} occurs twice")
            metadata[key] = self._value(key, self._scalar("<I", key))
        directory = [self._tensor() for _ in range(tensor_count)]
        return metadata, self._place(directory, self._alignment(metadata))

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}")

    def _take(self, size: int, what: str) -> int:
        """Advance over `size` bytes that must exist; gives where they start."""
        at = self._at
        if size > self._size - at:
            raise self._error(f"{what}: needs {size} bytes at {at}, the file has {self._size}")
        self._at = at + size
        return at

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self._view, self._take(struct.calcsize(code), what))[0]

    def _count(self, what: str, limit: int, least: int) -> int:
        """A count of things that take at least `least` bytes each."""
        count = int(self._scalar("<Q", what))
        if count > limit or count * least > self._size - self._at:
            raise self._error(f"{what} {count} is more than the file can hold")
        return count

    def _string(self, what: str, limit: int) -> str:
        length = int(self._scalar("<Q", what))
        if length > limit:
            raise self._error(f"{what}: string length {length} exceeds {limit}")
        at = self._take(length, what)
        try:
            return self._view[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: not UTF-8 text ({error.reason})") from error

    def _value(self, key: str, type_: int) -> Any:
        what = f"key {key!r:.200}"
        if type_ == STRING:
            return self._string(what, self._size)
        if type_ in SCALARS:
            return self._scalar(SCALARS[type_], what)
        if type_ != ARRAY:
            raise self._error(f"{what}: unknown value type {type_}")
        element = int(self._scalar("<I", what))
        if element == STRING:
            return [self._string(what, self._size) for _ in range(self._count(f"{what}: array length", MAX_ARRAY, 8))]
        if element not in SCALARS:
            raise self._error(f"{what}: arrays of value type {element} are not read")
        code = SCALARS[element]
        count = self._count(f"{what}: array length", MAX_ARRAY, struct.calcsize(code))
        at = self._take(count * struct.calcsize(code), what)
        return list(struct.unpack_from(f"<{count}{code[1]}", self._view, at))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, numpy shape, ggml type, offset from the data section."""
        name = self._string("tensor name", MAX_NAME)
        what = f"tensor {name!r:.200}"
        n_dims = int(self._scalar("<I", what))
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._error(f"{what}: {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = [int(self._scalar("<Q", what)) for _ in range(n_dims)]
        if 0 in dims:
            raise self._error(f"{what}: a dimension is 0 in {dims}")
        type_ = int(self._scalar("<I", what))
        return name, tuple(reversed(dims)), type_, int(self._scalar("<Q", what))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        valid = type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not valid:
            raise self._error(f"general.alignment {alignment!r:.40} is not a power of two up to {MAX_ALIGNMENT}")
        return int(alignment)

    def _place(self, directory: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        """Byte ranges in the file: inside it, aligned, not overlapping."""
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_, offset in directory:
            what = f"tensor {name!r:.200}"
            if name in tensors:
                raise self._error(f"{what} occurs twice")
            size, type_name = self._byte_size(what, shape, type_)
            start = base + offset
            if offset % alignment or start + size > self._size:
                raise self._error(
                    f"{what}: {size} bytes at offset {offset} do not lie in the file of {self._size} bytes"
                )
            tensors[name] = GgufTensor(name, type_name, shape, start, size)
        end = 0
        for tensor in sorted(tensors.values(), key=lambda t: t.start):
            if tensor.start < end:
                raise self._error(f"tensor {tensor.name!r:.200} overlaps the one before it")
            end = tensor.start + tensor.size
        return tensors

    def _byte_size(self, what: str, shape: tuple[int, ...], type_: int) -> tuple[int, str]:
        try:
            known = gguf.GGMLQuantizationType(type_)
        except ValueError as error:
            raise self._error(f"{what}: unknown tensor type {type_}") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise self._error(f"{what}: rows of {shape[-1]} values are no multiple of {known.name}'s blocks of {block}")
        elements = 1
        for dim in shape:
            elements *= dim
        return elements // block * block_bytes, known.name

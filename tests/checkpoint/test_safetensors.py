"""Weight files: lying headers, broken folders, names that lead outside; legal oddities load."""

import json
import os
import pickle
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nori_cluster.checkpoint.safetensors_header import MAX_HEADER_BYTES, read_header
from nori_cluster.checkpoint.safetensors_index import INDEX, weight_entries, weight_files
from nori_cluster.checkpoint.safetensors_writer import PlannedTensor, write_shards
from nori_cluster.errors import CheckpointError

pytestmark = pytest.mark.unit
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(header: object, data: int = 8, text: bytes | None = None) -> bytes:
    body = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(body)) + body + bytes(data)


def changed(**values: Any) -> bytes:
    return raw({"a": TENSOR | values})


def lying_files() -> dict[str, bytes]:
    second = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
    return {
        "length 2^63": struct.pack("<Q", 1 << 63) + bytes(100),
        "length beyond the file": struct.pack("<Q", 200) + b"{}" + bytes(100),
        "not JSON": raw(0, text=b"{not json"),
        "a list": raw([TENSOR]),
        "200 MB of spaces": struct.pack("<Q", 200_000_000) + b" ",
        "spaces": raw(0, text=b" " * 1000),
        "deep nesting": raw(0, text=b'{"a":' + b"[" * 100_000),
        "offsets backwards": changed(data_offsets=[100, 50]),
        "offsets 2^62": changed(shape=[1 << 60], data_offsets=[0, 1 << 62]),
        "offsets 2^64": changed(data_offsets=[0, 1 << 64]),
        "offsets not integers": changed(data_offsets=[0.0, 8.0]),
        "offsets booleans": changed(dtype="U8", shape=[1], data_offsets=[False, True]),
        "negative offset": changed(data_offsets=[-8, 0]),
        "overlap": raw({"a": TENSOR, "b": second}, data=12),
        "hole": raw({"a": TENSOR, "b": second | {"data_offsets": [16, 24]}}, data=24),
        "trailing bytes": raw({"a": TENSOR}, data=9),
        "shape too large": changed(shape=[1 << 32, 1 << 32]),
        "shape wraps to the size": changed(shape=[1 << 62, 4, 2]),
        "negative shape": changed(shape=[-1, -2]),
        "shape not a list": changed(shape=2),
        "dtype F13": changed(dtype="F13"),
        "dtype is a list": changed(dtype=["F32"]),
        "extra field": changed(surprise=1),
        "missing field": raw({"a": {"dtype": "F32", "shape": [2]}}),
        "entry no object": raw({"a": 3}),
        "duplicate names": raw(0, text=b'{"a":%b,"a":%b}' % ((json.dumps(TENSOR).encode(),) * 2)),
        "metadata not strings": raw({"__metadata__": {"a": 1}, "a": TENSOR}),
        "cut by one byte": raw({"a": TENSOR}, data=7),
        "empty": b"",
        "five bytes": b"12345",
        "pickle": pickle.dumps({"a": list(range(1000))}),
        "zip pickle": b"PK\x03\x04" + bytes(1000),
    }


@pytest.mark.parametrize("kind", lying_files())
def test_f53_lying_headers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(lying_files()[kind])
    if kind == "200 MB of spaces":
        os.truncate(path, 200_000_008)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .") as error:
        read_header(path)
    assert time.monotonic() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert len(error.value.message) < 1000
    if "pickle" in kind:
        assert "pickle" in error.value.message


def test_f53_header_of_the_largest_size_is_quick(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b"{" + b" " * (MAX_HEADER_BYTES - 2) + b"}"
    path.write_bytes(raw(0, data=0, text=text))
    assert read_header(path) == {}


def test_f53_pickles_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors.*pytorch_model\.bin.*pickles are never loaded"):
        weight_files(tmp_path)


def test_legal_oddities_load(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {
        "z": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]},
        "__metadata__": {"format": "pt", "anything": "é"},
        "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]},
        "a": TENSOR,
        "half": {"dtype": "F4", "shape": [4], "data_offsets": [16, 18]},
    }
    path.write_bytes(raw(0, data=18, text=json.dumps(header).encode() + b"   "))
    entries = weight_entries(tmp_path)
    assert entries.keys() == {"z", "empty", "a", "half"}
    assert (entries["z"].shape, entries["z"].end - entries["z"].start) == ((), 8)


def test_ranges_are_the_library_s(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(3.5, np.float64)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, entry in weight_entries(tmp_path).items():
        data = entry.file.read_bytes()[entry.start : entry.end]
        np.testing.assert_array_equal(np.frombuffer(data, tensors[name].dtype).reshape(entry.shape), tensors[name])


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """Tensors a, b, c over model-1 and model-2, with an index."""
    save_file({"a": np.ones((4, 4), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.ones(4, np.float32), "c": np.ones(4, np.float16)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_f33_whole_folder(two_shards: Path) -> None:
    files = weight_files(two_shards)
    assert {name: path.name for name, path in files.items()} == {
        "a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"
    }  # fmt: skip


def cut_in_half(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model-2.safetensors").unlink(), "model-2.safetensors.*not in the folder"),
        (cut_in_half, "model-2.safetensors"),
        (
            lambda folder: write_index(folder, {"a": "model-1.safetensors", "ghost": "model-2.safetensors"}),
            "'ghost' is in 'model-2.safetensors', which does not hold it",
        ),
        (lambda folder: write_index(folder, {}), "weight_map"),
        (lambda folder: write_index(folder, {"a": None}), "weight_map"),
        (lambda folder: (folder / INDEX).write_text("[]"), "JSON object"),
        (lambda folder: (folder / INDEX).write_text("{"), "not JSON"),
        (lambda folder: (folder / INDEX).write_bytes(b"\xff"), "not UTF-8"),
    ],
)
def test_f33_broken_download(two_shards: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(two_shards)
    with pytest.raises(CheckpointError, match=message):
        weight_files(two_shards)


def test_f33_extra_file_is_ignored(two_shards: Path) -> None:
    save_file({"a": np.zeros(1, np.float32), "x": np.zeros(1, np.float32)}, two_shards / "other.safetensors")
    (two_shards / "broken.safetensors").write_bytes(b"junk")
    assert weight_files(two_shards).keys() == {"a", "b", "c"}


def test_f33_without_index_every_shard_is_read(two_shards: Path) -> None:
    (two_shards / INDEX).unlink()
    assert weight_files(two_shards).keys() == {"a", "b", "c"}
    save_file({"a": np.zeros(1, np.float32)}, two_shards / "other.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in both"):
        weight_files(two_shards)


OPENED: list[str] = []


def record(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], str | bytes):
        OPENED.append(os.fsdecode(args[0]))


@pytest.fixture(scope="module", autouse=True)
def audit() -> None:
    """Sees every file this process opens; audit hooks cannot be removed."""
    sys.addaudithook(record)


@pytest.mark.parametrize("name", ["../outside.safetensors", "ABSOLUTE", "sub/../../outside.safetensors", "", "link"])
def test_f49_names_that_lead_outside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    outside = tmp_path / "outside.safetensors"
    save_file({"a": np.ones(2, np.float32)}, outside)
    if name == "link":
        (folder / "link").symlink_to(outside)
    name = str(outside) if name == "ABSOLUTE" else name
    write_index(folder, {"a": name})
    OPENED.clear()
    with pytest.raises(CheckpointError, match=r"index\.json.*outside the model folder") as error:
        weight_files(folder)
    assert repr(name) in error.value.message
    assert any(path.endswith(INDEX) for path in OPENED)
    assert not any(Path(path).name == outside.name for path in OPENED)


def test_f49_link_without_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="link that leads outside"):
        weight_files(folder)


def test_f49_nested_file_inside(tmp_path: Path) -> None:
    (tmp_path / "ok").mkdir()
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "ok" / "nested.safetensors")
    write_index(tmp_path, {"a": "ok/nested.safetensors"})
    assert weight_files(tmp_path) == {"a": tmp_path.resolve() / "ok" / "nested.safetensors"}


def test_f49_hub_cache_layout_is_trusted(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": np.ones(2, np.float32)}, blobs / "beef")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    assert weight_files(snapshot).keys() == {"a"}
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside"):
        weight_files(snapshot)


def test_writer_is_read_by_the_library(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.arange(i * 3, dtype=np.float32).reshape(i, 3) for i in range(1, 6)}
    planned = [
        PlannedTensor(name, "F32", array.shape, lambda array=array: iter([array[:1].tobytes(), array[1:].tobytes()]))
        for name, array in arrays.items()
    ]
    done: list[int] = []
    write_shards(tmp_path, planned, shard_bytes=100, advance=done.append)
    assert sum(done) == sum(array.nbytes for array in arrays.values())
    assert len(set(weight_files(tmp_path).values())) == 3
    for name, path in weight_files(tmp_path).items():
        np.testing.assert_array_equal(load_file(path)[name], arrays[name])


def test_a_link_to_itself_and_a_pipe_are_told(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.symlink_to(file.name)
    with pytest.raises(CheckpointError, match="is a link that leads to itself"):
        weight_files(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not an ordinary file"):
        weight_files(tmp_path)

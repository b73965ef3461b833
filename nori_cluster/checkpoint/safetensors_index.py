"""Which file of a checkpoint folder holds which tensor: the index decides, headers are checked, names stay inside.

Workers map the files and read their shard of each tensor; a missing or cut file is found here, before any of that.
"""

from pathlib import Path

from nori_cluster.checkpoint.folder import confined, read_json_object
from nori_cluster.checkpoint.safetensors_header import TensorEntry, read_header
from nori_cluster.errors import CheckpointError

INDEX = "model.safetensors.index.json"
FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it. Raises CheckpointError naming the file or tensor at fault."""
    return {name: entry.file for name, entry in weight_entries(folder).items()}


def weight_entries(folder: Path) -> dict[str, TensorEntry]:
    """Tensor name → dtype, shape and byte range.

    With model.safetensors.index.json, exactly what it lists (files it does not name are ignored); without, every
    tensor of every *.safetensors file directly in the folder.
    """
    index = read_json_object(folder, INDEX)
    if index is not None:
        return _indexed(folder, index.get("weight_map"))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder}: no *.safetensors file{_foreign_hint(folder)}")
    entries: dict[str, TensorEntry] = {}
    for name in names:
        for tensor, entry in read_header(confined(folder, name)).items():
            if tensor in entries:
                raise CheckpointError(f"{folder}: tensor {tensor!r} is in both {entries[tensor].file.name} and {name}")
            entries[tensor] = entry
    return entries


def _indexed(folder: Path, weight_map: object) -> dict[str, TensorEntry]:
    path = folder / INDEX
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or not an object")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map holds something other than file names")
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name in sorted(set(weight_map.values())):
        try:
            file = confined(folder, name)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: weight_map: {error}") from error
        if not file.is_file():
            raise CheckpointError(f"{path}: weight_map names {name!r}, which is not in the folder; download it again")
        headers[name] = read_header(file)
    entries = {}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise CheckpointError(f"{path}: weight_map says {tensor!r} is in {name!r}, which does not hold it")
        entries[tensor] = headers[name][tensor]
    return entries


def _foreign_hint(folder: Path) -> str:
    found = sorted(path.name for pattern in FOREIGN for path in folder.glob(pattern))
    if not found:
        return ""
    return f" (found {found[0]}: only safetensors are read, pickles are never loaded; convert the model first)"

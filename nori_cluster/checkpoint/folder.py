"""Reading files of a checkpoint folder: names stay inside it, JSON is bounded and checked.

Every other module of checkpoint/ and the frontend's tokenizer and template open files through here.
"""

import json
from pathlib import Path
from typing import Any

from nori_cluster.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json known is 35 MB


def confined(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`; CheckpointError when it would lead outside.

    Absolute names and '..' are refused before the file system is asked. A symlink may leave the folder in one case:
    the Hugging Face cache, where snapshots/<revision>/x points into the same repository's blobs/.
    """
    parts = Path(name).parts
    if not name or "\0" in name or "\\" in name or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{folder}: the file name {name!r} leads outside the model folder")
    try:
        root = folder.resolve()
        target = (root / name).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError until Python 3.12
        raise CheckpointError(f"{folder}: {name!r} is a link that leads to itself") from error
    if target.is_relative_to(root) or target.is_relative_to(_hub_blobs(root)):
        return root / name
    raise CheckpointError(f"{folder}: {name!r} is a link that leads outside the model folder; copy the file into it")


def _hub_blobs(root: Path) -> Path:
    """blobs/ of a Hugging Face cache entry when root is one of its snapshots, else root itself."""
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        return root.parent.parent / "blobs"
    return root


def read_text(folder: Path, name: str) -> str | None:
    """The UTF-8 text of a file of the folder, None when it is absent."""
    path = confined(folder, name)
    if not path.is_file():
        return None
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes is too large for a text file of a checkpoint")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_json_object(folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON object of the folder, None when the file is absent; CheckpointError when it is anything else."""
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder / name}: expected a JSON object, found {type(value).__name__}")
    return value

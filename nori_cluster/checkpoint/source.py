"""What the user calls a model → an ordinary checkpoint folder. The one entry to checkpoint/ for CLI, launch and LLM."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from nori_cluster.checkpoint.demo import DEMO_NAME, make_demo
from nori_cluster.checkpoint.folder import confined
from nori_cluster.checkpoint.gguf import convert
from nori_cluster.checkpoint.hf_config import read_config
from nori_cluster.checkpoint.hub import is_repo_id, snapshot
from nori_cluster.checkpoint.progress import NoProgress, Progress
from nori_cluster.checkpoint.safetensors_index import weight_files
from nori_cluster.checkpoint.store import get_or_make, models_folder
from nori_cluster.errors import CheckpointError, ModelUnavailable


def resolve(
    source: str, *, progress: Progress | None = None, accept: Callable[[Path], None] = lambda folder: None
) -> Path:
    """The checkpoint folder of a demo name, a folder, a .gguf file, a converted model's name or a hub repository id.

    Converts or downloads when needed (cached under $NORI_HOME/models, the hub's in its own cache). The result has been
    checked: config, tokenizer file, and every weight file's header. Raises ModelUnavailable or CheckpointError, and
    before these checks whatever `accept` raises for the folder.
    """
    folder = _locate(source, progress or NoProgress())
    accept(folder)
    return checked_folder(folder)


def checked_folder(folder: Path) -> Path:
    """The folder, when config.json, tokenizer.json and complete safetensors are in it. Raises CheckpointError."""
    read_config(folder)
    weight_files(folder)
    if not confined(folder, "tokenizer.json").is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json (a SentencePiece tokenizer.model alone is not read)")
    return folder


def model_name(source: str) -> str:
    """The name a source is served under: the demo name, repository id, or the last part of a path without .gguf."""
    if source == DEMO_NAME or (is_repo_id(source) and not Path(source).expanduser().exists()):
        return source
    return Path(source).expanduser().resolve().name.removesuffix(".gguf")


def _locate(source: str, progress: Progress) -> Path:
    if not source or "\0" in source or len(source) > 4096:
        raise ModelUnavailable(f"{source!r:.80} is not a model source; {_choices()}")
    if source == DEMO_NAME:
        return get_or_make(DEMO_NAME, lambda folder: make_demo(folder, progress))
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        return _from_file(path, progress)
    if source in converted_models():
        return models_folder() / source
    if source.endswith(".gguf") or source.startswith(("/", ".", "~")) or not is_repo_id(source):
        raise ModelUnavailable(f"{source!r:.200} is neither a known model nor a path that exists; {_choices()}")
    return snapshot(source, progress)


def _from_file(path: Path, progress: Progress) -> Path:
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: not a model (a checkpoint folder or a .gguf file is; pickles are never loaded)")
    path = path.resolve()
    stat = path.stat()
    identity = f"{path.name}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()
    name = f"{path.stem}-{hashlib.sha256(identity).hexdigest()[:12]}"
    return get_or_make(name, lambda folder: convert(path, folder, progress=progress))


def converted_models() -> list[str]:
    """Names of the complete folders under $NORI_HOME/models."""
    if not models_folder().is_dir():
        return []
    return sorted(path.name for path in models_folder().iterdir() if path.is_dir() and not path.name.startswith("."))


def _choices() -> str:
    names = sorted({DEMO_NAME, *converted_models()})
    return f"possible are: {', '.join(names)}, a checkpoint folder, a .gguf file, or a Hugging Face id (owner/name)"

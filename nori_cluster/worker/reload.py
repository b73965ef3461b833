"""May this folder's weights take the place of those that are loaded? Checked completely before anything is touched.

The facts of the first folder are read when it is loaded, so that it need not be there any more.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.checkpoint.folder import confined, read_json_object
from nori_cluster.checkpoint.safetensors_index import weight_entries
from nori_cluster.errors import CheckpointError

CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "chat_template.json")
REMARKS = frozenset({"_name_or_path", "transformers_version", "name_or_path"})  # keys without effect


class CheckpointFacts(msgspec.Struct, frozen=True):
    """All of a checkpoint but its weights. configs: file → its object without REMARKS, None where there is no file.

    tokenizers: file → sha256, None likewise. tensors: name → dtype and shape as stored, of those the model reads.
    """

    configs: dict[str, dict[str, Any] | None]
    tokenizers: dict[str, str | None]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def read_facts(folder: Path, names: Collection[str]) -> CheckpointFacts:
    """names: tensors of the model. Raises CheckpointError naming the file or tensor at fault."""
    entries = weight_entries(folder)
    missing = sorted(set(names) - entries.keys())
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return CheckpointFacts(
        configs={name: _settings(folder, name) for name in CONFIGS},
        tokenizers={name: _digest(folder, name) for name in TOKENIZERS},
        tensors={name: (entries[name].dtype, entries[name].shape) for name in names},
    )


def require_same(facts: CheckpointFacts, folder: Path) -> None:
    """CheckpointError naming the first thing but the weights in which `folder` differs, or what is broken in it."""
    found = read_facts(folder, facts.tensors.keys())
    for name, wanted in facts.configs.items():
        _compare_settings(folder / name, wanted, found.configs[name])
    for name, digest in facts.tokenizers.items():
        if found.tokenizers[name] != digest:
            how = "is missing" if found.tokenizers[name] is None else "differs" if digest else "is new"
            raise CheckpointError(f"{folder / name} {how}: only the weights may change in a reload")
    for name, (dtype, shape) in facts.tensors.items():
        new_dtype, new_shape = found.tensors[name]
        if new_shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {new_shape}, the loaded model has {shape}")
        if new_dtype != dtype:
            raise CheckpointError(f"{folder}: {name} is stored as {new_dtype}, the loaded model as {dtype}")


def _compare_settings(path: Path, wanted: dict[str, Any] | None, found: dict[str, Any] | None) -> None:
    if (wanted is None) != (found is None):
        raise CheckpointError(f"{path} {'is missing' if found is None else 'is new'}: only the weights may change")
    wanted, found = wanted or {}, found or {}
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise CheckpointError(f"{path}: {key} is {_short(found, key)}, the loaded model has {_short(wanted, key)}")


def _short(settings: dict[str, Any], key: str) -> str:
    return f"{settings[key]!r:.80}" if key in settings else "not set"


def _settings(folder: Path, name: str) -> dict[str, Any] | None:
    found = read_json_object(folder, name)
    return None if found is None else {key: value for key, value in found.items() if key not in REMARKS}


def _digest(folder: Path, name: str) -> str | None:
    path = confined(folder, name)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

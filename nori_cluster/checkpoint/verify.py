"""What is in a checkpoint folder and what is wrong with it, for `nori models verify` and `nori models list`. Reads
headers and JSON only, so a folder of any size takes a moment."""

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.checkpoint.folder import read_json_object, read_text
from nori_cluster.checkpoint.hf_config import CheckpointConfig, read_config
from nori_cluster.checkpoint.safetensors_header import TensorEntry
from nori_cluster.checkpoint.safetensors_index import weight_entries
from nori_cluster.checkpoint.source import converted_models
from nori_cluster.checkpoint.store import models_folder
from nori_cluster.errors import CheckpointError


class TokenizerFacts(msgspec.Struct, frozen=True):
    """vocab_size: highest id + 1. special: control tokens. chat_template: where it comes from, None without one."""

    model: str
    vocab_size: int
    special: int
    chat_template: str | None


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """parameters: numbers stored (tied ones once). bytes: of tensor data. dtypes: tensors per dtype. problems: empty
    when the folder can be served; config or tokenizer is None when it could not be read."""

    folder: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    files: int
    config: CheckpointConfig | None
    tokenizer: TokenizerFacts | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """One folder under $NORI_HOME/models. bytes: on disk. problem: why it cannot be served, or empty."""

    name: str
    folder: str
    bytes: int
    architecture: str
    dtype: str
    problem: str


def verify(folder: Path) -> CheckpointReport:
    """Never raises for what is in the folder: it lands in `problems`."""
    problems: list[str] = []
    entries: dict[str, TensorEntry] = {}
    config: CheckpointConfig | None = None
    tokenizer: TokenizerFacts | None = None
    try:
        config = read_config(folder)
    except CheckpointError as error:
        problems.append(error.message)
    try:
        entries = weight_entries(folder)
    except CheckpointError as error:
        problems.append(error.message)
    try:
        tokenizer = _tokenizer_facts(folder)
    except CheckpointError as error:
        problems.append(error.message)
    if config is not None and tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        problems.append(
            f"tokenizer.json has {tokenizer.vocab_size} ids, config.json's vocab_size is {config.vocab_size}"
        )
    return CheckpointReport(
        folder=str(folder),
        tensors=len(entries),
        parameters=sum(prod(entry.shape) for entry in entries.values()),
        bytes=sum(entry.end - entry.start for entry in entries.values()),
        dtypes=dict(Counter(entry.dtype for entry in entries.values())),
        files=len({entry.file for entry in entries.values()}),
        config=config,
        tokenizer=tokenizer,
        problems=tuple(problems),
    )


def list_models() -> list[StoredModel]:
    """Everything converted so far, by name."""
    found = []
    for name in converted_models():
        folder = models_folder() / name
        report = verify(folder)
        found.append(
            StoredModel(
                name=name,
                folder=str(folder),
                bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                architecture=report.config.architecture if report.config else "",
                dtype=report.config.torch_dtype if report.config else "",
                problem=report.problems[0] if report.problems else "",
            )
        )
    return found


def _tokenizer_facts(folder: Path) -> TokenizerFacts:
    definition = read_json_object(folder, "tokenizer.json")
    if definition is None:
        raise CheckpointError(f"{folder}: no tokenizer.json")
    model = definition.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict | list):
        raise CheckpointError(f"{folder / 'tokenizer.json'}: no model with a vocabulary")
    added: list[dict[str, Any]] = definition.get("added_tokens") or []
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab))), *_added_ids(folder, added)]
    return TokenizerFacts(
        model=str(model.get("type", "BPE")),
        vocab_size=1 + max(ids, default=-1),
        special=sum(bool(token.get("special")) for token in added),
        chat_template=_template_origin(folder),
    )


def _added_ids(folder: Path, added: list[dict[str, Any]]) -> list[int]:
    try:
        return [int(token["id"]) for token in added]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder / 'tokenizer.json'}: added_tokens: an entry has no id") from error


def _template_origin(folder: Path) -> str | None:
    if read_text(folder, "chat_template.jinja") is not None:
        return "chat_template.jinja"
    config = read_json_object(folder, "tokenizer_config.json") or {}
    return "tokenizer_config.json" if config.get("chat_template") else None


def to_json(report: CheckpointReport) -> str:
    """The report for --json, without config.json's other keys."""
    values = msgspec.to_builtins(report)
    if values["config"] is not None:
        values["config"].pop("raw")
    return json.dumps(values | {"ok": report.ok}, indent=2)

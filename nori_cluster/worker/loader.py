"""Checkpoint folder → a Decoder whose every parameter is filled: memory-mapped files, only this rank's slices.

A tensor that is missing, of another shape or not of floating point ends the load with its name; none is guessed.
"""

import hashlib
import logging
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from nori_cluster.checkpoint.progress import NoProgress, Progress
from nori_cluster.checkpoint.safetensors_index import weight_files
from nori_cluster.errors import CheckpointError
from nori_cluster.layers.shard import LayerContext, Shard, Sharded
from nori_cluster.models.base import ModelFamily, ModelSpec, WeightSource
from nori_cluster.models.decoder import Decoder

log = logging.getLogger(__name__)
FLOATS = {"F64", "F32", "F16", "BF16"}
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 64


def load_model(
    folder: Path, family: type[ModelFamily], spec: ModelSpec, context: LayerContext, progress: Progress | None = None
) -> Decoder:
    """Raises CheckpointError naming the tensor or file at fault."""
    files = weight_files(folder)
    sources = list(family.weights(spec))
    _check_names(folder, files, sources, family, spec)
    model = Decoder(spec, context)
    by_file: dict[Path, list[WeightSource]] = defaultdict(list)
    for source in sources:
        by_file[files[source.checkpoint]].append(source)
    filled: dict[str, int] = defaultdict(int)
    total = sum(parameter.nbytes for parameter in model.parameters())
    with (progress or NoProgress()).task("loading weights", total) as advance:
        for path, wanted in sorted(by_file.items()):
            with safe_open(path, framework="pt") as file:
                for source in wanted:
                    region = _fill(file, path, source, model)
                    filled[f"{source.module}.{source.parameter}"] += region.numel()
                    advance(region.nbytes)
    _check_filled(model, filled)
    for module in model.modules():
        if (quant := getattr(module, "quant", None)) is not None:
            quant.after_load(module)
    return model.eval()


def fingerprint(folder: Path) -> str:
    """Short hash of config.json and the weights: headers, sizes and samples spread over each file, so that it costs no
    full read."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(weight_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _check_names(
    folder: Path, files: dict[str, Path], sources: list[WeightSource], family: type[ModelFamily], spec: ModelSpec
) -> None:
    expected = {source.checkpoint for source in sources}
    missing = sorted(expected - files.keys())
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    extra = sorted(name for name in files.keys() - expected if not family.ignored(name, spec))
    if extra:
        log.warning("%s: %d tensors are not part of the model and were ignored: %s", folder, len(extra), _some(extra))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _fill(file: safe_open, path: Path, source: WeightSource, model: Decoder) -> torch.Tensor:
    """Copy this rank's part of one tensor into its parameter; returns the region it covers, padding included."""
    layer = model.get_submodule(source.module)
    shard: Shard = _sharded(layer).shard(source.parameter, source.part)
    stored = file.get_slice(source.checkpoint)  # type: ignore[no-untyped-call]
    shape, kind = tuple(stored.get_shape()), stored.get_dtype()
    if shape != shard.full:
        raise CheckpointError(f"{path}: {source.checkpoint} has shape {shape}, the model needs {shard.full}")
    if kind not in FLOATS:
        raise CheckpointError(
            f"{path}: {source.checkpoint} is stored as {kind}; supported: {', '.join(sorted(FLOATS))}"
        )
    region = layer.get_parameter(source.parameter).data[shard.target]
    data = stored[shard.source]
    if data.shape != region.shape:
        region.zero_()
    region[tuple(slice(0, size) for size in data.shape)].copy_(data)
    return region


def _sharded(layer: nn.Module) -> Sharded:
    assert hasattr(layer, "shard"), f"{type(layer).__name__} holds weights but does not say where they go"
    return layer  # type: ignore[return-value]


def _check_filled(model: Decoder, filled: dict[str, int]) -> None:
    """Every element of every parameter was written, or the family's list of weights is wrong: our bug."""
    for name, parameter in model.named_parameters():
        assert filled[name] == parameter.numel(), f"{name}: {filled[name]} of {parameter.numel()} elements were loaded"

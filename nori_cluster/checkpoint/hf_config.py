"""config.json and generation_config.json → the few numbers everybody needs, checked; the rest stays in `raw`.

Read by the tokenizer, launch (parallel checks), models (their own keys in raw) and `nori models verify`.
"""

from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.checkpoint.folder import read_json_object
from nori_cluster.errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
MAX_COUNT = 1 << 31
MAX_LAYERS = 1024  # far above what any model has, so that a hostile file costs no memory


class CheckpointConfig(msgspec.Struct, frozen=True):
    """A model's shape. raw: all of config.json. torch_dtype: float32 | bfloat16 | float16 (float32 when not said).

    eos_token_ids: generation_config.json's when it names any, else config.json's, as the reference library does.
    """

    architecture: str
    raw: dict[str, Any]
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    torch_dtype: str


def read_architecture(folder: Path) -> str:
    """What config.json calls the model class, whatever else is in it. Raises CheckpointError."""
    return _Keys(folder / CONFIG, _read(folder)).architecture()


def _read(folder: Path) -> dict[str, Any]:
    raw = read_json_object(folder, CONFIG)
    if raw is None:
        raise CheckpointError(
            f"{folder}: no {CONFIG}; a model folder needs config.json, tokenizer.json and safetensors"
        )
    return raw


def read_config(folder: Path) -> CheckpointConfig:
    """Raises CheckpointError naming the file and the key."""
    raw = _read(folder)
    keys = _Keys(folder / CONFIG, raw)
    if "num_attention_heads" not in raw and "text_config" in raw:
        name = keys.architecture()
        keys.refuse("architectures", f"{name} is a model of text and more (text_config); only text models are served")
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", heads)
    hidden = keys.count("hidden_size")
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if raw.get("head_dim") is None and hidden % heads:
        keys.refuse("num_attention_heads", f"{heads} does not divide hidden_size {hidden} and head_dim is not given")
    head_dim, layers = keys.count("head_dim", hidden // heads), keys.count("num_hidden_layers")
    if head_dim % 2:
        keys.refuse("head_dim", f"{head_dim} is odd; rotary positions turn pairs")
    if layers > MAX_LAYERS:
        keys.refuse("num_hidden_layers", f"{layers} is more than {MAX_LAYERS}")
    keys.quantization()
    vocab = keys.count("vocab_size")
    return CheckpointConfig(
        architecture=keys.architecture(),
        raw=raw,
        vocab_size=vocab,
        max_position_embeddings=keys.count("max_position_embeddings"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        head_dim=head_dim,
        eos_token_ids=_eos_ids(folder, keys, vocab),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        torch_dtype=keys.dtype(),
    )


def _eos_ids(folder: Path, keys: "_Keys", vocab_size: int) -> tuple[int, ...]:
    generation = read_json_object(folder, GENERATION)
    if generation is not None:
        ids = _Keys(folder / GENERATION, generation).ids("eos_token_id", vocab_size)
        if ids:
            return ids
    return keys.ids("eos_token_id", vocab_size)


class _Keys:
    """Typed reading of one JSON object; every refusal names file and key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def refuse(self, key: str, reason: str) -> None:
        raise CheckpointError(f"{self._path}: {key}: {reason}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            self.refuse(key, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_COUNT:
            self.refuse(key, f"expected a positive integer, found {value!r:.80}")
        assert isinstance(value, int)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"expected true or false, found {value!r:.80}")
        return bool(value)

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self._values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for id_ in values:
            if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < vocab_size:
                self.refuse(key, f"expected token ids below vocab_size {vocab_size}, found {id_!r:.80}")
        return tuple(dict.fromkeys(values))

    def quantization(self) -> None:
        """A quantization that does not say its method would be served as if there were none."""
        value = self._values.get("quantization_config")
        if value is not None and not (isinstance(value, dict) and isinstance(value.get("quant_method"), str)):
            self.refuse("quantization_config", f"expected an object with quant_method, found {value!r:.80}")

    def architecture(self) -> str:
        names = self._values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            self.refuse("architectures", "expected a list with the name of the model class")
        assert isinstance(names, list)
        return str(names[0])

    def dtype(self) -> str:
        value = self._values.get("torch_dtype", self._values.get("dtype")) or "float32"
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in DTYPES:
            self.refuse("torch_dtype", f"expected one of {', '.join(DTYPES)}, found {value!r:.80}")
        return str(name)

"""GGUF file → checkpoint folder: config.json, tokenizer.json, safetensors. Llama family.

source calls it once per file and caches the folder. Tensor names and shapes are those of llama.cpp's conversion
(gguf-py tensor_mapping, convert_hf_to_gguf.py LlamaModel); anything else in the file is refused, never skipped.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.checkpoint.gguf_header import GgufFile, GgufTensor, open_gguf
from nori_cluster.checkpoint.gguf_tokenizer import Vocabulary, dump
from nori_cluster.checkpoint.progress import NoProgress, Progress
from nori_cluster.checkpoint.safetensors_writer import DEFAULT_SHARD_BYTES, PlannedTensor, write_shards
from nori_cluster.errors import CheckpointError

QUANTIZED = frozenset({"Q4_0", "Q4_1", "Q8_0"})
READABLE = QUANTIZED | {"F16", "F32", "BF16"}
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
CHUNK_VALUES = 1 << 20  # float32 values converted at a time: 4 MB, and a few copies of it
ROPE_FREQS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class LlamaShape(msgspec.Struct, frozen=True):
    """The numbers of a Llama model as GGUF metadata gives them."""

    layers: int
    context: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    rope_scaling: dict[str, Any] | None


def convert(
    source: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write the checkpoint into an existing, empty folder.

    dtype: float32 | bfloat16 | float16 for every tensor; None = bfloat16 for quantized and BF16 files, else the file's
    own. Values are rounded to nearest even. Raises CheckpointError naming the file and the key, tensor or type.
    """
    file = open_gguf(source)
    shape = _llama_shape(file)
    vocabulary = Vocabulary(str(source), file.metadata)
    names = _tensor_names(file, shape)
    dtype = dtype or _own_dtype(file)
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"dtype {dtype!r:.40} is not one of {', '.join(SAFETENSORS_DTYPES)}")
    planned = _plan(file, shape, names, len(vocabulary.tokens), dtype)
    config = _config(file, shape, vocabulary, dtype)
    (folder / "config.json").write_text(dump(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(dump(vocabulary.generation_config()), encoding="utf-8")
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(dump(vocabulary.tokenizer_config()), encoding="utf-8")
    total = sum(tensor.size for tensor in planned)
    with (progress or NoProgress()).task(f"converting {source.name}", total) as advance:
        write_shards(folder, planned, shard_bytes=shard_bytes, advance=advance)


def unpermute(rows: int, heads: int) -> NDArray[np.intp]:
    """Row order that undoes llama.cpp's: out[i] = stored[order[i]].

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, the Hugging Face layout rows i and i + head_dim / 2; its
    converter reorders q and k rows for that (convert_hf_to_gguf.py LlamaModel.permute).
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 words of float32 values, round to nearest even; NaN stays NaN."""
    words = values.view(np.uint32)
    rounded = ((words + (np.uint32(0x7FFF) + ((words >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    quiet = (words >> 16).astype(np.uint16) | np.uint16(0x40)
    return np.where(np.isnan(values), quiet, rounded)


class _Metadata:
    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def refuse(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {reason}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._file.metadata.get(key, default)
        if value is None:
            raise self.refuse(f"key {key} is missing")
        if type(value) not in (int, float) or not 0 < value < 1 << 31:
            raise self.refuse(f"key {key}: {value!r:.80} is not a positive number")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value.is_integer():
            raise self.refuse(f"key {key}: {value!r} is not a whole number")
        return int(value)


def _llama_shape(file: GgufFile) -> LlamaShape:
    keys = _Metadata(file)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise keys.refuse(f"architecture {architecture!r:.80} is not converted (only 'llama')")
    if file.metadata.get("llama.expert_count"):
        raise keys.refuse("mixture-of-experts models are not converted from GGUF; use the safetensors folder")
    hidden, heads = keys.count("llama.embedding_length"), keys.count("llama.attention.head_count")
    kv_heads = keys.count("llama.attention.head_count_kv", heads)
    head_dim = keys.count("llama.attention.key_length", hidden // heads)
    rotated = keys.count("llama.rope.dimension_count", head_dim)
    if heads % kv_heads or head_dim % 2 or ("llama.attention.key_length" not in file.metadata and hidden % heads):
        raise keys.refuse(f"{heads} heads and {kv_heads} KV heads of {head_dim} do not fit {hidden}")
    if rotated != head_dim or keys.count("llama.attention.value_length", head_dim) != head_dim:
        raise keys.refuse("heads that are partly rotated, or with values of another size, are not converted")
    return LlamaShape(
        layers=keys.count("llama.block_count"),
        context=keys.count("llama.context_length"),
        hidden=hidden,
        intermediate=keys.count("llama.feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=keys.number("llama.rope.freq_base", 10000.0),
        rms_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope_scaling=_rope_scaling(file, keys, head_dim),
    )


def _rope_scaling(file: GgufFile, keys: _Metadata, head_dim: int) -> dict[str, Any] | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("llama.rope.scaling.factor")}
    if kind != "none":
        raise keys.refuse(f"rope scaling {kind!r:.80} is not converted (none and linear are)")
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise keys.refuse(f"{ROPE_FREQS}: {tensor.type} {list(tensor.shape)}, expected F32 [{head_dim // 2}]")
    stored = file.rows(tensor).view(np.float32).reshape(-1)
    scaling = {"rope_type": "llama3", "factor": float(stored.max()), **LLAMA3_ROPE}
    expected = llama3_factors(keys.number("llama.rope.freq_base", 10000.0), head_dim, scaling)
    if not np.allclose(stored, expected, rtol=1e-4):
        raise keys.refuse(f"{ROPE_FREQS} does not follow Llama 3's rule; use the safetensors folder")
    return scaling


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> NDArray[np.float64]:
    """What llama.cpp's converter writes as rope_freqs for Llama 3.1's rope scaling: divisors of the frequencies."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    smooth = (original / wavelengths - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, middle))


def _tensor_names(file: GgufFile, shape: LlamaShape) -> dict[str, str]:
    """Every tensor of the file → its Hugging Face name; missing and unknown ones are refused."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    optional = {"output.weight": "lm_head.weight"}
    modules = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if shape.layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {shape.layers} layers, but only {len(file.tensors)} tensors")
    for layer in range(shape.layers):
        for short, long in (modules | norms).items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
        for short, long in modules.items():
            optional[f"blk.{layer}.{short}.bias"] = f"model.layers.{layer}.{long}.bias"
    for name in names:
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    for name in file.tensors.keys() - names.keys() - {ROPE_FREQS}:
        if name not in optional:
            raise CheckpointError(f"{file.path}: tensor {name!r:.200} is not part of a Llama model")
        names[name] = optional[name]
    return names


def _own_dtype(file: GgufFile) -> str:
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types & QUANTIZED or "BF16" in types:
        return "bfloat16"
    return "float16" if "F16" in types else "float32"


def _plan(file: GgufFile, shape: LlamaShape, names: dict[str, str], vocab_size: int, dtype: str) -> list[PlannedTensor]:
    planned = []
    for tensor in file.tensors.values():
        if tensor.name not in names:
            continue
        if tensor.type not in READABLE:
            readable = ", ".join(sorted(READABLE))
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r} has type {tensor.type}; readable are {readable}"
            )
        expected = _expected_shape(tensor.name, shape, vocab_size)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected {list(expected)}"
            )
        planned.append(_planned(file, tensor, names[tensor.name], _order(tensor, shape), dtype))
    return planned


def _expected_shape(name: str, shape: LlamaShape, vocab_size: int) -> tuple[int, ...]:
    kind = name.split(".")[-2]
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "token_embd": (vocab_size, shape.hidden), "output": (vocab_size, shape.hidden),
        "attn_q": (queries, shape.hidden), "attn_k": (keys, shape.hidden), "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries), "ffn_gate": (shape.intermediate, shape.hidden),
        "ffn_up": (shape.intermediate, shape.hidden), "ffn_down": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    if kind.endswith("norm"):
        return (shape.hidden,)
    return matrices[kind] if name.endswith(".weight") else matrices[kind][:1]


def _order(tensor: GgufTensor, shape: LlamaShape) -> NDArray[np.intp] | None:
    kind = tensor.name.split(".")[-2]
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(kind)
    return None if heads is None else unpermute(tensor.shape[0], heads)


def _planned(
    file: GgufFile, tensor: GgufTensor, name: str, order: NDArray[np.intp] | None, dtype: str
) -> PlannedTensor:
    def chunks() -> Iterator[bytes]:
        blocks = file.rows(tensor)
        if len(tensor.shape) == 1 and order is not None:  # a q or k bias: values are permuted, not rows
            yield _encode(file, tensor, _values(tensor, blocks).reshape(-1)[order], dtype)
            return
        step = max(1, CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, len(blocks), step):
            rows = blocks[start : start + step] if order is None else blocks[order[start : start + step]]
            yield _encode(file, tensor, _values(tensor, rows), dtype)

    return PlannedTensor(name, SAFETENSORS_DTYPES[dtype], tensor.shape, chunks)


def _values(tensor: GgufTensor, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 values of some rows of quantized blocks."""
    values = gguf.quants.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[tensor.type])
    return np.ascontiguousarray(values, dtype=np.float32)


def _encode(file: GgufFile, tensor: GgufTensor, values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "bfloat16":
        return to_bfloat16(values).astype("<u2", copy=False).tobytes()
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.array_equal(np.isfinite(halves), np.isfinite(values)):
        raise CheckpointError(f"{file.path}: tensor {tensor.name!r} does not fit float16; convert with another dtype")
    return halves.tobytes()


def _config(file: GgufFile, shape: LlamaShape, vocabulary: Vocabulary, dtype: str) -> dict[str, Any]:
    """config.json of transformers' LlamaForCausalLM."""
    biases = {name.split(".")[2] for name in file.tensors if name.endswith(".bias")}
    attention, mlp = {"attn_q", "attn_k", "attn_v", "attn_output"}, {"ffn_gate", "ffn_up", "ffn_down"}
    if biases & attention not in (set(), attention) or biases & mlp not in (set(), mlp):
        raise CheckpointError(f"{file.path}: biases on {', '.join(sorted(biases))} only: not a Llama layout")
    counted = sum(name.endswith(".bias") for name in file.tensors)
    if counted != len(biases) * shape.layers:
        raise CheckpointError(f"{file.path}: biases on some layers only: not a Llama layout")
    eos = vocabulary.eos_ids
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary.tokens),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rms_norm_eps": float(f"{shape.rms_eps:.6g}"),  # stored as float32: 1e-5 reads as 9.999999747e-06
        "attention_bias": bool(biases & attention),
        "mlp_bias": bool(biases & mlp),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return {key: value for key, value in config.items() if value is not None}

"""Small GGUF files: a whole tiny Llama written with gguf.GGUFWriter, and headers put together byte by byte."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from nori_cluster.frontend.token_table import byte_alphabet

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 64, 8, 2, 16, 2
Weights = dict[str, NDArray[np.float32]]
QUANT = gguf.GGMLQuantizationType


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges: two control tokens, one user-defined, every byte, two merges."""
    tokens = ["<|im_start|>", "<|im_end|>", "<tool>", *sorted(byte_alphabet()), "he", "Ġt"]
    return tokens, [3, 3, 4, *[1] * 258], ["h e", "Ġ t"]


def permute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k (convert_hf_to_gguf.py, LlamaModel.permute), written from its text."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def random_llama(*, tied: bool = False, biases: bool = False) -> Weights:
    """Weights under their Hugging Face names."""
    random = np.random.default_rng(7)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.normal(0, 0.3, shape).astype(np.float32)

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {"model.embed_tokens.weight": normal(len(vocabulary()[0]), HIDDEN), "model.norm.weight": normal(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, HIDDEN), ("self_attn.k_proj", keys, HIDDEN),
            ("self_attn.v_proj", keys, HIDDEN), ("self_attn.o_proj", HIDDEN, queries),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN), ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):  # fmt: skip
            weights[f"{at}.{name}.weight"] = normal(rows, columns)
            if biases and "self_attn" in name:
                weights[f"{at}.{name}.bias"] = normal(rows)
        weights[f"{at}.input_layernorm.weight"] = normal(HIDDEN)
        weights[f"{at}.post_attention_layernorm.weight"] = normal(HIDDEN)
    return weights if tied else weights | {"lm_head.weight": normal(len(vocabulary()[0]), HIDDEN)}


SHORT = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{SHORT[rest]}.{kind}"
    return f"{SHORT[module]}.{kind}"


def write_llama(
    path: Path,
    weights: Weights,
    quant: QUANT = QUANT.F32,
    *,
    pre: str = "smollm",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str = "llama",
    extra: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """As llama.cpp's converter would: q and k permuted, matrices quantized, vectors float32."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    change(writer)
    for name, values in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        stored = permute(values, heads) if heads else values
        kind = quant if values.ndim == 2 else QUANT.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def tensor_info(name: str, dims: list[int], type_: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, type_, offset)

"""Tiny random Llama checkpoints: whole folders (weights, config, tokenizer, chat template) of about 1-3 MB.

Initialised so that logits have a standard deviation of 2-5, norms and biases are random and no term of the model is
negligible: a wrong rope, norm or head mapping shows far above rounding errors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; eos is 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, and the capital of Italy is Rome.",
    "A cluster serves many requests at once: each request is a sequence of tokens, each token a step of the engine.",
    "Water boils at one hundred degrees; ice melts at zero. The sun rises in the east and sets in the west.",
    "def main(argument): return {'key': [1, 2, 3], 'value': argument} # a comment about the code of this function",
    "Once upon a time there was a little server that wanted to answer every question it was asked, and it did so.",
]


def make_tiny_llama(
    folder: Path,
    *,
    hidden: int = 128,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 3,
    intermediate: int = 256,
    vocab: int = 384,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    norm_eps: float = 1e-5,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    scale: float = 3.0,
    seed: int = 0,
    tokenizer: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder and return it. scale: standard deviation of the logits. config: keys to override.

    The tokenizer needs vocab ≥ 260 (256 bytes and the special tokens); smaller ones need tokenizer=False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    write_weights(folder, random_weights(settings, scale=scale, seed=seed, dtype=dtype), shards=shards)
    if tokenizer:
        write_tokenizer(folder, vocab, max_positions)
    return folder


def random_weights(
    settings: dict[str, Any], *, scale: float = 3.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors of a Llama checkpoint by Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    q_size = settings["num_attention_heads"] * settings["head_dim"]
    kv_size = settings["num_key_value_heads"] * settings["head_dim"]

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def norm() -> torch.Tensor:
        return (1.0 + 0.3 * torch.randn(hidden, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden, std=scale / hidden**0.5)}
    for index in range(settings["num_hidden_layers"]):
        at = f"model.layers.{index}."
        tensors[at + "input_layernorm.weight"] = norm()
        tensors[at + "post_attention_layernorm.weight"] = norm()
        for name, rows, columns, gain, bias in (
            ("self_attn.q_proj", q_size, hidden, 1.4, settings["attention_bias"]),
            ("self_attn.k_proj", kv_size, hidden, 1.4, settings["attention_bias"]),
            ("self_attn.v_proj", kv_size, hidden, 1.0, settings["attention_bias"]),
            ("self_attn.o_proj", hidden, q_size, 1.0, settings["attention_bias"]),
            ("mlp.gate_proj", inner, hidden, 1.4, settings["mlp_bias"]),
            ("mlp.up_proj", inner, hidden, 1.0, settings["mlp_bias"]),
            ("mlp.down_proj", hidden, inner, 1.0, settings["mlp_bias"]),
        ):
            tensors[at + name + ".weight"] = normal(rows, columns, std=gain / columns**0.5)
            if bias:
                tensors[at + name + ".bias"] = normal(rows, std=0.3)
    tensors["model.norm.weight"] = norm()
    if not settings["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(settings["vocab_size"], hidden, std=scale / hidden**0.5)
    return tensors


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """One model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(folder: Path, vocab: int, max_positions: int) -> None:
    """A byte-level BPE tokenizer of exactly `vocab` ids where the corpus allows, and a ChatML template."""
    if vocab < 256 + len(SPECIAL_TOKENS) + 1:
        raise ValueError(f"a byte-level tokenizer needs at least 260 ids, not {vocab}; pass tokenizer=False")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "unk_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[2],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))

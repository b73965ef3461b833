"""Tiny random checkpoints of every family, made and saved by the reference library: a config, weights, no tokenizer.

Weights are drawn so that no term of the model is negligible, and the final norm is scaled until the logits' standard
deviation is about 3. Windows (24) and original rope lengths (64) are shorter than the 300 tokens of the tests.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 384
WINDOW = 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tiny:
    """model_type: the reference library's name. offset: norm weights are stored minus one."""

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    offset: bool = False


_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": WINDOW}
_EXPERTS = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
FAMILIES = {
    "mistral": Tiny("MistralForCausalLM", "mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "mistral without window": Tiny("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "qwen2": Tiny("Qwen2ForCausalLM", "qwen2"),
    "qwen2 windows, tied": Tiny(
        "Qwen2ForCausalLM",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": Tiny("Qwen3ForCausalLM", "qwen3", {"head_dim": 24}),
    "phi3": Tiny("Phi3ForCausalLM", "phi3", {"sliding_window": WINDOW}),
    "gemma2": Tiny(
        "Gemma2ForCausalLM",
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 8.0},
        offset=True,
    ),
    "gemma3": Tiny(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        offset=True,
    ),
    "olmo2": Tiny("Olmo2ForCausalLM", "olmo2"),
    "granite": Tiny(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "mixtral": Tiny("MixtralForCausalLM", "mixtral", {"sliding_window": WINDOW, "num_local_experts": 6}),
    "qwen3 moe": Tiny("Qwen3MoeForCausalLM", "qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3 moe, window": Tiny(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_EXPERTS, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "smollm3": Tiny("SmolLM3ForCausalLM", "smollm3", {"no_rope_layer_interval": 2}),
}


def make_tiny(folder: Path, name: str) -> Path:
    """Write the checkpoint of FAMILIES[name] and return its folder."""
    tiny = FAMILIES[name]
    config = AutoConfig.for_model(tiny.model_type, **{**SHAPE, **tiny.settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    _draw(model, tiny.offset)
    for _ in range(4):  # a soft cap makes the logits' deviation sublinear
        _rescale(model, tiny.offset, target=3.0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _draw(model: PreTrainedModel, offset: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and "norm" in name:
            parameter.copy_(0.3 * noise + (0.0 if offset else 1.0))
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            gain = 1.4 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "gate")) else 1.0
            parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


@torch.no_grad()
def _rescale(model: PreTrainedModel, offset: bool, target: float) -> None:
    tokens = torch.randint(3, VOCAB, (1, 64), generator=torch.Generator().manual_seed(1))
    factor = target / float(model(tokens).logits.std())
    weight = model.model.norm.weight
    stored = 1.0 if offset else 0.0  # what the norm adds to its weight
    weight.copy_((weight + stored) * factor - stored)


def reference(folder: Path) -> PreTrainedModel:
    """The checkpoint as the reference library loads it, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

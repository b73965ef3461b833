"""F39: a Llama that went through GGUF (q and k rows permuted as llama.cpp does) and back says what the original does,
in the words of the reference library."""

from pathlib import Path

import pytest
import torch
from fakes import gguf_files as fake
from fakes.stepping import group_config, load_worker, sequence_logits
from transformers import LlamaConfig, LlamaForCausalLM

from nori_cluster.checkpoint.gguf import convert

pytestmark = pytest.mark.contract
TOKENS = list(range(1, 31))


def reference(weights: fake.Weights) -> torch.Tensor:
    """float32 [30, vocab] by transformers on the weights as they were before the conversion."""
    config = LlamaConfig(
        vocab_size=len(fake.vocabulary()[0]),
        hidden_size=fake.HIDDEN,
        intermediate_size=fake.INTERMEDIATE,
        num_attention_heads=fake.HEADS,
        num_key_value_heads=fake.KV_HEADS,
        head_dim=fake.HEAD_DIM,
        num_hidden_layers=fake.LAYERS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    model = LlamaForCausalLM(config).eval().to(torch.float32)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "bound"), [(fake.QUANT.F32, 1e-4), (fake.QUANT.F16, 1e-2), (fake.QUANT.Q8_0, None)])
def test_f39_logits_of_a_converted_gguf(tmp_path: Path, kind: fake.QUANT, bound: float | None, tied: bool) -> None:
    weights = fake.random_llama(tied=tied)
    expected = reference(weights)
    assert expected.std() > 0.5
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(fake.write_llama(tmp_path / "tiny.gguf", weights, kind), folder)
    found = sequence_logits(load_worker(group_config(folder)), TOKENS)
    if bound is not None:
        assert error(found, expected) < bound
    agree = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    assert agree >= (0.9 if kind is fake.QUANT.Q8_0 else 1.0)


def test_f39_rows_left_permuted_would_show(tmp_path: Path) -> None:
    """The mutation: without the permutation undone the logits are off by far more than the bound."""
    weights = fake.random_llama()
    twice = {
        name: fake.permute(values, fake.HEADS if "q_proj" in name else fake.KV_HEADS)
        if "q_proj" in name or "k_proj" in name
        else values
        for name, values in weights.items()
    }
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(fake.write_llama(tmp_path / "tiny.gguf", twice), folder)
    found = sequence_logits(load_worker(group_config(folder)), TOKENS)
    assert error(found, reference(weights)) > 1e-2

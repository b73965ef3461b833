"""config.json and generation_config.json: defaults, and refusals that name file and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from nori_cluster.checkpoint.hf_config import CheckpointConfig, read_config
from nori_cluster.errors import CheckpointError

pytestmark = pytest.mark.unit
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 128,
    "eos_token_id": 2, "torch_dtype": "bfloat16", "anything": {"else": 1},
}  # fmt: skip


def read(folder: Path, changes: dict[str, Any], generation: object = None) -> CheckpointConfig:
    values = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_all_fields(tmp_path: Path) -> None:
    config = read(tmp_path, {})
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 8)
    assert (config.eos_token_ids, config.torch_dtype, config.tie_word_embeddings) == ((2,), "bfloat16", False)
    assert config.raw["anything"] == {"else": 1}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": "absent"}, "num_key_value_heads", 8),
        ({"num_key_value_heads": None}, "num_key_value_heads", 8),
        ({"head_dim": 32}, "head_dim", 32),
        ({"head_dim": None}, "head_dim", 8),
        ({"eos_token_id": "absent"}, "eos_token_ids", ()),
        ({"eos_token_id": [2, 5, 2]}, "eos_token_ids", (2, 5)),
        ({"torch_dtype": "absent"}, "torch_dtype", "float32"),
        ({"torch_dtype": "absent", "dtype": "float16"}, "torch_dtype", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "torch_dtype", "bfloat16"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
    ],
)
def test_defaults_and_spellings(tmp_path: Path, changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(tmp_path, changes), field) == value


@pytest.mark.parametrize(
    ("generation", "ids"), [({"eos_token_id": [7, 8]}, (7, 8)), ({"eos_token_id": 9}, (9,)), ({}, (2,)), (None, (2,))]
)
def test_generation_config_decides_eos(tmp_path: Path, generation: object, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, {}, generation).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "absent"}, "vocab_size: missing"),
        ({"vocab_size": -1}, "vocab_size: expected a positive integer"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 65}, "does not divide hidden_size 65"),
        ({"hidden_size": 65, "head_dim": None}, "does not divide hidden_size 65"),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers: 1073741824 is more than"),
        ({"quantization_config": "int8"}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {"quant_method": ["x"]}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "absent"}, "architectures"),
        ({"torch_dtype": "float8"}, "torch_dtype"),
        ({"torch_dtype": 3}, "torch_dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_refusals_name_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}|config\.json: {message}"):
        read(tmp_path, changes)


def test_eos_of_generation_config_is_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        read(tmp_path, {}, {"eos_token_id": 1000})


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "[" * 100_000])
def test_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)


def test_a_multimodal_config_is_refused_as_such(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"num_attention_heads": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"architectures: LlavaForConditionalGeneration is a model of text and"):
        read_config(tmp_path)

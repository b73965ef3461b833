"""Loading: what is missing, misshapen or surplus is named; nothing stays uninitialised (F33)."""

import json
import logging
from pathlib import Path

import pytest
import torch
from fakes.checkpoints import make_tiny_llama, write_weights
from fakes.stepping import group_config, load_worker, sequence_logits
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from nori_cluster.errors import CheckpointError, ConfigError
from nori_cluster.quant.none import Unquantized
from nori_cluster.types import GroupSpec
from nori_cluster.worker.loader import fingerprint
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
TOKENS = list(range(5, 60))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "m", shards=2, tokenizer=False)


def load(folder: Path) -> Worker:
    return load_worker(group_config(folder))


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00002.safetensors"


def logits_match_the_reference(folder: Path) -> bool:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    found = sequence_logits(load(folder), TOKENS)
    return bool((found - expected).norm() / expected.norm() < 1e-4)


def test_f33_missing_shard(sharded: Path) -> None:
    second(sharded).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load(sharded)


def test_f33_shard_cut_in_half(sharded: Path) -> None:
    data = second(sharded).read_bytes()
    second(sharded).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load(sharded)


def test_f33_index_lists_a_tensor_that_is_not_there(sharded: Path) -> None:
    tensors = load_file(second(sharded))
    gone = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != gone}, second(sharded))
    with pytest.raises(CheckpointError, match=gone):
        load(sharded)


def test_f33_extra_file_is_ignored_the_index_decides(sharded: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, sharded / "unrelated.safetensors")
    assert logits_match_the_reference(sharded)


def test_f33_no_index_reads_all_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    text = index.read_text()
    expected = sequence_logits(load(sharded), TOKENS)
    index.unlink()
    assert torch.equal(sequence_logits(load(sharded), TOKENS), expected)
    second(sharded).unlink()
    gone = min(name for name, file in json.loads(text)["weight_map"].items() if "00002" in file and "model." in name)
    with pytest.raises(CheckpointError, match=gone):
        load(sharded)


def test_f33_wrong_shape_names_both(sharded: Path) -> None:
    tensors = load_file(second(sharded))
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, second(sharded))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(128, 255\), the model needs \(128, 256\)"):
        load(sharded)


def test_f33_mixed_dtypes_are_cast(sharded: Path) -> None:
    tensors = load_file(second(sharded))
    name = next(name for name in tensors if "proj" in name)
    tensors[name] = tensors[name].half()
    save_file(tensors, second(sharded))
    assert logits_match_the_reference(sharded)


def test_f33_nothing_stays_uninitialised(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters start as NaN here; after loading not one is left."""
    monkeypatch.setattr(Unquantized, "after_load", lambda self, layer: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    worker = load(sharded)
    for name, parameter in worker.model.named_parameters():
        assert parameter.isfinite().all(), name


def test_integer_weights_are_refused(sharded: Path) -> None:
    tensors = load_file(second(sharded))
    name = next(name for name in tensors if "proj" in name)
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, second(sharded))
    with pytest.raises(CheckpointError, match=f"{name} is stored as I8; supported: BF16, F16, F32, F64"):
        load(sharded)


def test_surplus_tensors_are_listed_and_rotary_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_llama(tmp_path / "m", tied=True, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = torch.zeros(384, 128)
    tensors["visual.patch"] = torch.zeros(2)
    write_weights(folder, tensors)
    with caplog.at_level(logging.WARNING):
        load(folder)
    (record,) = caplog.records
    assert "visual.patch" in record.getMessage()
    assert "inv_freq" not in record.getMessage()
    assert "lm_head" not in record.getMessage()


def test_other_architectures_and_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "a", tokenizer=False, config={"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ConfigError, match=r"'MambaForCausalLM'; supported: .*LlamaForCausalLM"):
        load(folder)
    folder = make_tiny_llama(tmp_path / "b", tokenizer=False, config={"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ConfigError, match="unknown quantization 'awq'; supported: none"):
        load(folder)
    folder = make_tiny_llama(tmp_path / "c", tokenizer=False, config={"hidden_act": "gelu"})
    with pytest.raises(CheckpointError, match=r"'gelu'.*silu"):
        load(folder)


def test_group_spec(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    spec = Worker(group_config(folder, max_model_len=100, num_blocks=20), load(folder).group).load()
    assert isinstance(spec, GroupSpec)
    assert (spec.vocab_size, spec.max_model_len, spec.num_blocks, spec.block_size) == (384, 100, 20, 16)
    assert (spec.eos_token_ids, spec.dtype, spec.model) == ((2,), "float32", "tiny")
    again = load(folder)
    assert again.load().numerics_id == spec.numerics_id
    other = make_tiny_llama(tmp_path / "n", seed=1)
    assert load_worker(group_config(other)).load().numerics_id != spec.numerics_id
    assert Worker(group_config(folder, dtype="bfloat16"), again.group).load().numerics_id != spec.numerics_id


@pytest.mark.parametrize("asked", [0, -1, 513])
def test_max_model_len_beyond_the_model_is_refused(tmp_path: Path, asked: int) -> None:
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False)
    with pytest.raises(ConfigError, match=f"max_model_len {asked} must lie between 1 and the model's 512"):
        load_worker(group_config(folder, max_model_len=asked))


def test_the_fingerprint_depends_on_weights_and_config(tmp_path: Path) -> None:
    prints = set()
    for number, change in enumerate(({}, {"seed": 1}, {"rope_theta": 5000.0}, {"norm_eps": 1e-6})):
        prints.add(fingerprint(make_tiny_llama(tmp_path / str(number), **change)))
    again = fingerprint(make_tiny_llama(tmp_path / "again"))
    assert len(prints) == 4
    assert again in prints

"""Tensor parallelism by real processes over gloo: equal to one rank, padding invisible (F36), refusals (F35)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.checkpoints import make_tiny_llama, write_weights
from fakes.stepping import Driver, group_config, load_worker, sequence_logits
from safetensors.torch import load_file

from nori_cluster.checkpoint.source import resolve
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.types import RowSampling, unpack
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
HERE = Path(__file__).parent
SCRIPT = HERE / "tp_rank.py"


def run_ranks(folder: Path, size: int, scratch: Path) -> dict[str, Any]:
    out, store = scratch / f"out{size}.pt", scratch / f"store{size}"
    environment = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(rank), str(size), str(store), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)
    result: dict[str, Any] = torch.load(out, weights_only=True)
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab": 301, "attention_bias": True, "mlp_bias": True},
        {"hidden": 100, "head_dim": 24, "tied": True, "vocab": 301},
    ],
)
def test_two_ranks_equal_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False, **settings)
    one, two = run_ranks(folder, 1, tmp_path), run_ranks(folder, 2, tmp_path)
    error = (one["logits"] - two["logits"]).norm() / one["logits"].norm()
    assert error < 1e-5
    assert one["tokens"] == two["tokens"]


def test_f35_demo_model_at_three_ranks(tmp_path: Path) -> None:
    try:
        folder = resolve("smollm2-135m")
    except NoriError as error:
        pytest.skip(f"the demo model cannot be had here: {error}")
    one, three = run_ranks(folder, 1, tmp_path), run_ranks(folder, 3, tmp_path)
    assert (one["logits"] - three["logits"]).norm() / one["logits"].norm() < 1e-4
    assert one["tokens"][0] == three["tokens"][0]


@pytest.fixture(scope="module")
def negative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F36's checkpoint: every real logit is negative, so a zero padding logit would win."""
    folder = make_tiny_llama(
        tmp_path_factory.mktemp("f36") / "m", hidden=64, heads=4, kv_heads=4, vocab=131, tokenizer=False
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    tensors["model.embed_tokens.weight"].mul_(1e-3)[:, 0] = 1.0
    tensors["model.norm.weight"].fill_(1.0)
    tensors["lm_head.weight"].zero_()[:, 0] = -(1 + torch.arange(131) / 131)
    write_weights(folder, tensors)
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
def test_f36_padding_is_never_seen(negative: Path, tmp_path: Path, size: int) -> None:
    result = run_ranks(negative, size, tmp_path)
    assert result["logits"].shape == (40, 131)
    assert (result["logits"] < 0).all()
    greedy, hot, filtered = (result["tokens"][slot] for slot in range(3))
    assert set(greedy) == {0}
    assert max(hot) < 131
    assert len(set(hot)) > 30
    assert max(filtered) < 131


def test_f36_logprobs_sum_to_one(negative: Path) -> None:
    worker = load_worker(group_config(negative))
    logits = sequence_logits(worker, [3, 4, 5])
    assert torch.log_softmax(logits.double(), -1).exp().sum(-1).sub(1).abs().max() < 1e-5


def test_f36_ids_beyond_the_tokenizer_are_never_sampled(tmp_path: Path) -> None:
    """A checkpoint padded beyond its tokenizer: the surplus ids are out of reach, however likely."""
    folder = make_tiny_llama(tmp_path / "m", vocab=300)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name][:20] * 5])
    config = (folder / "config.json").read_text().replace('"vocab_size": 300', '"vocab_size": 320')
    (folder / "config.json").write_text(config)
    write_weights(folder, tensors)
    driver = Driver(load_worker(group_config(folder)))
    for slot, temperature in enumerate((0.0, 5.0)):
        driver.start(slot, [5, 6, 7], RowSampling(temperature, 1.0, 0, slot, 0, logprobs=20))
    for step in range(100):
        result = driver.step({0: 1 if step else 3, 1: 1 if step else 3})
        assert result is not None
        assert result.logprobs is not None
        assert max(unpack(result.ids)) < 300
        assert max(unpack(result.logprobs.top_ids)) < 300


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (8, 2, 4), (8, 2, 8)])
def test_f35_refused_before_weights_load(tmp_path: Path, heads: int, kv_heads: int, size: int) -> None:
    folder = make_tiny_llama(tmp_path / "m", heads=heads, kv_heads=kv_heads, layers=1, tokenizer=False)
    (folder / "model.safetensors").unlink()

    class Rank(SoloGroup):
        pass

    Rank.size = size
    with pytest.raises(ConfigError, match="sizes that work"):
        Worker(group_config(folder, tp=size), Rank()).load()

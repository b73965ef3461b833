"""The engine with Triton's kernels in the interpreter: the same tokens as with the CPU backend."""

from pathlib import Path

import pytest
import torch
from fakes.checkpoints import make_tiny_llama

from nori_cluster import LLM, SamplingParams
from nori_cluster.attention.triton_paged import TritonPagedAttention
from nori_cluster.errors import ConfigError
from nori_cluster.worker.numerics import attention_name

pytestmark = pytest.mark.contract
CPU = torch.device("cpu")


def test_engine_gives_the_tokens_of_the_cpu_backend(tmp_path: Path) -> None:
    """Chunked prompts, decode beside prefill, a prefix hit and three KV-head groups, in float32."""
    folder = make_tiny_llama(tmp_path / "tiny", hidden=64, heads=6, kv_heads=2, layers=2, intermediate=64)
    prompts = [
        "The capital of France",
        "once",
        "The capital of France is",
        "a b c d e f g h i j k l m n o p q r s t u v",
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = {}
    for name in ("cpu_paged", "triton_paged"):
        llm = LLM(str(folder), device="cpu", num_blocks=64, max_num_batched_tokens=32, attention_backend=name)
        found[name] = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
    assert found["triton_paged"] == found["cpu_paged"]
    assert all(len(tokens) == 5 for tokens in found["cpu_paged"])


def test_what_it_supports() -> None:
    assert TritonPagedAttention.supports(CPU, torch.float32, 80)
    assert not TritonPagedAttention.supports(CPU, torch.float64, 64)
    assert not TritonPagedAttention.supports(CPU, torch.float32, 72)
    assert not TritonPagedAttention.supports(torch.device("meta"), torch.float32, 64)


def test_a_backend_can_be_asked_for_by_name() -> None:
    assert attention_name(CPU, False) == "cpu_paged"
    assert attention_name(CPU, False, "triton_paged") == "triton_paged"
    with pytest.raises(ConfigError, match="triton_paged does not have it"):
        attention_name(CPU, True, "triton_paged")
    with pytest.raises(ConfigError, match="'flash' is none of"):
        attention_name(CPU, False, "flash")

"""KV sizing, device and dtype resolution."""

from pathlib import Path

import pytest
import torch

from nori_cluster.config import CacheConfig, SchedulerConfig
from nori_cluster.errors import ConfigError
from nori_cluster.worker import memory
from nori_cluster.worker.memory import available_memory, count_blocks
from nori_cluster.worker.placement import resolve_device, resolve_dtype
from nori_cluster.worker.vocabulary import allowed_ids

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
MIB = 1 << 20


def blocks(cache: CacheConfig, *, seqs: int = 64, longest: int = 1600, ranks: int = 1) -> int:
    return count_blocks(cache, SchedulerConfig(max_num_seqs=seqs), longest, MIB, CPU, ranks)


def test_what_was_asked_for_wins() -> None:
    assert blocks(CacheConfig(num_blocks=3)) == 3  # less than one sequence: allowed, the engine refuses requests
    assert blocks(CacheConfig(kv_cache_memory_bytes=300 * MIB)) == 300
    with pytest.raises(ConfigError, match="at least 1"):
        blocks(CacheConfig(num_blocks=0))


def test_free_memory_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4000 * MIB)
    assert blocks(CacheConfig()) == 1000
    assert blocks(CacheConfig(), ranks=4) == 250
    assert blocks(CacheConfig(), seqs=2) == 200  # all that two sequences can need
    monkeypatch.setattr(memory, "available_memory", lambda: 400_000 * MIB)
    assert blocks(CacheConfig()) == 4096


def test_too_little_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_cache_memory_bytes"):
        blocks(CacheConfig())
    with pytest.raises(ConfigError, match="one sequence of max_model_len 1600"):
        blocks(CacheConfig(kv_cache_memory_bytes=99 * MIB))


def test_container_limits_count(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    50000 kB\n")
    assert available_memory(meminfo, tmp_path / "none") == 50000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("7\n")
    assert available_memory(meminfo, tmp_path) == 50000 * 1024
    (tmp_path / "memory.max").write_text("1000007\n")
    assert available_memory(meminfo, tmp_path) == 1_000_000


def test_dtypes(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("processor : 0\nflags : fpu avx512f avx512_bf16\n")
    old.write_text("processor : 0\nflags : fpu avx2\n")
    assert resolve_dtype("auto", "bfloat16", CPU, new) == torch.bfloat16
    assert resolve_dtype("auto", "bfloat16", CPU, old) == torch.float32
    assert resolve_dtype("auto", "float16", CPU, new) == torch.float32
    assert resolve_dtype("auto", "float32", CPU, new) == torch.float32
    assert resolve_dtype("bfloat16", "float32", CPU, old) == torch.bfloat16
    assert resolve_dtype("auto", "float16", torch.device("cuda"), old) == torch.float16
    with pytest.raises(ConfigError, match="unknown dtype 'int8'; supported: auto"):
        resolve_dtype("int8", "float32", CPU, new)


def test_devices() -> None:
    assert resolve_device("cpu", 1) == CPU
    with pytest.raises(ConfigError, match="unknown device 'tpu'; supported: auto, cpu, cuda"):
        resolve_device("tpu", 0)
    if not torch.cuda.is_available():
        assert resolve_device("auto", 0) == CPU
        with pytest.raises(ConfigError, match="no GPU"):
            resolve_device("cuda", 0)


def test_ids_beyond_the_tokenizer(tmp_path: Path) -> None:
    assert allowed_ids(tmp_path, 10) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 4}]}')
    allowed = allowed_ids(tmp_path, 6)
    assert allowed is not None
    assert allowed.tolist() == [True, True, False, False, True, False]
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}')
    assert allowed_ids(tmp_path, 2) is None

"""How many KV blocks a worker may have: what was asked for, or what free memory allows after the weights are loaded."""

from pathlib import Path

import torch

from nori_cluster.config import CacheConfig, SchedulerConfig
from nori_cluster.errors import ConfigError

CPU_SHARE = 0.25  # of available memory, for all workers of the host
CPU_MOST = 4 << 30  # bytes per host
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def count_blocks(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
    block_bytes: int,
    device: torch.device,
    ranks: int,
    reserve: int = 0,
) -> int:
    """Blocks for this rank. reserve: bytes of GPU memory that a step needs beside weights and KV.

    ConfigError when not even one sequence of max_model_len fits, unless num_blocks was given.
    """
    if cache.num_blocks is not None:
        if cache.num_blocks < 1:
            raise ConfigError("num_blocks must be at least 1", param="num_blocks")
        return cache.num_blocks
    longest = -(-max_model_len // cache.block_size)
    if cache.kv_cache_memory_bytes is not None:
        free, flag = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        free, flag = _free_on_gpu(cache.gpu_memory_utilization, device) - reserve, "gpu_memory_utilization"
    else:
        free, flag = min(int(available_memory() * CPU_SHARE), CPU_MOST) // ranks, "kv_cache_memory_bytes"
    blocks = free // block_bytes
    if blocks < longest:
        raise ConfigError(
            f"one sequence of max_model_len {max_model_len} needs {longest * block_bytes:,} bytes of KV cache and only "
            f"{max(free, 0):,} are free; lower max_model_len or raise {flag}",
            param=flag,
        )
    return min(blocks, scheduler.max_num_seqs * longest)


def _free_on_gpu(utilization: float, device: torch.device) -> int:
    """What `utilization` of the whole GPU leaves after everything already on it (weights included)."""
    if not 0 < utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must lie in (0, 1], not {utilization}", param="gpu_memory_utilization"
        )
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free)


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes this process may still use: the host's or, where less, its container's (cgroup v2)."""
    available = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))

""" "auto" becomes concrete here: which device and which dtype a worker runs with."""

from pathlib import Path

import torch

from nori_cluster.config import DEVICES
from nori_cluster.errors import ConfigError

# CPU flags of hardware bfloat16 products; without one they run about eight times slower than float32.
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
CPUINFO = Path("/proc/cpuinfo")


def resolve_device(name: str, rank: int) -> torch.device:
    """The device of this rank. A worker that sees several GPUs takes the one of its rank."""
    if name not in DEVICES:
        raise ConfigError(f"unknown device {name!r}; supported: {', '.join(DEVICES)}", param="device")
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU here", param="device")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, checkpoint: str, device: torch.device, cpuinfo: Path = CPUINFO) -> torch.dtype:
    """auto: the checkpoint's dtype on a GPU; on a CPU float32, or bfloat16 where both checkpoint and CPU have it."""
    if name == "auto":
        native = device.type == "cuda" or (checkpoint == "bfloat16" and cpu_has_bfloat16(cpuinfo))
        name = checkpoint if native else "float32"
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"unknown dtype {name!r}; supported: auto, float32, bfloat16, float16", param="dtype")
    assert isinstance(dtype, torch.dtype)
    return dtype


def cpu_has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BF16_FLAGS.isdisjoint(flags)

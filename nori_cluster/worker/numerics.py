"""What decides the bits of a logit on this worker: which attention runs, and the id that groups of equal bits share."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import torch

from nori_cluster.attention import ATTENTION
from nori_cluster.attention.base import AttentionBackend
from nori_cluster.device.parallel import TPGroup
from nori_cluster.errors import ConfigError
from nori_cluster.quant.base import QuantMethod

CPUINFO = Path("/proc/cpuinfo")
# What `auto` picks: (device, batch_invariant) → attention backend. The kernels are compiled for sm_80 and newer.
BACKENDS: dict[tuple[str, bool], str] = {
    ("cpu", False): "cpu_paged",
    ("cpu", True): "cpu_invariant",
    ("cuda", False): "reference",
    ("cuda sm_80", False): "triton_paged",
}


def attention_name(device: torch.device, batch_invariant: bool, asked: str = "auto") -> str:
    """The backend asked for, or by the table. ConfigError for a name that does not exist, is not installed or is not
    batch-invariant where that is asked for, and where no backend of the device is."""
    if asked != "auto":
        if asked == "triton_paged" and find_spec("triton") is None:
            raise ConfigError("triton_paged needs Triton, which is not installed", param="attention_backend")
        if asked not in ATTENTION:
            raise ConfigError(
                f"attention backend {asked!r} is none of {', '.join(ATTENTION)}", param="attention_backend"
            )
        if batch_invariant and not ATTENTION[asked].batch_invariant:
            raise _refusal(f"{asked} does not have it")
        return asked
    modern = device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    name = BACKENDS.get(("cuda sm_80" if modern else device.type, batch_invariant))
    if name is None:
        raise _refusal(f"no attention backend on {device.type} has it")
    return name


def require_batch_invariant(
    method: type[QuantMethod], dtype: torch.dtype, device: torch.device, group: TPGroup
) -> None:
    """ConfigError unless products of this method and the sums over ranks have the mode on this device."""
    if not group.ordered:
        raise _refusal(f"sums over ranks on {device.type} have no fixed order")
    if not method.batch_invariant(dtype, device):
        kind = str(dtype).removeprefix("torch.")
        raise _refusal(f"{method.__name__} products in {kind} on {device.type} do not have it")


def require_proof(proven: bool) -> None:
    """ConfigError unless the loaded model was seen to keep its bits on this machine."""
    if not proven:
        raise _refusal("this machine's kernels gave other bits for the same tokens in another batch")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"batch-invariant mode is not available: {reason}", param="batch_invariant")


def numerics_id(
    weights: str, dtype: torch.dtype, group: TPGroup, backend: AttentionBackend, device: torch.device
) -> str:
    """Short hash of everything that decides the bits of a logit, batch shape apart.

    Batch-invariant mode promises equal bits to groups of one id, so there it also names the libraries and the
    processor: both choose kernels. The number of threads does not matter (docs/decisions/0006).
    """
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    parts = [weights, str(dtype), "none", str(dtype), str(group.size), backend.numerics, hardware]
    if backend.batch_invariant:
        parts += [torch.__version__, *(processor() if device.type == "cpu" else ())]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def processor(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """What torch and its libraries choose CPU kernels by: instruction set, maker, family and model."""
    fields = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    try:
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    found = {name.strip(): value.strip() for name, _, value in pairs}
    return (torch.backends.cpu.get_cpu_capability(), *(found.get(field, "") for field in fields))

"""The machine and the tree a figure was made on, as far as they can be read: /proc, /sys, nvidia-smi, git.

Filled once per report. What cannot be read is "" or None, never guessed; report.validity turns gaps into reasons.
"""

import importlib.metadata
import ipaddress
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from nori_cluster.version import __version__

PACKAGES = ("torch", "numpy", "ray", "grpcio", "fastapi", "uvicorn", "uvloop", "tokenizers", "safetensors", "triton")
COMMAND_SECONDS = 10.0
BUSY_SECONDS = 0.5
SMI_FIELDS = ("name", "memory.total", "clocks.max.sm", "clocks.applications.graphics", "driver_version")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """`count` alike devices that computed. memory_bytes: of one. clocks: as text, "" = unknown."""

    name: str
    count: int = 1
    memory_bytes: int | None = None
    clocks: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host. cores: that this process may use; logical_cpus: that it has. busy_before: share of its processors that
    was busy just before the run; None = nobody looked."""

    cpu: str
    cores: int
    logical_cpus: int
    memory_bytes: int | None
    clocks: str
    gpus: tuple[Device, ...]
    driver: str
    system: str
    python: str
    busy_before: float | None = None


class Git(msgspec.Struct, frozen=True, kw_only=True):
    """The tree this package was run from. dirty: tracked files differ from the revision."""

    revision: str
    dirty: bool


def machine(busy_before: float | None = None, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Machine:
    """This host, now."""
    cpuinfo = _fields(proc / "cpuinfo")
    gpus, driver = _gpus()
    memory = _fields(proc / "meminfo").get("MemTotal", "").split()
    return Machine(
        cpu=cpuinfo.get("model name", "") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        logical_cpus=os.cpu_count() or 0,
        memory_bytes=int(memory[0]) * 1024 if memory else None,
        clocks=_cpu_clocks(cpuinfo, sys / "devices/system/cpu/cpu0/cpufreq"),
        gpus=gpus,
        driver=driver,
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        busy_before=busy_before,
    )


def busy_share(seconds: float = BUSY_SECONDS, stat: Path = Path("/proc/stat")) -> float | None:
    """Watches for so long; None where there is no /proc/stat."""
    before = _cpu_times(stat)
    time.sleep(seconds)
    after = _cpu_times(stat)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round(1 - (after[0] - before[0]) / (after[1] - before[1]), 3)


def _cpu_times(stat: Path) -> tuple[int, int] | None:
    """Idle and all ticks of all processors."""
    try:
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (ticks[3] + ticks[4], sum(ticks)) if len(ticks) == 8 else None


def cpu_device(host: Machine) -> Device:
    """The host's processor as the device that computes."""
    return Device(name=host.cpu, count=1, memory_bytes=host.memory_bytes, clocks=host.clocks)


def software() -> dict[str, str]:
    """Versions of what decides the speed of a Nori server in this environment."""
    found = {"nori-cluster": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git(folder: Path = Path(__file__).parent) -> Git | None:
    """None outside of a work tree, or without git."""
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    if not revision or changes is None:
        return None
    return Git(revision=revision, dirty=bool(changes))


def is_loopback(url: str) -> bool:
    """Whether a url or host:port names this machine by its loopback."""
    host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fields(path: Path) -> dict[str, str]:
    """ "name : value" lines; the first of each name."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _cpu_clocks(cpuinfo: dict[str, str], frequencies: Path) -> str:
    """The governor and its range, or what the processor says of itself now."""
    try:
        lowest, highest = ((frequencies / f"cpuinfo_{end}_freq").read_text() for end in ("min", "max"))
        governor = (frequencies / "scaling_governor").read_text().strip()
        return f"{int(lowest) // 1000}–{int(highest) // 1000} MHz, governor {governor}"
    except (OSError, ValueError):
        now = cpuinfo.get("cpu MHz", "")
        return f"{float(now):.0f} MHz as reported, not controllable" if now else ""


def _gpus() -> tuple[tuple[Device, ...], str]:
    """Alike GPUs together, and the driver. Empty without nvidia-smi."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    rows = [row for row in rows if len(row) == len(SMI_FIELDS)]
    devices = []
    for row in dict.fromkeys(map(tuple, rows)):
        name, memory, most, chosen, _ = row
        clocks = f"SM up to {most} MHz" + (f", set to {chosen} MHz" if chosen.isdigit() else "")
        size = int(memory) << 20 if memory.isdigit() else None
        devices.append(Device(name=name, count=rows.count(list(row)), memory_bytes=size, clocks=clocks))
    return tuple(devices), rows[0][-1] if rows else ""


def _output(*command: str) -> str | None:
    """stdout of a command, stripped; None when it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

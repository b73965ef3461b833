"""Make a virtual environment and install this checkout into it, with one readable line of progress.

`python3 scripts/install.py .venv [extra …]`; standard library only, because it runs before anything is installed.
"""

import argparse
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
NEWEST = (3, 13)


def check_python() -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        found = ".".join(map(str, sys.version_info[:3]))
        wanted = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        sys.exit(f"Python {wanted} is needed, {sys.executable} is {found}. Name another one: make PYTHON=python3.12 …")


def make_venv(folder: Path) -> None:
    if (folder / "bin" / "python").exists():
        return
    print(f"making {folder} with {sys.executable}", flush=True)
    done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        hint = "On Debian and Ubuntu: apt-get install python3-venv"
        sys.exit(f"python could not make a virtual environment:\n{done.stdout}{done.stderr}{hint}")


def show(line: str, count: int, live: bool) -> None:
    """On a terminal one line that rewrites itself; in a log only what takes long."""
    words = [re.sub(r"^([^-/]+-[^-]+)-\S*\.whl$", r"\1", word) for word in line.split()]  # name-version of a wheel
    text = f"[{count:3}] {' '.join(words)}"[:100]
    if live:
        print(f"\r\033[K{text}", end="", flush=True)
    elif line.lstrip().startswith(("Installing collected", "Building")) or "MB)" in line:
        print(text, flush=True)


def pip_install(folder: Path, extras: list[str]) -> None:
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["-c", str(ROOT / "constraints.txt"), "-e", target]
    print("installing (the first time: about 2 GB and several minutes, most of it torch and Ray)", flush=True)
    live = sys.stdout.isatty()
    tail: deque[str] = deque(maxlen=25)
    count = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            tail.append(line)
            count += line.startswith("Collecting")
            if line.lstrip().startswith(("Collecting", "Downloading", "Using cached", "Installing", "Building")):
                show(line, count, live)
    if live:
        print("\r\033[K", end="")
    if pip.returncode:
        sys.exit("pip failed; its last lines:\n" + "".join(tail))
    print(f"installed into {folder}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("extras", nargs="*")
    arguments = parser.parse_args()
    check_python()
    make_venv(arguments.venv)
    pip_install(arguments.venv, arguments.extras)


if __name__ == "__main__":
    main()

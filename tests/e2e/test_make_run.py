"""What a newcomer does: `make run`, everything the banner says, Ctrl-C, and nothing left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nori_cluster.cluster import processes

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--port", "--grpc-port", "--router-port", "--admin-port", "--metrics-port", "--data-plane-port")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def in_session(session: int) -> list[int]:
    """Processes of a session, however their parents ended."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and processes.is_alive(int(entry.name)):
            try:
                if os.getsid(int(entry.name)) == session:
                    pids.append(int(entry.name))
            except ProcessLookupError:
                continue
    return pids


def leftovers() -> set[str]:
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob("nori-ray-*")}
    return folders | {str(path) for path in Path("/dev/shm").iterdir()}


class Run:
    """`make run` in a session of its own, its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.ports = free_ports(len(FLAGS))
        arguments = " ".join(f"{flag} {port}" for flag, port in zip(FLAGS, self.ports, strict=True))
        self.output = folder / "output"
        self.before = leftovers()
        command = ["make", "run", f"ARGS={arguments}"]
        if Path(sys.prefix) != ROOT / ".venv":
            command.append(f"VENV={sys.prefix}")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.output.open("w"), stderr=subprocess.STDOUT, start_new_session=True
        )
        self.children: list[int] = []

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, f"make run ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {seconds} s:\n{self.text()}"
            time.sleep(0.1)
        self.children = processes.descendants(self.process.pid)

    def interrupt(self) -> None:
        """Ctrl-C in a terminal reaches the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for pid in {*in_session(run.process.pid), *run.children}:
        if processes.is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()


def shell(line: str) -> str:
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def test_make_run_answers_and_leaves_nothing(run: Run) -> None:
    run.wait_for("Ctrl-C drains and stops", 240)
    text = run.text()
    assert "Paris" in text
    assert re.search(r"TTFT [\d.,]+ ?m?s", text), text
    assert re.search(r"TPOT [\d.,]+ ?m?s", text), text
    assert re.search(r"[\d.,]+ tokens/s", text), text
    (curl,) = re.findall(r"^ *(curl .*)$", text, re.MULTILINE)
    if shutil.which("curl"):
        assert '"finish_reason"' in shell(curl)
    (chat,) = re.findall(r"^ *(\S*nori chat.*)$", text, re.MULTILINE)
    assert shell(f"{chat} --max-tokens 4 hello")
    (status,) = re.findall(r"^ *(\S*nori status.*)$", text, re.MULTILINE)
    assert "smollm2-135m" in shell(status)

    started = len(run.children)
    assert started > 5
    run.interrupt()
    run.process.wait(60)
    assert "stopping" in run.text()
    assert "Traceback" not in run.text()
    assert not [pid for pid in run.children if processes.is_alive(pid)], "processes outlived Ctrl-C"
    assert not in_session(run.process.pid)
    assert leftovers() <= run.before, "files in shared memory or Ray's folder were left"
    for port in run.ports:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger, listeners not
            sock.bind(("127.0.0.1", port))


def test_make_run_killed_outright_takes_its_processes_along(run: Run) -> None:
    """kill -9 of the parent: no gateway, engine or rank may serve on. (Two agents of Ray's own can outlive their raylet
    by a while; they serve nothing.)"""
    run.wait_for("Ctrl-C drains and stops", 240)
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.children}
    agents = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
    ours = [pid for pid, title in titles.items() if not title.startswith(agents)]
    assert len(ours) > 5
    os.kill(next(pid for pid, title in titles.items() if b"demo" in title), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(processes.is_alive, ours)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [titles[pid][:90] for pid in ours if processes.is_alive(pid)]

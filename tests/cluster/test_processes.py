"""Finding and ending our descendants, with real processes."""

import os
import subprocess
import sys
import time

import pytest

from nori_cluster.cluster import processes

pytestmark = pytest.mark.unit

TREE = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def test_descendants_are_found_and_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    found = processes.descendants(os.getpid())
    assert found.index(parent.pid) < found.index(grandchild)
    assert processes.end([parent.pid, grandchild], grace=0.1) == [parent.pid, grandchild]
    parent.wait(5)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while processes.is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.is_alive(grandchild)


def test_a_zombie_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while processes.is_alive(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.is_alive(child.pid)
    assert processes.end([child.pid], grace=5.0) == []
    child.wait()


def test_a_family_is_what_lies_below_it_and_nobody_else() -> None:
    """A stop ends what was started for it, not the other children of the process that uses the library."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    parent = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    try:
        assert processes.families([parent.pid]) == [parent.pid, grandchild]
        assert processes.families([os.getppid(), 1]) == [], "not below us: an id used again by others"
        assert processes.is_alive(bystander.pid)
    finally:
        processes.end([parent.pid, grandchild, bystander.pid], grace=0.0)
        parent.wait(5)
        bystander.wait(5)
        parent.stdout.close()

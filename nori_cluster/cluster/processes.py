"""Our descendants, read from /proc: what must be gone after a stop."""

import contextlib
import os
import signal
import time
from pathlib import Path


def _parent_and_state(pid: int) -> tuple[int, str]:
    """ProcessLookupError when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        raise ProcessLookupError(pid) from None
    state, parent = text.rpartition(")")[2].split()[:2]  # the name in parentheses may hold anything
    return int(parent), state


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                parent, _ = _parent_and_state(int(entry.name))
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def families(pids: list[int]) -> list[int]:
    """Those of `pids` that are still our descendants, and all below them."""
    known = set(pids)
    roots = [pid for pid in descendants(os.getpid()) if pid in known]
    return list(dict.fromkeys(roots + [pid for root in roots for pid in descendants(root)]))


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent has only not looked yet."""
    try:
        return _parent_and_state(pid)[1] != "Z"
    except ProcessLookupError:
        return False


def end(pids: list[int], grace: float) -> list[int]:
    """Wait until they are gone; after `grace` seconds kill what is left. Returns those that had to be killed."""
    deadline = time.monotonic() + grace
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    stubborn = [pid for pid in pids if is_alive(pid)]
    for pid in stubborn:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return stubborn

"""A server under test as a child: started in a session of its own, waited for, and ended whole, by the ids it had.

Nothing is ended that this object did not start: every process below ours is known by its id and its start time, so a
reused id is left alone.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import urlsplit

import httpx

from nori_cluster import env
from nori_cluster.errors import NoriError

POLL_SECONDS = 0.2
END_SECONDS = 45.0  # between the polite signal and the last one
KILL_SECONDS = 10.0  # for the kernel to take away what was killed
PROBE_SECONDS = 5.0
Process = tuple[int, str]  # id and start time


class ServerFailed(NoriError):
    """It did not start, or is not to be started; the message holds its last words."""


class Server:
    """with Server(...) as s: s.start(…). Leaving the block ends it and everything it started."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[Process] = set()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def start(self, ready: str, timeout: float) -> float:
        """Seconds until `ready` (a URL) answers 200. Raises ServerFailed."""
        refuse_taken(ready)
        began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env.child(**self._environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"{self._name}: {self._command[0]}: {error.strerror or error}") from error
        with httpx.Client(timeout=PROBE_SECONDS, trust_env=False) as http:
            while not _answers(http, ready):
                self._look()
                if (code := self._process.poll()) is not None:
                    words = self._last_words()
                    raise ServerFailed(f"{self._name} ended with code {code} before it was ready: {words}")
                if time.monotonic() - began > timeout:
                    raise ServerFailed(f"{self._name} was not ready after {timeout:g} s: {self._last_words()}")
                time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        self._look()
        return seconds

    def stop(self, grace: float = END_SECONDS) -> None:
        """SIGTERM to it; after `grace` seconds, or when we are interrupted meanwhile, SIGKILL to all that is left."""
        if self._process is None:
            return
        try:
            self._look()
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline and (self._process.poll() is None or self._left()):
                self._look()
                time.sleep(POLL_SECONDS)
        finally:
            deadline = time.monotonic() + KILL_SECONDS
            while (left := self._left()) and time.monotonic() < deadline:
                for pid, _ in left:
                    _kill(pid)
                time.sleep(POLL_SECONDS / 4)
            self._process.wait()

    def _look(self) -> None:
        """Remember what it has started so far: everything below it, and everything in sessions that those lead."""
        assert self._process is not None
        table = _process_table()
        if self._process.returncode is None and self._process.pid in table:  # not waited for: the id is still its own
            self._family.add((self._process.pid, table[self._process.pid][2]))
        ours = {pid for pid, _ in self._family}
        known = {pid for pid, born in self._family if pid in table and table[pid][2] == born}
        sessions = {table[pid][1] for pid in known} & ours  # one of their members lives: no other session has the id
        grew = True
        while grew:
            new = {
                pid
                for pid, (parent, session, _) in table.items()
                if pid not in known and (parent in known or session in sessions)
            }
            known |= new
            sessions |= new
            grew = bool(new)
        self._family |= {(pid, table[pid][2]) for pid in known}

    def _left(self) -> list[Process]:
        table = _process_table()
        return [(pid, born) for pid, born in self._family if pid in table and table[pid][2] == born]

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:]) or "it said nothing"


def refuse_taken(url: str) -> None:
    """Raises ServerFailed when something listens there already: its figures would be told as the new server's."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), PROBE_SECONDS).close()
    except OSError:
        return
    raise ServerFailed(f"something listens at {parts.netloc} already; stop it first, or take another port")


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _process_table() -> dict[int, tuple[int, int, str]]:
    """Id → parent, session, start time, of every process that is no zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), int(fields[3]), fields[19])
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

"""Whether a constraint can be served, found out by compiling it in a process of its own with a hard time limit."""

import asyncio
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from nori_cluster.errors import ClientError, Overloaded, UnsupportedParameter
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import Constraint

CHECK_SECONDS = 2.5  # wall clock of one compilation, then the process is killed
START_SECONDS = 60.0  # of the process with a large tokenizer on a busy machine
VERDICTS = 4_096
MAX_WAITING = 64

_COMMAND = [sys.executable, "-m", "nori_cluster.frontend.constraint_process"]


class Unusable(Exception):
    """The process does not start: no constraint can be served with this model."""


class CompilerProcess:
    """One child, started when first asked and again after it was killed. Not for several threads at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] | None = None  # ends the child, once; also when this object or Python ends
        self._buffer = b""

    def verdict(self, constraint: Constraint) -> str:
        """Empty, or the reason why not. Blocks for up to CHECK_SECONDS, and START_SECONDS to start. Raises Unusable."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        try:
            self._send([constraint.kind, constraint.text])
            return self._receive(CHECK_SECONDS)
        except TimeoutError:
            self.kill()
            return "takes too long to compile"
        except OSError:  # the child is gone: out of memory, or the library aborted
            self.kill()
            return "cannot be compiled: it is too complex"

    def kill(self) -> None:
        self._child = None
        if self._end is not None:
            self._end()

    def _start(self) -> None:
        self.kill()
        self._buffer = b""
        self._child = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._end = weakref.finalize(self, end, self._child)
        try:
            self._send([self._tokenizer.definition, self._tokenizer.vocab_size, self._tokenizer.eos_token_ids])
            reason = self._receive(START_SECONDS)
        except OSError as error:
            reason = f"its process does not start ({error or type(error).__name__})"
        if reason:
            self.kill()
            raise Unusable(reason)

    def _pipe(self, output: bool) -> IO[bytes]:
        assert self._child is not None
        pipe = self._child.stdout if output else self._child.stdin
        assert pipe is not None
        return pipe

    def _send(self, message: list[object]) -> None:
        pipe = self._pipe(output=False)
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    def _receive(self, seconds: float) -> str:
        """One line. Raises TimeoutError, or ConnectionError when the child is gone."""
        descriptor = self._pipe(output=True).fileno()
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TimeoutError
            part = os.read(descriptor, 65536)
            if not part:
                raise ConnectionError("the process ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return str(json.loads(line))


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # bytes for a child that is gone
                continue
    child.wait()


class ConstraintChecker:
    """Verdicts for the model of one tokenizer, cached by constraint. One constraint is compiled at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._process = CompilerProcess(tokenizer)
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[str]] = {}

    async def check(self, constraint: Constraint, param: str) -> None:
        """Raises ClientError with `param` when the constraint cannot be served, Overloaded when too many wait."""
        key = key_of(constraint)
        reason = self._verdicts.get(key)
        if reason is None:
            running = self._running.get(key)
            if running is None:
                if len(self._running) >= MAX_WAITING:
                    raise Overloaded("too many new constraints are waiting to be compiled", retry_after=1.0)
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
                loop = asyncio.get_running_loop()
                running = loop.run_in_executor(self._thread, self._verdict, key, constraint, param)
                self._running[key] = running
                running.add_done_callback(lambda _: self._running.pop(key, None))
            reason = await asyncio.shield(running)
        refuse(reason, param)

    def check_now(self, constraint: Constraint, param: str) -> None:
        """The same, blocking."""
        refuse(self._verdict(key_of(constraint), constraint, param), param)

    def close(self) -> None:
        """End the process; the checker can be used again."""
        with self._lock:
            self._process.kill()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _verdict(self, key: bytes, constraint: Constraint, param: str) -> str:
        with self._lock:
            reason = self._verdicts.get(key)
            if reason is None:
                try:
                    reason = self._process.verdict(constraint)
                except Unusable as error:
                    raise UnsupportedParameter(f"{param} is not supported here: {error}", param=param) from error
                self._verdicts[key] = reason
                while len(self._verdicts) > VERDICTS:
                    self._verdicts.popitem(last=False)
            return reason


def key_of(constraint: Constraint) -> bytes:
    return hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()


def refuse(reason: str, param: str) -> None:
    if reason:
        raise ClientError(f"{param} {reason}", param=param)

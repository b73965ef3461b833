"""Plans to the workers of a group and results back: shared-memory rings inside a host, the socket itself across hosts.

A Unix or TCP stream per worker carries one doorbell byte a frame, so a reader waits by blocking and a dead peer is an
end of file, at once; a live but stuck one shows in its pulse, a few words in shared memory. The frames lie in a ring in
an anonymous memory file whose descriptor travels over the socket: no name exists that a crash could leave behind. No
torch here: the engine process imports this module.
"""

import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import Final, Protocol

import msgspec

from nori_cluster.config import ModelConfig
from nori_cluster.errors import CheckpointError, EngineFailure, NoriError
from nori_cluster.types import GroupSpec, StepPlan, StepResult

_LENGTH: Final = struct.Struct("<Q")
_IN_RING: Final = b"R"  # the frame lies in the ring
_INLINE: Final = b"S"  # its length and bytes follow on the socket
_ORDER: Final = b"O"  # like _INLINE, but the frame is a ReloadOrder
_WRAP: Final = 2**64 - 1  # the rest of the ring is unused: go on at its start
_READERS_AT: Final = 64  # a cache line per reader: position, steps begun, steps done, time of the last beat (ns)
_BEGUN, _DONE, _BEAT = 8, 16, 24
BEAT_SECONDS: Final = 0.25
_DATA_AT: Final = 8192
RING_BYTES: Final = 8 << 20


class Ring:
    """A byte ring in shared memory, one writer, `readers` readers. Positions only grow; place = position % size."""

    def __init__(self, readers: int, fd: int | None = None) -> None:
        assert readers < (_DATA_AT - _READERS_AT) // 64
        self.fd = os.memfd_create("nori-ring", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _DATA_AT + RING_BYTES)
        self._memory = mmap.mmap(self.fd, _DATA_AT + RING_BYTES)
        self._readers = readers

    def write(self, frame: bytes) -> bool:
        """Append a frame; False when the slowest reader leaves no room for it."""
        position = self._position(0)
        place = position % RING_BYTES
        size = _LENGTH.size + len(frame)
        skip = RING_BYTES - place if place + size + _LENGTH.size > RING_BYTES else 0
        slowest = min(self._position(_READERS_AT + 64 * i) for i in range(self._readers))
        if position + skip + size - slowest > RING_BYTES - _LENGTH.size:
            return False
        if skip:
            _LENGTH.pack_into(self._memory, _DATA_AT + place, _WRAP)
            place = 0
        _LENGTH.pack_into(self._memory, _DATA_AT + place, len(frame))
        start = _DATA_AT + place + _LENGTH.size
        self._memory[start : start + len(frame)] = frame
        _LENGTH.pack_into(self._memory, 0, position + skip + size)
        return True

    def read(self, reader: int) -> bytes:
        """The next frame; the doorbell has said that there is one."""
        at = _READERS_AT + 64 * reader
        position = self._position(at)
        assert position < self._position(0), "doorbell without a frame"
        place = position % RING_BYTES
        (length,) = _LENGTH.unpack_from(self._memory, _DATA_AT + place)
        if length == _WRAP:
            position += RING_BYTES - place
            place = 0
            (length,) = _LENGTH.unpack_from(self._memory, _DATA_AT)
        start = _DATA_AT + place + _LENGTH.size
        frame = self._memory[start : start + length]
        _LENGTH.pack_into(self._memory, at, position + _LENGTH.size + length)
        return frame

    def mark(self, reader: int, field: int, value: int) -> None:
        """A reader's own progress: _BEGUN, _DONE or _BEAT."""
        _LENGTH.pack_into(self._memory, _READERS_AT + 64 * reader + field, value)

    def marked(self, reader: int, field: int) -> int:
        return self._position(_READERS_AT + 64 * reader + field)

    def _position(self, at: int) -> int:
        (value,) = _LENGTH.unpack_from(self._memory, at)
        return int(value)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Hello(msgspec.Struct, frozen=True):
    """First frame of a worker: who it is, and the secret that the engine process gave through Ray."""

    rank: int
    pid: int
    token: str


class ReloadOrder(msgspec.Struct, frozen=True):
    """To every rank, while no step is in flight. check: only look whether it could be loaded."""

    model: ModelConfig
    check: bool


class ReloadAnswer(msgspec.Struct, frozen=True):
    """Of one rank. spec: after a load, what it serves now. error: why not; after a load the rank is then lost."""

    spec: GroupSpec | None = None
    error: str = ""


class Reloadable(Protocol):
    """What serves plans and can take other weights: worker.Worker."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Rank 0's result, None elsewhere."""

    def check_reload(self, model: ModelConfig) -> None:
        """NoriError when the folder holds anything but other weights of the same model; touches nothing."""

    def reload(self, model: ModelConfig) -> GroupSpec:
        """Any exception means that the rank is lost."""


def _send_inline(sock: socket.socket, frame: bytes, bell: bytes = _INLINE) -> None:
    sock.sendall(bell + _LENGTH.pack(len(frame)) + frame)


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes; EOFError when the peer is gone."""
    parts = []
    while count:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _read_frame(sock: socket.socket, ring: Ring | None, reader: int) -> bytes:
    bell, frame = _read_message(sock, ring, reader)
    assert bell != _ORDER, "only workers take orders"
    return frame


def _read_message(sock: socket.socket, ring: Ring | None, reader: int) -> tuple[bytes, bytes]:
    """Doorbell and frame."""
    bell = _read_exactly(sock, 1)
    if bell == _IN_RING:
        assert ring is not None
        return bell, ring.read(reader)
    assert bell in (_INLINE, _ORDER), f"unknown doorbell {bell!r}"
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    return bell, _read_exactly(sock, length)


class Listener:
    """Where the workers of one group connect. `address`: an abstract Unix name, unguessable; only our own user may."""

    def __init__(self) -> None:
        self.token = os.urandom(16).hex()
        name = f"\0nori-{os.urandom(16).hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(name)
        self._socket.listen(64)
        self.address = name[1:]

    def accept(self, size: int, timeout: float) -> "RingExecutor":
        """Wait for all `size` workers. EngineFailure names the ranks that did not come in time."""
        deadline = time.monotonic() + timeout
        peers: dict[int, tuple[socket.socket, Hello]] = {}
        while len(peers) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                sock, _ = self._socket.accept()
                sock.settimeout(timeout)
                hello = self._greet(sock)
            except TimeoutError:
                missing = sorted(set(range(size)) - peers.keys())
                raise EngineFailure(f"ranks {missing} did not connect within {timeout:.0f} s") from None
            if hello is not None and hello.rank not in peers:
                sock.settimeout(None)
                peers[hello.rank] = (sock, hello)
            else:
                sock.close()
        self._socket.close()
        return RingExecutor([peers[rank] for rank in range(size)])

    def _greet(self, sock: socket.socket) -> Hello | None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            return None
        try:
            hello = msgspec.msgpack.decode(_read_frame(sock, None, 0), type=Hello)
        except (EOFError, msgspec.MsgspecError):
            return None
        return hello if hello.token == self.token else None


class RingExecutor:
    """The engine's Executor: one ring of plans read by all workers, one ring of results written by rank 0.

    heartbeat_timeout: seconds without a beat after which a rank's process counts as stuck (stopped, swapped out).
    step_timeout: seconds that one step may take (a collective that never ends).
    """

    chains = True

    def __init__(
        self,
        peers: list[tuple[socket.socket, Hello]],
        depth: int = 1,
        heartbeat_timeout: float = 5.0,
        step_timeout: float = 30.0,
    ) -> None:
        self.depth = depth
        self.heartbeat_timeout = heartbeat_timeout
        self.step_timeout = step_timeout
        self._collected = 0
        self._born = time.monotonic_ns()
        self.pids = [hello.pid for _, hello in peers]
        self._sockets = [sock for sock, _ in peers]
        self._plans = Ring(len(peers))
        self._results = Ring(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._poll = select.poll()
        self._ranks = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            socket.send_fds(sock, [b"F"], [self._plans.fd, self._results.fd])
            self._poll.register(sock, select.POLLIN)

    def submit(self, plan: StepPlan) -> None:
        frame = self._encoder.encode(plan)
        in_ring = self._plans.write(frame)
        for rank, sock in enumerate(self._sockets):
            try:
                if in_ring:
                    sock.sendall(_IN_RING)
                else:
                    _send_inline(sock, frame)
            except OSError:
                raise self._lost(rank) from None

    def collect(self) -> StepResult:
        begin = time.monotonic()
        while True:
            ready = {self._ranks[fd] for fd, _ in self._poll.poll(int(BEAT_SECONDS * 1000))}
            if not ready:
                self._check_pulses(time.monotonic() - begin)
            failures = [rank for rank in sorted(ready) if rank]  # other ranks speak only to report a failure
            for rank in [*failures, 0]:
                if rank not in ready:
                    continue
                try:
                    result = self._decoder.decode(_read_frame(self._sockets[rank], self._results, 0))
                except (EOFError, OSError):
                    raise self._lost(rank) from None
                if result.error:
                    raise self._failed(rank, result.error)
                self._collected += 1
                return result

    def check(self) -> None:
        """While no step is in flight: EngineFailure when a rank is gone or stuck."""
        for rank, sock in enumerate(self._sockets):
            if self._is_gone(sock):
                raise self._lost(rank)
        self._check_pulses(0.0)

    def reload(self, model: ModelConfig, timeout: float) -> GroupSpec:
        """Other weights on every rank, or on none. Only while no step is in flight; blocks.

        CheckpointError when a rank cannot take them: nothing was touched. EngineFailure when one was lost over it, or
        took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for rank, answer in enumerate(self._order(ReloadOrder(model, check=True), deadline)):
            if answer.error:
                raise CheckpointError(answer.error if len(self.pids) == 1 else f"rank {rank}: {answer.error}")
        answers = self._order(ReloadOrder(model, check=False), deadline)
        for rank, answer in enumerate(answers):
            if answer.error:
                raise EngineFailure(f"rank {rank} failed to load {model.path}: {answer.error}")
        spec = answers[0].spec
        assert spec is not None
        if any(answer.spec != spec for answer in answers):
            raise EngineFailure(f"the ranks disagree about {model.path}: {[answer.spec for answer in answers]}")
        return spec

    def _order(self, order: ReloadOrder, deadline: float) -> list[ReloadAnswer]:
        """Every rank's answer. A rank that loads may hold its own pulse up, so only the deadline bounds it."""
        for rank, sock in enumerate(self._sockets):
            try:
                _send_inline(sock, self._encoder.encode(order), _ORDER)
            except OSError:
                raise self._lost(rank) from None
        answers: dict[int, ReloadAnswer] = {}
        while len(answers) < len(self._sockets):
            for rank in sorted(self._ranks[fd] for fd, _ in self._poll.poll(int(BEAT_SECONDS * 1000))):
                try:
                    frame = _read_frame(self._sockets[rank], self._results, 0)
                except (EOFError, OSError):
                    raise self._lost(rank) from None
                answers[rank] = msgspec.msgpack.decode(frame, type=ReloadAnswer)
                if answers[rank].error and not order.check:
                    raise self._failed(rank, answers[rank].error)
            if time.monotonic() > deadline:
                late = sorted(set(range(len(self._sockets))) - answers.keys())
                raise EngineFailure(f"ranks {late} did not load {order.model.path} in time")
        return [answers[rank] for rank in range(len(answers))]

    def _check_pulses(self, waited: float) -> None:
        """waited: seconds since the oldest step in flight is awaited. EngineFailure names who is stuck, and where."""
        now = time.monotonic_ns()
        for rank, pid in enumerate(self.pids):
            silent = (now - (self._plans.marked(rank, _BEAT) or self._born)) / 1e9
            if silent > self.heartbeat_timeout:
                raise EngineFailure(
                    f"rank {rank} (pid {pid}) gave no sign of life for {silent:.1f} s; {self._progress(rank)}"
                )
        if waited > self.step_timeout:
            done = [self._plans.marked(rank, _DONE) for rank in range(len(self.pids))]
            late = [rank for rank, steps in enumerate(done) if steps == min(done)]
            names = ", ".join(f"rank {rank} (pid {self.pids[rank]})" for rank in late)
            raise EngineFailure(
                f"step {self._collected} took more than {self.step_timeout:g} s; {names}: {self._progress(late[0])}"
            )

    def _progress(self, rank: int) -> str:
        begun, done = self._plans.marked(rank, _BEGUN), self._plans.marked(rank, _DONE)
        if begun > done:
            return f"it is in step {begun - 1}"
        return f"its last step is {done - 1}" if done else "it has done no step"

    def _failed(self, rank: int, error: str) -> EngineFailure:
        """A rank reports an error: if another is gone, that one is the cause (its peers see a broken collective)."""
        time.sleep(0.05)
        for fd, _ in self._poll.poll(0):
            other = self._ranks[fd]
            if other != rank and self._is_gone(self._sockets[other]):
                return self._lost(other)
        return EngineFailure(f"rank {rank} failed: {error}")

    @staticmethod
    def _is_gone(sock: socket.socket) -> bool:
        try:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _lost(self, rank: int) -> EngineFailure:
        return EngineFailure(f"rank {rank} (pid {self.pids[rank]}) is gone; {self._progress(rank)}")

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._plans.close()
        self._results.close()


class WorkerChannel:
    """A worker's end: `serve` runs plans until the engine process hangs up."""

    def __init__(self, address: str, token: str, rank: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{address}")
        _send_inline(self._socket, msgspec.msgpack.encode(Hello(rank, os.getpid(), token)))
        bell, fds, _, _ = socket.recv_fds(self._socket, 1, 2)
        if bell != b"F":
            raise EngineFailure("the engine process refused this worker")
        plans, results = fds
        self._plans = Ring(1 + rank, plans)
        self._results = Ring(1, results)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="nori-pulse", daemon=True)
        self._heart.start()

    def _beat(self) -> None:
        """A stopped process beats no more; one that waits in a collective does."""
        while not self._closing.is_set():
            self._plans.mark(self.rank, _BEAT, time.monotonic_ns())
            self._closing.wait(BEAT_SECONDS)

    def serve(self, worker: Reloadable) -> None:
        """Blocks. Raises what the worker raises, after reporting it."""
        steps = 0
        while True:
            try:
                bell, frame = _read_message(self._socket, self._plans, self.rank)
            except (EOFError, ConnectionError):
                return
            if bell == _ORDER:
                self._obey(worker, msgspec.msgpack.decode(frame, type=ReloadOrder))
                continue
            plan = self._decoder.decode(frame)
            steps += 1
            self._plans.mark(self.rank, _BEGUN, steps)
            try:
                result = worker.execute(plan)
            except Exception as failure:
                self._report(
                    StepResult(step=plan.step, counts=b"", ids=b"", error=f"{type(failure).__name__}: {failure}")
                )
                raise
            self._plans.mark(self.rank, _DONE, steps)
            if result is not None:
                self._send(result)

    def _obey(self, worker: Reloadable, order: ReloadOrder) -> None:
        """A check that fails is an answer like any other; a load that fails ends this rank."""
        try:
            if order.check:
                worker.check_reload(order.model)
                answer = ReloadAnswer()
            else:
                answer = ReloadAnswer(spec=worker.reload(order.model))
        except Exception as failure:
            known = order.check and isinstance(failure, NoriError)
            message = str(failure) if known else f"{type(failure).__name__}: {failure}"
            self._report(ReloadAnswer(error=message))
            if known:
                return
            raise
        _send_inline(self._socket, self._encoder.encode(answer))

    def _send(self, result: StepResult) -> None:
        frame = self._encoder.encode(result)
        if self.rank == 0 and self._results.write(frame):
            self._socket.sendall(_IN_RING)
        else:
            _send_inline(self._socket, frame)

    def _report(self, result: StepResult | ReloadAnswer) -> None:
        try:
            _send_inline(self._socket, self._encoder.encode(result))
        except OSError:
            return  # the engine process is gone; the caller raises the cause

    def close(self) -> None:
        self._closing.set()
        self._heart.join()
        self._socket.close()
        self._plans.close()
        self._results.close()

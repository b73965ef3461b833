"""A load from start to end: find the model, start client processes, warm up, run, gather what they saw.

`run_load` is the whole of it; metrics.summarize turns the LoadResult into numbers. Clients are processes of their own
even when there is one: what draws progress must not disturb what takes the time.
"""

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from nori_cluster.bench.client import TargetError, connect, discover
from nori_cluster.bench.client_process import Done, Job, News, Progress, Ready, Refused, read_frame, write_frame
from nori_cluster.bench.records import LoadSpec, RequestRecord
from nori_cluster.bench.reference import check_against, read_reference
from nori_cluster.bench.workload import Workload
from nori_cluster.errors import ConfigError, NoriError

START_DELAY = 0.05  # seconds between "all are ready" and second 0, for the word to get round
_decode_news = msgspec.msgpack.Decoder(News).decode
_NewsQueue = queue.SimpleQueue[tuple[int, News | None]]  # which process, and what; None: its end
_N = TypeVar("_N", Ready, Done)
Show = Callable[[str, int, int, int | None], None]  # phase, requests ended, of them failed, of how many


class ClientCrash(NoriError):
    """A client process ended before its work did."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients saw. Times in records are seconds from the start of the run.

    cpus: busy share of each client process. wall: seconds until the last request ended. started: UTC, ISO 8601.
    warmup: records of the warm-up requests, in no figure.
    """

    url: str
    model: str
    records: list[RequestRecord]
    warmup: list[RequestRecord]
    cpus: list[float]
    wall: float
    started: str


def run_load(
    url: str,
    model: str | None,
    spec: LoadSpec,
    *,
    api_key: str | None = None,
    reference: Path | None = None,
    with_ids: bool = False,
    progress: Show = lambda phase, ended, failed, total: None,
) -> LoadResult:
    """Send the load; blocks until it ended. with_ids: ask for token ids (a reference does so by itself).

    Raises ConfigError for a spec, trace or reference that cannot work, TargetError when the server is not there, does
    not serve the model, or answers no warm-up request, ClientCrash. What goes wrong later is in the records.
    """
    workload = Workload(spec)
    progress("connecting", 0, 0, None)
    served = discover(url, spec.endpoint, model, api_key)
    expected = None if reference is None else read_reference(reference, workload)
    ids = with_ids or expected is not None
    _check_client(url, served, workload, api_key)
    jobs = [Job(url, served, spec, api_key, ids, part, spec.processes) for part in range(spec.processes)]
    progress("warming up", 0, 0, None)
    with ExitStack() as stack:
        news: _NewsQueue = queue.SimpleQueue()
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in jobs]
        pairs = zip(jobs, logs, strict=True)
        clients = _Clients([stack.enter_context(_ClientProcess(job, news, log)) for job, log in pairs], news)
        warmup = [record for ready in clients.gather(Ready) for record in ready.warmup]
        _check_warmup(url, warmup)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        clients.start(time.monotonic() + START_DELAY)
        done = clients.gather(Done, lambda ended, failed: progress("running", ended, failed, workload.total))
    records = sorted((record for part in done for record in part.records), key=lambda record: record.number)
    if expected is not None:
        records = check_against(expected, records)
    return LoadResult(
        url=url,
        model=served,
        records=records,
        warmup=warmup,
        cpus=[part.cpu for part in done],
        wall=max(part.wall for part in done),
        started=started,
    )


def _check_client(url: str, model: str, workload: Workload, api_key: str | None) -> None:
    """Raises ConfigError for sampling fields that the endpoint does not know, before any process starts."""
    if workload.spec.endpoint != "grpc":
        connect(url, model, workload, api_key, False)


def _check_warmup(url: str, warmup: Sequence[RequestRecord]) -> None:
    if warmup and all(record.failure is not None for record in warmup):
        first = warmup[0]
        raise TargetError(f"{url} answers no request of this load: {first.failure}: {first.message}")


class _ClientProcess:
    """One client process and the thread that reads its news into a queue; ended when the context is left."""

    def __init__(self, job: Job, news: _NewsQueue, errors: IO[bytes]) -> None:
        """errors: a file for its stderr."""
        self._part = job.part
        self._news = news
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nori_cluster.bench.client_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.write(job)

    def __enter__(self) -> "_ClientProcess":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                continue

    def write(self, message: Job | float) -> None:
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, message)
        except BrokenPipeError:
            return  # its end is told by the reading thread

    def last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self._process.returncode}{': ' + lines[-1] if lines else ''}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (data := read_frame(self._process.stdout)) is not None:
            self._news.put((self._part, _decode_news(data)))
        self._news.put((self._part, None))


class _Clients:
    """All client processes and the queue in which their news come together."""

    def __init__(self, processes: list[_ClientProcess], news: _NewsQueue) -> None:
        self._processes = processes
        self._news = news
        self._ended = [0] * len(processes)
        self._failed = [0] * len(processes)

    def start(self, moment: float) -> None:
        for process in self._processes:
            process.write(moment)

    def gather(self, kind: type[_N], show: Callable[[int, int], None] = lambda ended, failed: None) -> list[_N]:
        """One piece of news of this kind from each process. Raises what a process refused with, or ClientCrash."""
        found: list[_N] = []
        while len(found) < len(self._processes):
            part, news = self._news.get()
            if isinstance(news, kind):
                found.append(news)
            elif isinstance(news, Progress):
                self._ended[part], self._failed[part] = news.ended, news.failed
                show(sum(self._ended), sum(self._failed))
            elif isinstance(news, Refused):
                raise (ConfigError if news.usage else NoriError)(news.message)
            elif news is None and len(found) < len(self._processes):
                raise ClientCrash(f"client process {part} ended early: {self._processes[part].last_words()}")
        return found

"""One client process: its share of a load, sent and timed. Started by runner, spoken to in frames on stdin and stdout.

In: a Job, then the time to start (float, this machine's monotonic clock). Out: Ready, Progress now and then, Done; or
Refused in place of any of them. The parent's end closes stdin and ends this process.
"""

import asyncio
import gc
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import msgspec
import uvloop

from nori_cluster.bench.client import Client, connect
from nori_cluster.bench.records import LoadSpec, RequestRecord
from nori_cluster.bench.stream import Answer, RequestFailed
from nori_cluster.bench.workload import Planned, Workload
from nori_cluster.errors import ConfigError, NoriError

PROGRESS_SECONDS = 0.25
LONGEST_SLEEP = 0.5  # seconds; timers are whole milliseconds, so the last one of them is spun away


class Job(msgspec.Struct, frozen=True, tag=True):
    """part of parts: which requests are this process's."""

    url: str
    model: str
    spec: LoadSpec
    api_key: str | None
    with_ids: bool
    part: int
    parts: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Warmed up. warmup: records of the warm-up requests."""

    warmup: list[RequestRecord]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Requests that ended, and how many of them badly, since the start."""

    ended: int
    failed: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """cpu: busy share of this process from the start to the last end; wall: seconds between them."""

    records: list[RequestRecord]
    cpu: float
    wall: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """This process cannot go on. usage: whoever started the run asked for what cannot be."""

    message: str
    usage: bool


News = Ready | Progress | Done | Refused
_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], message: msgspec.Struct | float) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


class LoadClient:
    """Sends the plans of one process and keeps what came of them."""

    def __init__(self, job: Job, workload: Workload, client: Client) -> None:
        self._spec = job.spec
        self._client = client
        self._plans = workload.plans(job.part, job.parts)
        share, more = divmod(job.spec.concurrency, job.parts)
        self._concurrency = share + (job.part < more)
        self._warmups = range(-1 - job.part, -1 - job.spec.warmup, -job.parts)
        self._workload = workload
        self._origin = 0.0
        self.records: list[RequestRecord] = []
        self.failed = 0

    async def warm_up(self) -> list[RequestRecord]:
        self._origin = time.monotonic()
        plans = map(self._workload.plan, self._warmups)
        return [await self._send(plan, self._client.prepare(plan)) for plan in plans]

    async def run(self, start: float) -> None:
        """start: when second 0 is, on the monotonic clock."""
        self._origin = start
        await sleep_until(start)
        if self._spec.arrival == "closed":
            await asyncio.gather(*(self._closed(self._plans) for _ in range(self._concurrency)))
        else:
            await self._open(self._plans)

    async def _closed(self, plans: Iterator[Planned]) -> None:
        """One of the loop's clients: shares the plans with its siblings."""
        end = None if self._spec.duration is None else self._origin + self._spec.duration
        for plan in plans:
            request = self._client.prepare(plan)  # before the clock of the request starts
            if end is not None and time.monotonic() >= end:
                return
            self._keep(await self._send(plan, request))

    async def _open(self, plans: Iterator[Planned]) -> None:
        running: set[asyncio.Task[None]] = set()
        for plan in plans:
            assert plan.due is not None
            request = self._client.prepare(plan)
            await sleep_until(self._origin + plan.due)
            task = asyncio.create_task(self._send_due(plan, request))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)

    async def _send_due(self, plan: Planned, request: object) -> None:
        self._keep(await self._send(plan, request))

    async def _send(self, plan: Planned, request: object) -> RequestRecord:
        due = time.monotonic() if plan.due is None else self._origin + plan.due
        answer, failed = Answer(), None
        try:
            async with asyncio.timeout(self._spec.timeout):
                await self._client.send(request, answer)
        except RequestFailed as error:
            failed = error
        except TimeoutError:
            events = len(answer.times)
            failed = RequestFailed("timeout", f"not done after {self._spec.timeout:g} s ({events} events had come)")
        return answer.record(plan, due, self._origin, failed)

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.failed += record.failure is not None


async def sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        await asyncio.sleep(min(left, LONGEST_SLEEP))


async def report(load: LoadClient, out: IO[bytes]) -> None:
    """Progress until cancelled."""
    told = 0
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        if len(load.records) > told:
            told = len(load.records)
            write_frame(out, Progress(told, load.failed))


async def serve(job: Job, out: IO[bytes]) -> None:
    workload = Workload(job.spec)
    client = connect(job.url, job.model, workload, job.api_key, job.with_ids)
    load = LoadClient(job, workload, client)
    write_frame(out, Ready(await load.warm_up()))
    start = await asyncio.to_thread(read_frame, sys.stdin.buffer)
    if start is None:
        return
    threading.Thread(target=end_with_parent, daemon=True).start()
    gc.collect()
    gc.freeze()  # what is there stays: collections in the run look at new objects only
    reporter = asyncio.create_task(report(load, out))
    moment = msgspec.msgpack.decode(start, type=float)
    await sleep_until(moment)
    busy = time.process_time()
    await load.run(moment)
    busy, wall = time.process_time() - busy, time.monotonic() - moment
    reporter.cancel()
    write_frame(out, Done(load.records, busy / max(wall, 1e-9), wall))
    await client.close()


def end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def allow_connections() -> None:
    """As many open files as the system lets this process have: an open loop against a stalled server needs them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    allow_connections()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    out = sys.stdout.buffer
    data = read_frame(sys.stdin.buffer)
    if data is None:
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(msgspec.msgpack.decode(data, type=Job), out))
    except NoriError as error:
        write_frame(out, Refused(error.message, isinstance(error, ConfigError)))
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

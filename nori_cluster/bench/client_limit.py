"""The client's own limit: events per second of its CPU time, against a null server in another process."""

import msgspec

from nori_cluster.bench.null_server import NullServerProcess, Reply, Script
from nori_cluster.bench.records import Lengths, LoadSpec
from nori_cluster.bench.runner import Show, run_load

FLAT_OUT_GUESS = 60_000  # events/s of the null server on a slow core: how long a flat-out run gets


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """events_s: as it ran, the server being the slower one. events_per_core_s: events over the client's CPU seconds.

    cpu: busy share of the one client process. events_per_read: how many the kernel had joined, on average.
    """

    streams: int
    events: int
    events_s: float
    events_per_core_s: float
    cpu_us_per_event: float
    cpu: float
    events_per_read: float


def measure(streams: int, gap: float, seconds: float, progress: Show) -> Limit:
    """One client process, `streams` at a time, an event every `gap` seconds in each; 0 = as fast as it goes."""
    total = seconds * (streams / gap if gap else FLAT_OUT_GUESS)
    tokens = max(16, round(total / streams / 4))
    spec = LoadSpec(
        requests=4 * streams, concurrency=streams, input=Lengths(median=128), output=Lengths(median=tokens), warmup=0
    )
    with NullServerProcess(Script(replies=(Reply(first=gap, gap=gap),))) as server:
        result = run_load(server.url, None, spec, progress=progress)
    events = sum(len(record.events) for record in result.records)
    reads = sum(len(set(record.events)) for record in result.records)
    busy = result.cpus[0] * result.wall
    return Limit(
        streams=streams,
        events=events,
        events_s=events / result.wall,
        events_per_core_s=events / busy,
        cpu_us_per_event=busy / events * 1e6,
        cpu=result.cpus[0],
        events_per_read=events / reads,
    )

"""Why a run's figures must not be repeated without these words: the rules behind `invalid_because`, each one sentence.

Pure: structs in, reasons out. An invalid report is still a report; only its headline is refused.
"""

import statistics
from collections.abc import Iterator, Sequence

from nori_cluster.bench.conditions import Conditions
from nori_cluster.bench.environment import Git, Machine
from nori_cluster.bench.records import LoadSpec, Summary

MIN_COMPLETED = 100  # fewer have no P99 of their own: it would be the slowest request
MAX_FAILED = 0.01
MAX_SHORT = 0.01
MAX_CLIENT_CPU = 0.80
MAX_ROUNDS_APART = 0.20
MAX_BUSY_BEFORE = 0.25
LATE_SECONDS = 0.010  # an open loop's client that sends this much late has measured itself
HOW = {
    "server": "",
    "model": "",
    "revision": "of the weights",
    "weights": "precision of the weights",
    "kv_cache": "precision of the KV cache",
    "parallelism": "",
    "devices": "",
    "clocks": "of the devices",
    "software": "versions of the server's software",
    "flags": "of the server",
    "cache_state": "what the prefix caches held",
}


def unknown_conditions(conditions: Conditions) -> Iterator[str]:
    """numerics_id is asked of Nori servers only: others have none."""
    names = [*HOW, *(["numerics_id"] if conditions.is_nori else [])]
    for name in names:
        if not getattr(conditions, name):
            what = f" ({HOW[name]})" if HOW.get(name) else ""
            admin = ", or --admin HOST:PORT" if conditions.is_nori else ""
            yield f"unknown {name}{what}: state it with --server-info {name}=…{admin}"


def busy(host: Machine, local: bool) -> Iterator[str]:
    """local: the server computed on this host."""
    if local and host.busy_before is not None and host.busy_before > MAX_BUSY_BEFORE:
        yield f"the machine was busy before the run: {host.busy_before:.0%} of its processors with other work"


def tree(git: Git | None) -> Iterator[str]:
    if git is not None and git.dirty:
        yield f"dirty tree: files differ from revision {git.revision[:12]}, so nobody else can check it out"


def load_problems(load: LoadSpec, rounds: Sequence[Summary]) -> Iterator[str]:
    """Of runs against a server. Each reason once, for the worst round."""
    yield from dict.fromkeys(reason for summary in rounds for reason in _run_problems(load, summary))
    rates = [summary.output_tok_s for summary in rounds]
    middle = statistics.median(rates)
    if middle > 0 and (apart := (max(rates) - min(rates)) / middle) > MAX_ROUNDS_APART:
        yield f"the {len(rates)} rounds differ by {apart:.0%} in output tokens/s (at most {MAX_ROUNDS_APART:.0%})"


def _run_problems(load: LoadSpec, summary: Summary) -> Iterator[str]:
    failed = sum(summary.failures.values())
    if summary.completed < MIN_COMPLETED:
        yield f"{summary.completed} completed requests, fewer than {MIN_COMPLETED}"
    if summary.requests and failed / summary.requests > MAX_FAILED:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
        yield f"{failed} of {summary.requests} requests failed ({kinds}), more than {MAX_FAILED:.0%}"
    if not summary.steady:
        yield f"no steady state: {summary.steady_rule or 'unknown'}"
    if summary.client_cpu > MAX_CLIENT_CPU:
        yield f"client saturated: a client process was {summary.client_cpu:.0%} busy; use more --processes"
    if load.ignore_eos and summary.completed and summary.short_outputs / summary.completed > MAX_SHORT:
        yield f"{summary.short_outputs} outputs were shorter than asked although ignore_eos was set"
    if summary.mismatched:
        yield f"{summary.mismatched} requests gave other tokens than the reference run"
    late = summary.send_lag
    if load.arrival != "closed" and late is not None and late.p99 > LATE_SECONDS * 1e3:
        yield f"the client sent late: P99 {late.p99:.0f} ms after a request was due"

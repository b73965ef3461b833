"""Servers of others and ours under the same load, one at a time, in turn (A B A B): medians of rounds and ratios.

peers.yaml → Plan; `measure` starts each server anew in every round; `result` is the JSON that is kept. Output tok/s is
over the whole run (all output tokens by its wall time), for every server alike.
"""

import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import yaml

from nori_cluster import env
from nori_cluster.bench.conditions import Conditions, discover
from nori_cluster.bench.environment import Git, Machine, busy_share, machine
from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.peer_process import Server
from nori_cluster.bench.records import Lengths, LoadSpec, Slo, Summary
from nori_cluster.bench.report import median_round
from nori_cluster.bench.runner import LoadResult, run_load
from nori_cluster.bench.validity import MAX_BUSY_BEFORE
from nori_cluster.errors import ConfigError, NoriError

SCHEMA_VERSION = 1
RATIO_RULE = "ours / best peer, output tokens/s over the whole run; median and range of the rounds' ratios"
Run = Callable[[str, str | None, LoadSpec], LoadResult]


class Peer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one server is started and asked. command may hold ${python}, ${home} and environment variables.

    ready: URL that answers 200 once it serves. info: its conditions, kept with the figures (version, precision, flags).
    install: shown when its program is not there. admin: of a Nori cluster, which tells its conditions.
    """

    name: str
    command: list[str]
    ready: str
    url: str
    model: str | None = None
    environment: dict[str, str] = {}
    info: dict[str, str] = {}
    install: str = ""
    admin: str | None = None
    start_timeout: float = 600.0


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Closed loops: `concurrency` clients, `requests_per_client` each (at least min_requests in all)."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    input: int = 128
    output: int = 64
    requests_per_client: int = 4
    min_requests: int = 8
    warmup: int = 2
    vocab_size: int = 32_000
    seed: int = 0
    timeout: float = 3600.0

    def spec(self, concurrency: int, round: int) -> LoadSpec:
        """No two rounds or concurrencies share a prompt; every server of a round gets the same ones."""
        return LoadSpec(
            concurrency=concurrency,
            requests=max(self.min_requests, concurrency * self.requests_per_client),
            input=Lengths(median=self.input),
            output=Lengths(median=self.output),
            vocab_size=self.vocab_size,
            sampling={"temperature": 0.0},
            warmup=self.warmup,
            seed=self.seed + 1000 * round + concurrency,
            timeout=self.timeout,
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peers file."""

    ours: Peer
    peers: list[Peer] = []
    load: Load = Load()
    rounds: int = 3


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one concurrency: every round's output tok/s, and the median round's latencies (ms)."""

    output_tok_s: list[float]
    median_output_tok_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    failed: int
    requests: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ours over the best peer at one concurrency, output tok/s: the median of the rounds' ratios, and their range."""

    peer: str
    ratio: float
    lowest: float
    highest: float


class Measured(msgspec.Struct, kw_only=True):
    """What came of one server. command: variables filled in. rounds: concurrency → summaries. failure: why it ended."""

    peer: Peer
    command: list[str]
    startup_s: list[float] = []
    busy_before: list[float | None] = []
    rounds: dict[int, list[Summary]] = {}
    conditions: Conditions | None = None
    failure: str = ""


def read_plan(path: Path) -> Plan:
    """Raises ConfigError."""
    try:
        plan = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Plan)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: no peers file: {error}") from error
    names = [plan.ours.name, *(peer.name for peer in plan.peers)]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: several servers are called {', '.join(doubled)}")
    if any(not peer.command for peer in (plan.ours, *plan.peers)):
        raise ConfigError(f"{path}: a server has no command")
    if plan.rounds < 1 or not plan.load.concurrency or min(plan.load.concurrency) < 1:
        raise ConfigError(f"{path}: rounds and concurrencies must be at least 1")
    return plan


def filled(peer: Peer) -> list[str]:
    """Its command with the variables put in; an unknown one stays as it is."""
    values = {**env.child(), "python": sys.executable, "home": str(Path.home())}
    return [Template(word).safe_substitute(values) for word in peer.command]


def missing_program(peer: Peer) -> str:
    """Why it can not be started, or ""."""
    program = filled(peer)[0]
    if "$" in program:
        return f"{program} names an environment variable that is not set"
    return "" if shutil.which(program) else f"{program} is not installed"


def measure(plan: Plan, run: Run | None = None, show: Callable[[str], None] = lambda text: None) -> list[Measured]:
    """Every installed server in every round, in the order ours, peers, ours, peers; one at a time.

    A server that fails is not started again; the others go on. Raises nothing for what a server does.
    """
    run = run or (lambda url, model, spec: run_load(url, model, spec))
    installed = [plan.ours, *(peer for peer in plan.peers if not missing_program(peer))]
    found = [Measured(peer=peer, command=filled(peer)) for peer in installed]
    for round in range(plan.rounds):
        for measured in found:
            if not measured.failure:
                show(f"round {round + 1} of {plan.rounds}: {measured.peer.name}")
                try:
                    _measure_once(measured, plan.load, round, run, show)
                except NoriError as error:
                    measured.failure = f"round {round + 1}: {error.message}"
                    show(f"{measured.peer.name} failed: {error.message}")
    return found


def _measure_once(measured: Measured, load: Load, round: int, run: Run, show: Callable[[str], None]) -> None:
    peer = measured.peer
    measured.busy_before.append(busy_share())
    with Server(peer.name, measured.command, peer.environment) as server:
        measured.startup_s.append(server.start(peer.ready, peer.start_timeout))
        for concurrency in load.concurrency:
            spec = load.spec(concurrency, round)
            result = run(peer.url, peer.model, spec)
            summary = summarize(result.records, spec, Slo(), result.cpus)
            if not summary.completed:
                why = summary.failure_examples[0] if summary.failure_examples else "no request was sent"
                raise NoriError(f"no request ended well at concurrency {concurrency}: {why}")
            measured.rounds.setdefault(concurrency, []).append(summary)
            measured.conditions = measured.conditions or _conditions(peer, result.model)
            show(f"  c{concurrency}: {summary.run_output_tok_s:.1f} output tok/s")


def _conditions(peer: Peer, model: str) -> Conditions | None:
    """What it says of itself; what the file says of it stays beside that. None when the admin service says nothing."""
    try:
        return discover(peer.url, model, grpc=False, api_key=None, admin=peer.admin, host=machine())
    except ConfigError:
        return None


def cell(summaries: Sequence[Summary]) -> Cell:
    rates = [summary.run_output_tok_s for summary in summaries]
    middle = summaries[median_round(rates)]
    return Cell(
        output_tok_s=rates,
        median_output_tok_s=statistics.median(rates),
        ttft_p50=middle.ttft.p50 if middle.ttft else None,
        ttft_p99=middle.ttft.p99 if middle.ttft else None,
        tpot_p50=middle.tpot.p50 if middle.tpot else None,
        tpot_p99=middle.tpot.p99 if middle.tpot else None,
        failed=sum(sum(summary.failures.values()) for summary in summaries),
        requests=sum(summary.requests for summary in summaries),
    )


def ratio(concurrency: int, ours: Measured, peers: Sequence[Measured]) -> Ratio | None:
    """None without a peer (or without us) at this concurrency. The best peer is the one of the highest median."""
    mine = ours.rounds.get(concurrency)
    others = [peer for peer in peers if peer.rounds.get(concurrency)]
    if not mine or not others:
        return None
    best = max(others, key=lambda peer: cell(peer.rounds[concurrency]).median_output_tok_s)
    pairs = zip(mine, best.rounds[concurrency], strict=False)
    ratios = [a.run_output_tok_s / b.run_output_tok_s for a, b in pairs if b.run_output_tok_s > 0]
    if not ratios:
        return None
    middle = statistics.median(ratios)
    return Ratio(peer=best.peer.name, ratio=middle, lowest=min(ratios), highest=max(ratios))


def result(
    plan: Plan, found: Sequence[Measured], *, time: str, host: Machine, tree: Git | None, source: str
) -> dict[str, Any]:
    """What is kept: figures, ratios, and everything needed to do it again. source: the peers file."""
    ours, others = found[0], found[1:]
    ratios = {f"c{c}": ratio(c, ours, others) for c in plan.load.concurrency}
    absent = [
        {"name": peer.name, "why": why, "install": peer.install}
        for peer in plan.peers
        if (why := missing_program(peer))
    ]
    values: dict[str, Any] = msgspec.to_builtins(
        {
            "kind": "peers",
            "schema_version": SCHEMA_VERSION,
            "time": time,
            "best_peer_ratio": {name: found and round(found.ratio, 3) for name, found in ratios.items()},
            "ratios": ratios,
            "ratio_rule": RATIO_RULE,
            "servers": [_server(measured) for measured in found],
            "not_installed": absent,
            "load": plan.load,
            "rounds": plan.rounds,
            "order": "one at a time, started anew in each round: " + ", ".join(m.peer.name for m in found),
            "machine": host,
            "git": tree,
            "file": source,
            "invalid_because": _problems(plan, found, tree),
        }
    )
    return values


def _server(measured: Measured) -> Mapping[str, Any]:
    peer = measured.peer
    return {
        "name": peer.name,
        "command": peer.command,  # as the file has it: what its variables hold is this machine's
        "environment": peer.environment,
        "info": peer.info,
        "conditions": measured.conditions,
        "startup_s": [round(seconds, 2) for seconds in measured.startup_s],
        "busy_before": measured.busy_before,
        "cells": {f"c{c}": cell(summaries) for c, summaries in measured.rounds.items()},
        "failure": measured.failure,
    }


def _problems(plan: Plan, found: Sequence[Measured], tree: Git | None) -> list[str]:
    problems = [f"{m.peer.name}: {m.failure}" for m in found if m.failure]
    if len(found) < 2:
        problems.append("no peer is installed: there is nothing to compare with")
    if plan.rounds < 3:
        problems.append(f"{plan.rounds} round(s), fewer than 3")
    if tree is not None and tree.dirty:
        problems.append(f"dirty tree at revision {tree.revision[:12]}")
    for measured in found:
        busy = [share for share in measured.busy_before if share is not None and share > MAX_BUSY_BEFORE]
        if busy:
            problems.append(
                f"{measured.peer.name}: the machine was up to {max(busy):.0%} busy before {len(busy)} rounds"
            )
        failed = sum(sum(s.failures.values()) for summaries in measured.rounds.values() for s in summaries)
        if failed:
            problems.append(f"{measured.peer.name}: {failed} requests failed")
    return problems

"""LoadResults of `bench serve` (and of the verbs that call it again) → Report: summaries, conditions, price."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nori_cluster.bench import conditions as facts
from nori_cluster.bench.cost import read_prices
from nori_cluster.bench.environment import Machine, machine
from nori_cluster.bench.markdown import to_markdown
from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.page import to_html
from nori_cluster.bench.records import LoadSpec, Slo
from nori_cluster.bench.report import Kind, Report, Round, Sweep, build, to_json
from nori_cluster.bench.runner import LoadResult


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says beside the load. server_info: key=value, several; admin: host:port of a Nori cluster.

    busy_before: share of this machine that was busy before the load."""

    server_info: Sequence[str] = ()
    admin: str | None = None
    prices: Path | None = None
    label: str = ""
    api_key: str | None = None
    busy_before: float | None = None


def check_told(told: Told) -> None:
    """Raises ConfigError for what is wrong with it, before a load that takes minutes."""
    facts.parse_stated(told.server_info)
    if told.prices is not None:
        read_prices(told.prices)


def serve_report(
    results: Sequence[LoadResult],
    load: LoadSpec,
    slo: Slo,
    told: Told,
    *,
    kind: Kind = "serve",
    reference: bool = False,
    sweep: Sweep | None = None,
) -> Report:
    """results: one or more rounds of `load` against one server. Asks the server for its facts: call it while it runs.

    Raises ConfigError for a wrong --server-info, --admin or price file.
    """
    host = machine(told.busy_before)
    rounds = [
        Round(result.records, summarize(result.records, load, slo, result.cpus, reference=reference))
        for result in results
    ]
    conditions = server_conditions(results[0].url, results[0].model, load, told, host)
    return build(
        kind=kind,
        load=load,
        slo=slo,
        rounds=rounds,
        target=results[0].url,
        conditions=facts.measured(conditions, results[0].records, rounds[0].summary),
        started=results[0].started,
        prices=None if told.prices is None else read_prices(told.prices),
        label=told.label,
        host=host,
        sweep=sweep,
    )


def server_conditions(url: str, model: str, load: LoadSpec, told: Told, host: Machine) -> facts.Conditions:
    """Asked, then stated; what was measured comes later and is not asked over what the user stated."""
    stated = facts.parse_stated(told.server_info)
    grpc = load.endpoint == "grpc"
    asked = facts.discover(url, model, grpc=grpc, api_key=told.api_key, admin=told.admin, host=host)
    return facts.with_stated(asked, stated)


def write(report: Report, folder: Path) -> None:
    """report.json, report.md and report.html in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(to_json(report))
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report), encoding="utf-8")

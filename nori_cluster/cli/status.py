"""`nori status`: what the controller knows of models, groups, processes and load."""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin, Json
from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import ClusterStatus, GroupInfo, LoadInfo

app = typer.Typer(add_completion=False)
INTERVAL = 1.0  # seconds between two looks of --watch
COLOURS = {"ready": "green", "busy": "green", "stalled": "red", "dead": "red"}


class Snapshot(msgspec.Struct, frozen=True):
    """One look at the cluster."""

    address: str
    status: ClusterStatus
    groups: Sequence[GroupInfo]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens/s of all groups together."""
        return sum(group.load.tokens_per_second for group in self.groups)


def look(client: AdminClient, address: str) -> Snapshot:
    return Snapshot(address, client.get_status(), tuple(client.list_groups()))


def load_json(load: LoadInfo) -> dict[str, Any]:
    return {**msgspec.to_builtins(load), "kv_cache_usage": load.kv_cache_usage}


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    status = msgspec.to_builtins(snapshot.status)
    for model, info in zip(status["models"], snapshot.status.models, strict=True):
        model["load"] = load_json(info.load)
    groups = []
    for group in snapshot.groups:
        values = msgspec.to_builtins(group)
        groups.append(values | {"state": group.state.name.lower(), "load": load_json(group.load)})
    return {**status, "tokens_per_second": snapshot.tokens_per_second, "groups": groups}


def models_table(snapshot: Snapshot) -> Table:
    table = Table("model", "groups", "running", "waiting", "KV use", "tokens/s", box=None, pad_edge=False)
    for model in snapshot.status.models:
        load = model.load
        groups = f"{model.ready_groups}/{model.desired_groups} ready"
        table.add_row(model.model, groups, *load_cells(load))
    return table


def load_cells(load: LoadInfo) -> tuple[str, str, str, str]:
    usage = f"{load.kv_cache_usage:.0%}" if load.total_kv_blocks else "-"
    return str(load.running_sequences), str(load.waiting_sequences), usage, f"{load.tokens_per_second:.1f}"


def groups_table(snapshot: Snapshot) -> Table:
    table = Table(
        "group", "state", "running", "waiting", "KV use", "tokens/s", "step", "weights", box=None, pad_edge=False
    )
    for group in snapshot.groups:
        state = group.state.name.lower()
        cells = (*load_cells(group.load), str(group.step), group.weight_version or "-")
        table.add_row(group.name, Text(state, style=COLOURS.get(state, "yellow")), *cells)
    return table


def processes_table(snapshot: Snapshot) -> Table:
    table = Table("process", "pid", "where", "device", box=None, pad_edge=False)
    for group in snapshot.groups:
        table.add_row(f"{group.name} engine", str(group.engine_pid or "-"), group.address or "-", "-")
        for worker in group.workers:
            table.add_row(f"{group.name} rank {worker.rank}", str(worker.pid or "-"), worker.host, worker.device or "-")
    return table


def draw(snapshot: Snapshot) -> Group:
    gateways = ", ".join(f"{g.gateway_id} ({g.open_requests} open)" for g in snapshot.status.gateways) or "none"
    head = f"Nori Cluster {snapshot.status.version} at {snapshot.address}: {snapshot.tokens_per_second:.1f} tokens/s"
    parts: list[Any] = [Text(head, style="bold"), Text(f"gateways: {gateways}"), Text()]
    parts += [models_table(snapshot), Text(), groups_table(snapshot), Text(), processes_table(snapshot)]
    failures = [(group.name, group.last_failure) for group in snapshot.groups if group.last_failure]
    parts += [Text(f"{name}: the one before it ended: {reason}", style="red") for name, reason in failures]
    parts += [Text(line, style="dim") for line in counts(snapshot)]
    return Group(*parts)


def counts(snapshot: Snapshot) -> list[str]:
    """Lines about what had to be replaced since the start; none when nothing had."""
    of_groups = [(g.name, g.failures, g.restarts) for g in snapshot.groups if g.failures or g.restarts]
    lines = [f"{name}: lost {lost} times, restarted on purpose {restarts} times" for name, lost, restarts in of_groups]
    taken_over = {"controller": snapshot.status.controller_restarts, "router": snapshot.status.router_restarts}
    return lines + [f"the {what} was replaced {count} times" for what, count in taken_over.items() if count]


def watch(client: AdminClient, address: str, as_json: bool, console: Console) -> None:
    """Until Ctrl-C, or until the cluster is gone (its NoriError)."""
    if as_json:
        while True:
            typer.echo(json.dumps(to_json(look(client, address))))
            time.sleep(INTERVAL)
    while not console.is_terminal:  # a file or a pipe: one look after another
        console.print(draw(look(client, address)), end="\n\n")
        time.sleep(INTERVAL)
    with Live(draw(look(client, address)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(INTERVAL)
            live.update(draw(look(client, address)), refresh=True)


@app.command()
def status(
    admin: Admin = "127.0.0.1:8001",
    as_json: Json = False,
    watching: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second until Ctrl-C.")] = False,
) -> None:
    """Groups and their processes, state, load, KV use, and tokens/s of a running cluster.

    Example: nori status --json
    """
    console = Console(highlight=False)
    with connect(admin) as client:
        if watching:
            try:
                watch(client, admin, as_json, console)
            except KeyboardInterrupt:
                return
        snapshot = look(client, admin)
    if as_json:
        typer.echo(json.dumps(to_json(snapshot), indent=2))
    else:
        console.print(draw(snapshot))

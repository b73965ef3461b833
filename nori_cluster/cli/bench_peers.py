"""`nori bench peers FILE` (`make bench-peers`): other servers and ours under the same load, in turn."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from nori_cluster.bench import peers
from nori_cluster.bench.environment import git, machine
from nori_cluster.cli import bench_output as output
from nori_cluster.cli.flags import Json
from nori_cluster.cli.running import interrupt, on_signal
from nori_cluster.errors import ConfigError

app = typer.Typer(add_completion=False)


def concurrencies(text: str) -> tuple[int, ...]:
    """ "1,8,32". Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--concurrency {text!r} is not a list of numbers like 1,8,32") from error


@app.command("peers")
def peers_verb(
    file: Annotated[Path, typer.Argument(help="YAML file of servers.")] = Path("bench/peers.yaml"),
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, show_default="the file's", help="A B A B …")] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", show_default="the file's", help="E.g. 1,8,32.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Peers to take, several times.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of <date>-peers.json.")] = Path("bench/results"),
    json: Json = False,
) -> None:
    """Start each installed server in turn, send the same closed loops, and say ours over the best peer.

    Example: nori bench peers bench/peers.yaml --rounds 3 --concurrency 1,8,32
    """
    plan = chosen(peers.read_plan(file), rounds, concurrency, only)
    on_signal(interrupt)
    started = datetime.now(UTC)
    host, tree = machine(), git()
    for peer in plan.peers:
        if why := peers.missing_program(peer):
            hint = f"; to install it: {peer.install}" if peer.install else ""
            output.NOTES.print(Text(f"{peer.name} is left out: {why}{hint}", style="yellow"))
    if all(map(peers.missing_program, plan.peers)):
        output.NOTES.print(Text("no peer is installed: only ours is measured, there is no ratio", style="yellow"))
    found = peers.measure(plan, show=lambda text: output.NOTES.print(text, markup=False, style="dim"))
    time = started.isoformat(timespec="seconds")
    values = peers.result(plan, found, time=time, host=host, tree=tree, source=file.name)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"{started:%Y-%m-%d}-peers.json"
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n")
    if not json:
        show(values)
        output.NOTES.print(f"kept in {kept}", markup=False)
    output.last_line({**values, "kept": str(kept)})
    raise typer.Exit(1 if found[0].failure else 0)


def chosen(plan: peers.Plan, rounds: int | None, concurrency: str | None, only: list[str] | None) -> peers.Plan:
    """The plan with what the flags change. Raises ConfigError for a peer that is not in the file."""
    names = [peer.name for peer in plan.peers]
    if unknown := sorted(set(only or ()) - set(names)):
        raise ConfigError(f"--only {unknown[0]}: the file has {', '.join(names) or 'no peers'}")
    load = plan.load
    if concurrency is not None:
        load = msgspec.structs.replace(load, concurrency=concurrencies(concurrency))
        if min(load.concurrency) < 1:
            raise ConfigError("--concurrency must be at least 1")
    kept = [peer for peer in plan.peers if not only or peer.name in only]
    return msgspec.structs.replace(plan, peers=kept, load=load, rounds=rounds or plan.rounds)


def show(values: dict[str, Any]) -> None:
    table = Table("server", "load", "output tok/s", "rounds", "TTFT P50", "TPOT P50", box=None, pad_edge=False)
    for server in values["servers"]:
        for name, cell in server["cells"].items():
            rounds = " ".join(f"{rate:.1f}" for rate in cell["output_tok_s"])
            latencies = (f"{cell[field]:.1f}" if cell[field] is not None else "-" for field in ("ttft_p50", "tpot_p50"))
            table.add_row(server["name"], name, f"{cell['median_output_tok_s']:.1f}", rounds, *latencies)
    output.NOTES.print(table)
    for name, ratio in values["ratios"].items():
        if ratio is not None:
            span = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
            output.NOTES.print(f"{name}: ours / {ratio['peer']} = {ratio['ratio']:.2f} ({span})", markup=False)
    for reason in values["invalid_because"]:
        output.NOTES.print(Text(f"not to be quoted: {reason}", style="yellow"))

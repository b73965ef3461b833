"""A cluster in the foreground, for `serve` and `demo`: start with progress, say what it serves, stop on a signal."""

import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import typer
from rich.console import Console

from nori_cluster.cli.options import ServeOptions, cluster_config
from nori_cluster.cli.ports import check_free
from nori_cluster.cli.pulling import pull
from nori_cluster.config import ClusterConfig
from nori_cluster.registry import Registry

LAUNCHERS = Registry("launcher", {"local": "nori_cluster.cluster.launch:Cluster"})  # imports Ray: only when needed


class RunningCluster(Protocol):
    """What the command line uses of cluster.launch.Cluster; see there."""

    http_url: str
    grpc_address: str
    metrics_url: str
    admin_address: str

    def start(self) -> None: ...

    def wait(self) -> int: ...

    def stop(self, drain_timeout: float | None = None) -> None: ...


Hook = Callable[[ClusterConfig, RunningCluster], None]


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def on_signal(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """SIGINT, SIGTERM, and SIGHUP (the terminal was closed) where it is not ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def phases(notes: Console) -> Callable[[str], None]:
    """A callback that prints each phase with the seconds since now, and takes the signals back from Ray, which puts
    handlers of its own in place while it starts."""
    start = time.monotonic()

    def show(phase: str) -> None:
        on_signal(interrupt)
        notes.print(f"{time.monotonic() - start:6.1f} s  {phase}", style="dim", markup=False)

    return show


def launch(options: ServeOptions, notes: Console, on_ready: Hook = lambda config, cluster: None) -> int:
    """Check what is cheap, fetch the model, serve it; on_ready runs before the banner. Returns the exit code."""
    check_free(cluster_config(options, Path(options.model)))
    config = cluster_config(options, pull(options.model, notes))

    def ready(cluster: RunningCluster) -> None:
        on_ready(config, cluster)
        typer.echo(banner(config, cluster))

    return run(config, notes, ready)


def run(config: ClusterConfig, notes: Console, on_ready: Callable[[RunningCluster], None]) -> int:
    """Start, call on_ready, serve until a signal or a failure, stop. Returns the exit code.

    The first signal (see on_signal) drains, the second ends every process at once, the third ends this one as it is.
    """
    on_signal(interrupt)
    cluster: RunningCluster = LAUNCHERS["local"](config, on_phase=phases(notes))
    try:
        cluster.start()
        on_signal(interrupt)
        on_ready(cluster)
        return cluster.wait()
    except (KeyboardInterrupt, SystemExit):
        wait = f"running requests get {config.drain_timeout:g} s to end; " if cluster.http_url else ""
        notes.print(f"\nstopping: {wait}Ctrl-C again stops at once")
        return 0
    finally:
        stop(cluster, config.drain_timeout, notes)


def stop(cluster: RunningCluster, drain_timeout: float, notes: Console) -> None:
    try:
        cluster.stop(drain_timeout)
    except (KeyboardInterrupt, SystemExit):
        notes.print("stopping at once")
        on_signal(signal.SIG_DFL)
        cluster.stop(0.0)
        raise typer.Exit(130) from None


def own_command() -> str:
    """How this program was called, in a form that works when pasted into a shell in this folder."""
    called = Path(sys.argv[0])
    found = shutil.which("nori")
    if found and called.exists() and Path(found).samefile(called):
        return "nori"
    called = called.absolute()
    return shlex.quote(str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called))


def curl(config: ClusterConfig, url: str) -> str:
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    body = {"model": config.group.model.name, "messages": question, "max_tokens": 100}
    key = ' -H "Authorization: Bearer $NORI_API_KEY"' if config.api_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def banner(config: ClusterConfig, cluster: RunningCluster) -> str:
    """Where it listens and what to type; every line works when pasted."""
    nori, defaults = own_command(), ClusterConfig(group=config.group)
    moved = config.host != defaults.host
    url = f" --url {cluster.http_url}" if moved or config.ports.http != defaults.ports.http else ""
    admin = f" --admin {cluster.admin_address}" if moved or config.ports.admin != defaults.ports.admin else ""
    here = "" if nori == "nori" or nori.startswith(("/", "'/")) else ", in this folder"
    lines = [
        f"Serving {config.group.model.name}",
        f"  HTTP     {cluster.http_url}/v1",
        f"  gRPC     {cluster.grpc_address}",
        f"  metrics  {cluster.metrics_url}",
        f"  admin    {cluster.admin_address}",
        "",
        f"From another terminal{here}{', with the key in $NORI_API_KEY' if config.api_key else ''}:",
        f"  {curl(config, cluster.http_url)}",
        f"  {nori} chat{url}",
        f"  {nori} status{admin}",
        "",
        "Ctrl-C drains and stops.",
    ]
    return "\n".join(lines)

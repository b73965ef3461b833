"""One gateway process: cluster backend, service, HTTP, gRPC and metrics servers; drain on the first signal."""

import argparse
import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from nori_cluster.config import GatewayConfig, existing_folder
from nori_cluster.errors import ConfigError, Draining, NoriError
from nori_cluster.frontend.service import RETRY_DRAINING, Limits, ServedModel, Service
from nori_cluster.frontend.template import ChatTemplate
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.gateway.app import build_app, metrics_app
from nori_cluster.gateway.groups_metrics import GroupMetrics
from nori_cluster.gateway.servers import HttpServer, bind
from nori_cluster.rpc import public
from nori_cluster.rpc.cluster_backend import ClusterBackend
from nori_cluster.telemetry import configure_logging

MOST_FILES = 1 << 16  # descriptors: one per connection
GRPC_GRACE = 1.0  # seconds for gRPC calls that still run after the drain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; the exit code. Prints one JSON line on stdout when everything listens."""
    parser = argparse.ArgumentParser(prog="python -m nori_cluster.gateway", description="A Nori Cluster gateway.")
    parser.add_argument("--config", required=True, help="GatewayConfig as JSON text; - reads the first line of stdin")
    options = parser.parse_args(arguments)
    configure_logging("gateway")
    raise_file_limit()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the loop has its own: nothing runs that could be lost
        signal.signal(number, leave)
    try:
        # A config on stdin keeps the API key out of the process list.
        config = read_config(sys.stdin.readline() if options.config == "-" else options.config)
        uvloop.run(run(config))
    except NoriError as error:
        sys.stderr.write(f"nori gateway: {error}\n")
        return 1
    return 0


def leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def raise_file_limit() -> None:
    """The usual soft limit of 1,024 descriptors would refuse the thousandth stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_config(text: str) -> GatewayConfig:
    try:
        return msgspec.json.decode(text, type=GatewayConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--config: {error}") from error


def load_models(config: GatewayConfig) -> dict[str, ServedModel]:
    """Tokenizer and template of each model. Raises ConfigError or CheckpointError."""
    models = {}
    for name, path in config.models.items():
        folder = existing_folder(path)
        models[name] = ServedModel(
            name=name,
            tokenizer=Tokenizer.from_folder(folder),
            template=ChatTemplate.from_folder(folder, config.chat_template),
            created=int(time.time()),
            parse_special_tokens=config.parse_special_tokens,
        )
    return models


async def run(config: GatewayConfig) -> None:
    """Serve until told to stop, then drain. Raises NoriError when it cannot start."""
    http_socket = bind(config.host, config.ports.http, "HTTP")
    metrics_socket = bind(config.host, config.ports.metrics, "metrics")
    limits = Limits(
        max_stop_strings=config.max_stop_strings, max_logprobs=config.max_logprobs, max_prompts=config.max_prompts
    )
    backend = ClusterBackend(config.router, config.gateway_id)
    service = Service(backend, load_models(config), limits)
    groups = GroupMetrics(backend.groups, backend.router, backend.counts)
    http = HttpServer(build_app(service, config), http_socket)
    metrics = HttpServer(metrics_app([service.metrics, groups]), metrics_socket)
    await backend.start()
    grpc = await public.serve(service, config.host, config.ports.grpc, api_key=config.api_key)
    stop = Stop(config.exit_on_stdin_eof)
    await http.start()
    await metrics.start()
    announce({"event": "listening", "http": http.port, "grpc": grpc.port, "metrics": metrics.port})
    await stop.wait()
    await drain(service, 0.0 if stop.orphaned else config.drain_timeout)
    await asyncio.gather(http.stop(), metrics.stop(), grpc.stop(GRPC_GRACE))
    await backend.close()
    service.close()


async def drain(service: Service, timeout: float) -> None:
    """Refuse new calls, give running ones `timeout` seconds, then end them with an error event."""
    service.drain()
    try:
        await asyncio.wait_for(service.idle(), timeout)
    except TimeoutError:
        message = f"the gateway shut down before this answer was complete: its drain time of {timeout:g} s is over"
        service.close_all(Draining(message, retry_after=RETRY_DRAINING))


class Stop:
    """Becomes set by the first SIGTERM or SIGINT, or when stdin ends; a second signal exits at once.

    orphaned: stdin ended, so whoever started this process is gone.
    """

    def __init__(self, on_stdin_eof: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._signalled = False
        self.orphaned = False
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        if on_stdin_eof:
            threading.Thread(target=read_to_end, args=(0, self._on_eof), daemon=True).start()

    async def wait(self) -> None:
        await self._event.wait()

    def _on_signal(self) -> None:
        if self._signalled:
            os._exit(130)
        self._signalled = True
        self._event.set()

    def _on_eof(self) -> None:
        def tell() -> None:
            self.orphaned = True
            self._event.set()

        self._loop.call_soon_threadsafe(tell)


def read_to_end(descriptor: int, then: Callable[[], None]) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:
        pass  # closed is as good as ended
    then()


def announce(event: dict[str, object]) -> None:
    """One machine-readable line on stdout."""
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()

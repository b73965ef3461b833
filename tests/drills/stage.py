"""The cluster under test and the hands that a drill needs: signals, the admin plane, a second gateway."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec

from nori_cluster.cluster import processes
from nori_cluster.config import (
    CacheConfig,
    ClusterConfig,
    GatewayConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    Ports,
    RouterConfig,
    SchedulerConfig,
    SpeculativeConfig,
    encode,
)
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import GroupInfo

UP = (GroupState.READY, GroupState.BUSY)
DRAIN_TIMEOUT = 10.0  # seconds
START_TIMEOUT = 120.0
FIRST, SECOND = "first", "second"


class Missing(Exception):
    """This machine lacks a tool or a right; the message says what to install."""


@dataclass(frozen=True)
class Setting:
    """What a drill's cluster is like. blocks: of KV per group. queued: requests that may wait in the router.

    temporary: folder for Ray's session and logs. log: where every process of it writes stderr.
    host: of router, data plane and admin plane. prefix, environment: of the second gateway's command. undo: what the
    setting changed on this machine.
    """

    blocks: int = 96
    queued: int = 4096
    host: str = "127.0.0.1"
    temporary: Path | None = None
    log: Path | None = None
    second_host: str = "127.0.0.1"
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    undo: Callable[[], None] = lambda: None


SEQUENCES = 6  # of a group
GROUPS = 2


def free_ports(count: int, host: str) -> list[int]:
    """Consecutive ports that nobody holds now."""
    while True:
        with socket.create_server((host, 0)) as probe:
            first = int(probe.getsockname()[1])
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server((host, port)))
            return list(range(first, first + count))
        except (OSError, OverflowError):
            continue
        finally:
            for taken in held:
                taken.close()


class Gateway:
    """A gateway process beside the one that `nori serve` starts, as a deployment has many of them."""

    def __init__(self, config: GatewayConfig, log: IO[Any], prefix: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "nori_cluster.gateway", "--config", encode(config)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the gateway did not start (exit code {self._process.wait()})"
        host = config.host
        told = msgspec.json.decode(line)
        self.url = f"http://{host}:{told['http']}"
        self._metrics_url = f"http://{host}:{told['metrics']}/metrics"

    @property
    def pid(self) -> int:
        """`ip netns exec` becomes the command it runs."""
        return self._process.pid

    async def metrics(self) -> str:
        async with httpx.AsyncClient(timeout=5.0) as client:
            return (await client.get(self._metrics_url)).text

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Stage:
    """start, then use, then stop. One model, two groups × TP 2, two gateways."""

    def __init__(self, folder: Path, setting: Setting, rng: random.Random) -> None:
        self.rng = rng
        self.setting = setting
        self.gateways: dict[str, str] = {}  # name → URL
        self.admin_address = ""
        self.ended = False
        self._folder = folder
        self._seen: object = None  # groups, or why they could not be seen
        self._doomed: dict[str, int] = {}  # group → the engine process that must not come back
        host = setting.host
        router, admin, data = free_ports(2 + GROUPS, host)[:3]
        self._router = f"{host}:{router}"
        group = GroupConfig(
            model=ModelConfig(name="tiny", path=str(folder), dtype="float32"),
            cache=CacheConfig(num_blocks=setting.blocks),
            scheduler=SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=256),
            parallel=ParallelConfig(tensor_parallel_size=2, device="cpu", threads=1, heartbeat_timeout=3.0),
            numerics=NumericsConfig(batch_invariant=True),
            speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1),
        )
        self._config = ClusterConfig(
            group=group,
            replicas=GROUPS,
            router=RouterConfig(max_num_queued_reqs=setting.queued),
            internal_host=host,
            ports=Ports(http=0, grpc=0, router=router, dataplane=data, admin=admin, metrics=0),
            drain_timeout=DRAIN_TIMEOUT,
        )
        self._log: IO[Any] = (setting.log or folder.parent / "log").open("ab")
        self._serve: subprocess.Popen[bytes] | None = None
        self._family: set[int] = set()
        self.second: Gateway | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        environment = dict(os.environ)
        if self.setting.temporary is not None:
            environment["TMPDIR"] = str(self.setting.temporary)
        self._serve = subprocess.Popen(
            [sys.executable, "-m", "drills.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the drills, which end it in order
        )
        assert self._serve.stdin is not None
        assert self._serve.stdout is not None
        self._serve.stdin.write(encode(self._config).encode() + b"\n")
        self._serve.stdin.flush()
        line = self._serve.stdout.readline()
        assert line, f"the cluster did not start: {self.log_tail()}"
        told = msgspec.json.decode(line)
        self.admin_address, self.gateways = told["admin"], {FIRST: told["http"]}
        self.start_second()

    def start_second(self) -> None:
        """As whatever keeps a deployment's gateways alive does it."""
        if self.second is not None:
            self.second.end()
        setting = self.setting
        config = GatewayConfig(
            gateway_id=f"drill-{time.monotonic_ns()}",
            router=self._router,
            models={"tiny": str(self._folder)},
            host=setting.second_host,
            ports=Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0),
            drain_timeout=DRAIN_TIMEOUT,
        )
        self.second = Gateway(config, self._log, setting.prefix, setting.environment)
        self.gateways[SECOND] = self.second.url
        deadline = time.monotonic() + 30.0
        while not _ready(self.second.url):
            assert time.monotonic() < deadline, "the second gateway did not become ready"
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends everything, whatever state it is in; AssertionError when a process of an orderly end lives on."""
        try:
            self._end()
        finally:
            self._log.close()
            self.setting.undo()

    def _end(self) -> None:
        if self.second is not None:
            self.second.end()
        if self._serve is None:
            return
        self.remember()
        if self._serve.poll() is None:
            self._serve.terminate()
            try:
                self._serve.wait(DRAIN_TIMEOUT + 20.0)
            except subprocess.TimeoutExpired:
                self._serve.kill()
        self._serve.wait()
        left = processes.end([pid for pid in self._family if processes.is_alive(pid)], 2.0)
        for pipe in (self._serve.stdin, self._serve.stdout):
            assert pipe is not None
            pipe.close()
        assert not left or self.ended, f"processes {left} outlived the cluster"

    def remember(self) -> None:
        """The processes there are: what an end without order would leave behind."""
        assert self._serve is not None
        self._family |= set(processes.descendants(self._serve.pid))

    def exit_code(self) -> int | None:
        """Of the cluster's command; None while it runs."""
        assert self._serve is not None
        return self._serve.poll()

    def left_behind(self) -> list[int]:
        return [pid for pid in self._family if processes.is_alive(pid)]

    def log_tail(self) -> str:
        path = Path(self._log.name)
        return path.read_text(errors="replace")[-2000:] if path.is_file() else ""

    # -- hands ------------------------------------------------------------------------------------------------------

    async def groups(self) -> list[GroupInfo]:
        return list(await self.admin(lambda admin: list(admin.list_groups())))

    async def admin(self, call: Callable[[AdminClient], Any]) -> Any:
        def run() -> Any:
            with AdminClient(self.admin_address, timeout=60.0) as client:
                return call(client)

        return await asyncio.to_thread(run)

    async def drain(self, name: str, grace: float) -> None:
        """Until nothing runs in the group; it hands over what runs after `grace` seconds."""
        operation = await self.admin(lambda admin: admin.wait_operation(admin.drain(name, grace).name, grace + 30.0))
        assert operation.done, f"the drain of {name} does not end"
        assert not operation.error_code, operation.error_message

    async def somebody(self) -> GroupInfo:
        """A group that takes work."""
        return self.rng.choice([group for group in await self.groups() if group.state in UP])

    def hit(self, group: GroupInfo, pid: int, number: signal.Signals) -> None:
        """Signal a process of the group, which must be replaced for it."""
        self._doomed[group.name] = group.engine_pid
        os.kill(pid, number)

    def pids_of(self, what: str) -> list[int]:
        """Processes of the cluster of an actor class (`ray::Router` or `ray::name:Router`) or a program; in order."""
        assert self._serve is not None
        pattern = re.compile(rf"ray::(?:\S*:)?{what}\b|\S*/{what}\0")
        return sorted(pid for pid in processes.descendants(self._serve.pid) if pattern.match(_command(pid)))

    async def whole(self, timeout: float = 90.0) -> None:
        """Until every group takes work, those that were hit with new processes; a router that is being replaced is
        waited out."""
        deadline = time.monotonic() + timeout
        while not await self.is_whole():
            assert time.monotonic() < deadline, f"not whole again within {timeout:g} s: {self._seen}"
            await asyncio.sleep(0.2)
        self._doomed.clear()

    async def is_whole(self) -> bool:
        try:
            groups = self._seen = await self.groups()
        except Exception as error:  # the admin plane may be between two routers
            self._seen = error
            return False
        return all(g.state in UP and g.engine_pid not in (0, self._doomed.get(g.name)) for g in groups)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has ended meanwhile

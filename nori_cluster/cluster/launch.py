"""The composition root of a local cluster: Ray, controller, router, groups and one gateway, started and ended in order.

`Cluster.stop` leaves nothing behind: no process, no shared memory, no port, no Ray session folder.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from msgspec import structs
from ray.exceptions import GetTimeoutError, RayError

from nori_cluster.checkpoint.hf_config import read_config
from nori_cluster.checkpoint.parallel import validate_parallel
from nori_cluster.cluster import processes
from nori_cluster.cluster.actors import expected, pinned_to_this_node
from nori_cluster.cluster.controller import Controller, ControllerState
from nori_cluster.cluster.placement import check_replicas, logical_cpus
from nori_cluster.cluster.reconcile import Deaths
from nori_cluster.config import ClusterConfig, GatewayConfig, encode, resolve_device
from nori_cluster.errors import EngineFailure, NoriError

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB; no object of ours is large
# The CPUs we tell Ray are places for processes, not cores: it must neither start nor keep an idle worker for each.
QUIET_RAY = {"prestart_worker_first_driver": False, "num_workers_soft_limit": 2}
STATE_FILE = "nori-state.json"  # in the folder of the Ray session, and gone with it
LOOK_SECONDS = 0.5  # between two looks at gateway and controller
SILENT_SECONDS = 10.0  # a controller that does not answer for so long is replaced
MOST_DEATHS = 5  # of controllers, within DEATHS_SECONDS: then the cluster ends
DEATHS_SECONDS = 60.0
START_SECONDS = 900.0
STOP_SECONDS = 10.0


class Listening(msgspec.Struct, frozen=True):
    """The line a gateway prints when it can answer."""

    event: str
    http: int
    grpc: int
    metrics: int


class Cluster:
    """One local cluster. start, then wait or stop; stop may be called at any time and any number of times."""

    def __init__(self, config: ClusterConfig, *, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self.config = config
        self.http_url = self.grpc_address = self.metrics_url = self.admin_address = ""
        self.takeover_seconds = 0.0  # from the notice of a controller's loss until the next one had adopted everything
        self._on_phase = on_phase
        self._controller: Any = None
        self._controller_pid = 0
        self._deaths = Deaths(MOST_DEATHS, DEATHS_SECONDS)
        self._gateway: subprocess.Popen[bytes] | None = None
        self._ray_folder: Path | None = None
        self._ray_pids: list[int] = []  # what ray.init started; theirs are looked up when they end
        self._stopping = threading.Event()

    # -- start ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Blocks until the gateway answers. NoriError otherwise, after everything was ended again."""
        check_replicas(self.config, self.config.replicas)
        validate_parallel(read_config(Path(self.config.group.model.path)), self._size)
        try:
            self._start_ray()
            router = self._start_controller()
            self._start_gateway(router)
            self._wait_for_groups()
            self._wait_until_ready()
        except BaseException:
            self.stop(0.0)
            raise

    @property
    def _size(self) -> int:
        return self.config.group.parallel.tensor_parallel_size

    def _start_ray(self) -> None:
        self._on_phase("starting Ray")
        self._ray_folder = Path(tempfile.mkdtemp(prefix="nori-ray-"))
        logging.getLogger("ray").setLevel(logging.WARNING)  # its start-up notes say nothing to our users
        others = set(processes.descendants(os.getpid()))
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, logical_cpus(self._size)),
                _system_config=QUIET_RAY,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                namespace="nori",
                _temp_dir=str(self._ray_folder),
            )
        except Exception as error:
            raise EngineFailure(f"Ray did not start: {error}") from error
        finally:
            self._ray_pids = [pid for pid in processes.descendants(os.getpid()) if pid not in others]

    def _resolve_parallel(self) -> None:
        """Device, threads, step budget and pipeline depth become concrete: all workers share this machine."""
        parallel = self.config.group.parallel
        workers = self.config.replicas * self._size
        device = resolve_device(parallel.device, int(ray.cluster_resources().get("GPU", 0)), workers)
        threads = parallel.threads or max(1, len(os.sched_getaffinity(0)) // workers)
        group = structs.replace(
            self.config.group,
            parallel=structs.replace(parallel, device=device, threads=threads),
            scheduler=self.config.group.resolved_scheduler(device),
        )
        self.config = structs.replace(self.config, group=group)

    def _start_controller(self) -> str:
        self._on_phase("starting controller and router")
        self._resolve_parallel()
        return self._spawn_controller()

    def _spawn_controller(self) -> str:
        """The first one starts everything, a later one goes on from the state file. Returns the router's address."""
        assert self._ray_folder is not None
        actor = ray.remote(Controller).options(**pinned_to_this_node(), max_concurrency=1000)
        self._controller = actor.remote(self.config, self._ray_folder / STATE_FILE)
        self._controller_pid = self._ask("pid", timeout=60.0)
        router, self.admin_address = self._ask("start", timeout=60.0)
        return str(router)

    def _start_gateway(self, router: str) -> None:
        self._on_phase("starting gateway")
        model = self.config.group.model
        config = GatewayConfig(
            gateway_id=f"gateway-{os.getpid()}",
            router=router,
            models={model.name: model.path},
            host=self.config.host,
            ports=self.config.ports,
            chat_template=self.config.chat_template,
            drain_timeout=self.config.drain_timeout,
            api_key=self.config.api_key,
            max_logprobs=self.config.max_logprobs,
            exit_on_stdin_eof=True,
        )
        # A session of its own: Ctrl-C reaches only us, and we end it in order. Its stdin's end is our death.
        self._gateway = subprocess.Popen(
            [sys.executable, "-m", "nori_cluster.gateway", "--config", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._gateway.stdin is not None
        assert self._gateway.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing line says so
            self._gateway.stdin.write(encode(config).encode() + b"\n")
            self._gateway.stdin.flush()
        line = self._gateway.stdout.readline()
        try:
            listening = msgspec.json.decode(line, type=Listening)
        except msgspec.DecodeError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._gateway.wait(STOP_SECONDS)
            code = self._gateway.poll()
            raise EngineFailure(f"the gateway did not start (exit code {code}); its last lines say why") from error
        host = self.config.host if ":" not in self.config.host else f"[{self.config.host}]"
        reachable = "127.0.0.1" if host == "0.0.0.0" else host
        self.http_url = f"http://{reachable}:{listening.http}"
        self.grpc_address = f"{reachable}:{listening.grpc}"
        self.metrics_url = f"http://{reachable}:{listening.metrics}/metrics"

    def _wait_for_groups(self) -> None:
        """Until every group was ready once; the first start that fails ends it all."""
        wanted = self.config.replicas
        self._on_phase(f"loading {self.config.group.model.name} on {wanted} × {self._size} workers")
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            state = self.state()
            if state.first_error is not None:
                raise state.first_error
            if state.ready >= wanted:
                return
            self._check_gateway()
            self._ask("next_state", 1.0)
        raise EngineFailure(f"no group was ready after {START_SECONDS:.0f} s")

    def _wait_until_ready(self) -> None:
        """Until the gateway sees the groups through the router."""
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            self._check_gateway()
            if _ready(f"{self.http_url}/ready"):
                self._on_phase("ready")
                return
            time.sleep(0.05)
        raise EngineFailure("the gateway did not become ready within 30 s of its groups")

    def _check_gateway(self) -> None:
        assert self._gateway is not None
        if (code := self._gateway.poll()) is not None:
            raise EngineFailure(f"the gateway ended with exit code {code}")

    # -- run --------------------------------------------------------------------------------------------------------

    def state(self) -> ControllerState:
        """EngineFailure when the controller is lost or was stopped."""
        state: ControllerState = self._ask("state")
        return state

    def _ask(self, method: str, *args: Any, timeout: float = 30.0) -> Any:
        controller = self._controller
        if controller is None:
            raise EngineFailure("the cluster was stopped")
        try:
            return ray.get(getattr(controller, method).remote(*args), timeout=timeout)
        except RayError as error:
            raise expected(error, "the controller") from error

    @property
    def gateway_pid(self) -> int:
        """0 before the start and after the end."""
        return self._gateway.pid if self._gateway is not None else 0

    @property
    def ready_groups(self) -> int:
        return self.state().ready

    def wait(self) -> int:
        """Blocks until `stop`, or until the gateway is lost, or the controller too often. The exit code: 0, or 1 and a
        line in the log."""
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self.look()
            except NoriError as error:
                if self._stopping.is_set():
                    break
                log.error("%s", error)
                return 1
        return 0

    def look(self) -> None:
        """One look at gateway and controller; another controller takes over from a lost one. NoriError when the gateway
        is lost, or the controller MOST_DEATHS times in DEATHS_SECONDS."""
        self._check_gateway()
        try:
            self._ask("state", timeout=SILENT_SECONDS)
        except EngineFailure as error:
            if self._stopping.is_set():
                raise
            self._replace_controller(error)

    def _replace_controller(self, error: NoriError) -> None:
        """Groups, router and streams go on meanwhile."""
        while True:
            lost = time.monotonic()
            log.error("%s; another controller takes over", error)
            if self._deaths.too_many(lost):
                raise EngineFailure(f"the controller was lost {MOST_DEATHS} times in {DEATHS_SECONDS:g} s: {error}")
            self._end_controller()
            try:
                self._spawn_controller()
            except EngineFailure as failure:
                error = failure
                continue
            self.takeover_seconds = time.monotonic() - lost
            log.warning("another controller has taken over after %.1f s", self.takeover_seconds)
            return

    def _end_controller(self) -> None:
        """Whatever is left of it: two may never act at once."""
        with contextlib.suppress(RayError):
            ray.kill(self._controller, no_restart=True)
        processes.end([self._controller_pid] if self._controller_pid else [], 0.0)  # a stopped one hears no Ray
        self._controller_pid = 0

    # -- stop -------------------------------------------------------------------------------------------------------

    def stop(self, drain_timeout: float | None = None) -> None:
        """Gateway first (it finishes its streams within the drain timeout), then groups, router, Ray.

        An interrupted stop may be called again, with 0 to end everything at once.
        """
        self._stopping.set()
        timeout = self.config.drain_timeout if drain_timeout is None else drain_timeout
        self._stop_gateway(timeout)
        if self._controller is not None:
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get(self._controller.stop.remote(timeout), timeout=timeout + STOP_SECONDS)
            self._controller = None
        if ray.is_initialized():
            self._ray_pids = processes.families(self._ray_pids)
            ray.shutdown()
        if stubborn := processes.end(self._ray_pids, STOP_SECONDS if timeout else 2.0):
            log.warning("had to kill processes %s", stubborn)
        self._ray_pids = []
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
            self._ray_folder = None

    def _stop_gateway(self, timeout: float) -> None:
        if self._gateway is None:
            return
        if timeout:
            self._gateway.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._gateway.wait(timeout + 2.0)
        self._gateway.kill()
        self._gateway.wait()
        gateway, self._gateway = self._gateway, None
        for pipe in (gateway.stdin, gateway.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what the gateway never read
                pipe.close()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False

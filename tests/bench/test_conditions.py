"""What servers say of themselves, what the user states, what the run shows, and what stays unknown."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import msgspec
import pytest
from fakes.admin import FakeAdminBackend
from fakes.bench_runs import HOST, LOAD, run

from nori_cluster.bench.conditions import (
    Conditions,
    ask_admin,
    discover,
    measured,
    parse_devices,
    parse_stated,
    with_stated,
)
from nori_cluster.bench.environment import Device
from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.records import Slo
from nori_cluster.errors import ConfigError
from nori_cluster.rpc import admin

pytestmark = pytest.mark.unit
GPUS = msgspec.structs.replace(HOST, gpus=(Device(name="NVIDIA H200", count=4, clocks="SM up to 1980 MHz"),))


@contextmanager
def answering(pages: dict[str, Any]) -> Iterator[str]:
    """A server of fixed JSON pages."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            body = msgspec.json.encode(pages.get(self.path))
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def asked(pages: dict[str, Any], host: Any = HOST) -> Conditions:
    with answering(pages) as url:
        return discover(url, "m", grpc=False, api_key=None, admin=None, host=host)


def models(owner: str) -> dict[str, Any]:
    return {"/v1/models": {"data": [{"id": "m", "owned_by": owner}]}}


def test_vllm_says_its_version() -> None:
    found = asked({**models("vllm"), "/version": {"version": "0.32.0"}})
    assert (found.server, found.software) == ("vllm 0.32.0", {"vllm": "0.32.0"})
    assert not found.is_nori
    assert found.weights == ""


def test_llama_cpp_says_its_build_and_file() -> None:
    found = asked({**models("llamacpp"), "/props": {"build_info": "b9000-abc", "model_path": "/m/x-Q4_1.gguf"}})
    assert (found.server, found.revision) == ("llama.cpp b9000-abc", "x-Q4_1.gguf"), "no path of its machine"


def test_a_server_here_computes_on_this_processor_when_there_is_no_gpu() -> None:
    assert asked(models("x")).devices[0].name == "Fake CPU"
    assert asked(models("x")).told_by["devices"] == "this machine"
    assert asked(models("x"), GPUS).devices == (), "it may run on a GPU or not"


@pytest.mark.parametrize("pages", [{}, {"/v1/models": [1]}, {"/v1/models": {"data": ["x"]}}, {"/version": 3}])
def test_odd_servers_leave_things_unknown(pages: dict[str, Any]) -> None:
    found = asked(pages)
    assert (found.model, found.server) == ("m", "")


def test_nobody_there_is_no_error() -> None:
    assert discover("http://127.0.0.1:9", "m", grpc=False, api_key=None, admin=None, host=HOST).server == ""


class Cluster:
    """The admin plane of a fake cluster, in a loop of its own."""

    def __enter__(self) -> str:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(admin.serve(FakeAdminBackend(), "127.0.0.1", 0))
        return f"127.0.0.1:{self._server.port}"

    def __exit__(self, *_: object) -> None:
        self._run(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


def test_a_nori_cluster_tells_everything() -> None:
    with Cluster() as address:
        found = ask_admin(Conditions(model="tiny"), address, "tiny", HOST)
        gpu_host = ask_admin(Conditions(model="tiny"), address, "tiny", GPUS)
    assert found == Conditions(
        server="Nori Cluster 9.9", model="tiny", revision="0123abcd", weights="bfloat16", kv_cache="bfloat16",
        parallelism="TP 2 × 2 groups", devices=gpu_host.devices, clocks="3000 MHz",
        software={"nori-cluster": "9.9"}, flags="{}", numerics_id="a1b2c3", told_by=found.told_by,
    )  # fmt: skip
    assert found.devices[0].name == "Fake CPU"
    assert found.told_by["weights"] == "asked"


def test_another_cluster_is_refused() -> None:
    with Cluster() as address, pytest.raises(ConfigError, match="that cluster serves tiny, not 'm'"):
        ask_admin(Conditions(), address, "m", HOST)
    with pytest.raises(ConfigError, match="no admin service answers there"):
        ask_admin(Conditions(), "127.0.0.1:9", "m", HOST)


def test_what_is_stated_wins() -> None:
    stated = parse_stated(["devices=8x NVIDIA H200, 2 × B200", "software=vllm 0.32, torch 2.13", "kv-cache=fp8"])
    found = with_stated(Conditions(kv_cache="float16", told_by={"kv_cache": "asked"}), stated)
    assert found.kv_cache == "fp8"
    assert found.told_by["kv_cache"] == "stated"
    assert found.software == {"vllm": "0.32", "torch": "2.13"}
    assert [(device.name, device.count) for device in found.devices] == [("NVIDIA H200", 8), ("B200", 2)]
    assert parse_devices("AMD EPYC") == (Device(name="AMD EPYC"),)


@pytest.mark.parametrize(
    ("pair", "words"),
    [("kv", "is not key=value"), ("kv_cache= ", "is not key=value"), ("kv=1", "known are server, model, revision")],
)
def test_wrong_statements(pair: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_stated([pair])


def test_the_run_shows_tokens_per_event_and_cache_hits() -> None:
    result = run(LOAD)
    summary = summarize(result.records, LOAD, Slo(), [0.1])
    found = measured(Conditions(), result.records, summary)
    assert found.stream_interval == 1.0
    assert found.cache_state == "25.0% of the prompt tokens came from prefix caches"
    said = measured(Conditions(cache_state="off"), result.records, summary)
    assert said.cache_state == "off"
    silent = msgspec.structs.replace(summary, cached_tokens=None, output_tokens=0)
    assert measured(Conditions(), [], silent).stream_interval is None

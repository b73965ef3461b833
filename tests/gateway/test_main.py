"""The gateway process itself: its line on stdout, its exit codes, signals, and the end of stdin."""

import json
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.text import TEMPLATE, definition

from nori_cluster.config import GatewayConfig, Ports, encode

pytestmark = pytest.mark.e2e

FREE = Ports(http=0, grpc=0, router=0, dataplane=0, admin=0, metrics=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(definition())
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def run(**more: Any) -> subprocess.Popen[str]:
        fields: dict[str, Any] = {"ports": FREE, "exit_on_stdin_eof": True, "drain_timeout": 1.0, **more}
        config = GatewayConfig(gateway_id="g", router="127.0.0.1:1", models={"smol": str(folder)}, **fields)
        process = subprocess.Popen(
            [sys.executable, "-m", "nori_cluster.gateway", "--config", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(encode(config) + "\n")
        process.stdin.flush()
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def listening(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    event: dict[str, Any] = json.loads(line)
    assert set(event) == {"event", "http", "grpc", "metrics"}
    return event


def status(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_serves_without_a_router_and_ends_with_its_signal(start: Any) -> None:
    process = start()
    ports = listening(process)
    base = f"http://127.0.0.1:{ports['http']}"
    assert status(f"{base}/health")[0] == 200
    assert status(f"{base}/ready")[0] == 503
    assert status(f"{base}/v1/models")[0] == 200
    code, text = status(f"http://127.0.0.1:{ports['metrics']}/metrics")
    assert code == 200
    assert "nori_router_lost" in text
    assert 'nori_prompt_tokens_total{model_name="smol"} 0.0' in text
    socket.create_connection(("127.0.0.1", ports["grpc"]), 5).close()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_ends_with_its_parent(start: Any) -> None:
    process = start()
    listening(process)
    process.stdin.close()
    assert process.wait(10) == 0


def test_a_taken_port_is_one_clear_line(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(ports=Ports(http=port, grpc=0, metrics=0))
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert output == ""
    assert errors.splitlines()[-1].startswith(f"nori gateway: cannot listen on 127.0.0.1:{port} for HTTP")
    assert "Traceback" not in errors


def test_a_bad_config_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nori_cluster.gateway", "--config", '{"gateway_id": 5}'],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("nori gateway: --config:")
    assert len(done.stderr.splitlines()) == 1


def test_the_file_limit_is_raised_and_never_lowered() -> None:
    code = "import resource as r; from nori_cluster.gateway.main import raise_file_limit as f; f(); f();"
    code += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    for soft, hard, after in ((256, 4096, 4096), (1000, 1000, 1000)):

        def limit(soft: int = soft, hard: int = hard) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=limit
        )
        assert done.stdout.split() == [str(after), str(hard)]


def test_f46_a_signal_while_it_starts_ends_it_with_0() -> None:
    code = "import nori_cluster.gateway.main as m; print(flush=True); m.main(['--config', '-'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)  # it waits for its config now
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=2)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize("plane", ["grpc", "metrics"])
def test_f42_a_busy_port_ends_the_start_with_a_line_that_names_it(start: Any, plane: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(ports=Ports(**{"http": 0, "grpc": 0, "metrics": 0, plane: port}))
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(f"nori gateway: cannot listen on 127.0.0.1:{port} for ")
    assert "Traceback" not in errors


def test_f42_gateways_started_at_one_moment_get_ports_of_their_own(start: Any) -> None:
    events = [listening(process) for process in [start() for _ in range(4)]]
    ports = [event[plane] for event in events for plane in ("http", "grpc", "metrics")]
    assert len(set(ports)) == len(ports)

"""`nori serve` and `nori demo` around a fake cluster: order of work, signals, banner, errors."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.launch import FakeCluster
from fakes.openai_server import FakeOpenAIServer

from nori_cluster.cli import running
from nori_cluster.cli.main import main
from nori_cluster.registry import Registry

pytestmark = pytest.mark.unit
FREE = ["--port", "0", "--grpc-port", "0", "--router-port", "0"]
FREE += ["--admin-port", "0", "--metrics-port", "0", "--data-plane-port", "0"]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[FakeCluster]]:
    class Fresh(FakeCluster):
        journal = []  # noqa: RUF012
        configs = []  # noqa: RUF012

    monkeypatch.setattr(running, "LAUNCHERS", Registry("launcher", {"local": "fakes.launch:Patched"}))
    monkeypatch.setattr("fakes.launch.Patched", Fresh, raising=False)
    monkeypatch.setattr(running, "pull", lambda source, console: tmp_path / source)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Fresh
    for number, handler in handlers.items():
        signal.signal(number, handler)


def kill(number: int) -> int:
    os.kill(os.getpid(), number)
    raise AssertionError("the signal did not interrupt")


def test_serve_starts_waits_and_stops(fake: type[FakeCluster], tmp_path: Path) -> None:
    assert main(["serve", "smollm2-135m", *FREE, "-tp", "3", "--dtype", "float32", "--drain-timeout", "2"]) == 0
    assert fake.journal == ["start", "wait", "stop 2"]
    group = fake.configs[0].group
    assert (group.model.name, group.model.path) == ("smollm2-135m", str(tmp_path / "smollm2-135m"))
    assert (group.parallel.tensor_parallel_size, group.model.dtype) == (3, "float32")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_drains(fake: type[FakeCluster], number: int, capsys: pytest.CaptureFixture[str]) -> None:
    fake.on_wait = staticmethod(lambda: kill(number))
    assert main(["serve", "m", *FREE]) == 0
    assert fake.journal == ["start", "wait", "stop 30"]
    assert "Ctrl-C again" in capsys.readouterr().err


def test_nohup_is_respected(fake: type[FakeCluster]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fake.on_wait = staticmethod(lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert main(["serve", "m", *FREE]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_stops_at_once(fake: type[FakeCluster]) -> None:
    fake.on_wait = staticmethod(lambda: kill(signal.SIGINT))
    fake.on_drain = staticmethod(lambda: kill(signal.SIGINT))  # type: ignore[assignment]
    assert main(["serve", "m", *FREE]) == 130
    assert fake.journal == ["start", "wait", "stop 30", "stop 0"]


def test_a_failed_start_is_one_line_and_stops_what_runs(
    fake: type[FakeCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fail_start = True
    assert main(["serve", "m", *FREE]) == 1
    assert fake.journal == ["start", "stop 30"]
    assert capsys.readouterr().err.splitlines()[-1] == "nori: group 0 ended while it loaded: rank 1 was killed"


def test_the_exit_code_of_a_broken_cluster_is_passed_on(fake: type[FakeCluster]) -> None:
    fake.on_wait = staticmethod(lambda: 7)
    assert main(["serve", "m", *FREE]) == 7


def test_wrong_flags_start_nothing(fake: type[FakeCluster], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--dtype", "float8"]) == 2
    assert main(["serve"]) == 2
    assert main(["serve", "m", "--max-model-len", "long"]) == 2
    assert main(["serve", "m", "--no-such-flag"]) == 2
    assert fake.journal == []
    err = capsys.readouterr().err
    assert err.count("\n") == 4
    assert "Traceback" not in err


def test_demo_asks_through_the_gateway_then_serves(fake: type[FakeCluster], capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer(("Pa", "ris.")) as gateway:
        fake.url = gateway.url
        assert main(["demo", *FREE]) == 0
    out = capsys.readouterr().out
    assert "Paris.\nTTFT" in out
    assert out.index("TTFT") < out.index("curl")
    assert gateway.bodies[0]["model"] == "smollm2-135m"
    assert gateway.bodies[0]["stream"] is True
    assert fake.journal == ["start", "wait", "stop 30"]


def test_demo_stops_the_cluster_when_the_question_fails(fake: type[FakeCluster]) -> None:
    with FakeOpenAIServer() as gateway:
        fake.url, gateway.error = gateway.url, "worker group lost"
        assert main(["demo", *FREE]) == 1
    assert fake.journal == ["start", "stop 30"]


def test_the_curl_line_of_the_banner_is_valid(fake: type[FakeCluster], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "it's a model", *FREE, "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    words = shlex.split(next(line for line in out.splitlines() if line.strip().startswith("curl")))
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    assert "Authorization: Bearer $NORI_API_KEY" in words
    assert "chat --url http://127.0.0.1:8000" in out  # --port was not the default, so the line must say where
    assert "status --admin 127.0.0.1:8001" in out


@pytest.mark.parametrize(("called", "where"), [(".venv/bin/nori", ", in this folder"), ("/opt/x/bin/nori", "")])
def test_the_banner_says_where_its_commands_work(
    fake: type[FakeCluster],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    called: str,
    where: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [called])
    assert main(["serve", str(tmp_path), *FREE]) == 0
    out = capsys.readouterr().out
    assert f"From another terminal{where}:\n" in out
    assert f"  {called} chat" in out

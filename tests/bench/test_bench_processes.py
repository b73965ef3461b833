"""Servers and engines as real processes: started, waited for, measured, ended whole; a load that reproduces or not."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from fakes.bench_servers import plan_file, server
from fakes.checkpoints import make_tiny_llama

from nori_cluster.bench.inprocess import StartFailed, StartJob, startup
from nori_cluster.bench.peer_process import Server, ServerFailed
from nori_cluster.cli.main import main
from nori_cluster.cli.running import interrupt

pytestmark = pytest.mark.e2e


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# -- one server ------------------------------------------------------------------------------------------------------


def test_a_server_is_started_and_ended_with_its_stubborn_child() -> None:
    given = server("a", 100.0, "child")
    with Server("a", [sys.executable, *given["command"][1:]], {}) as started:
        assert started.start(given["ready"], 20.0) > 0
        child = httpx.get(given["ready"]).json()["child"]
        assert alive(child)
        started.stop(grace=1.0)
        assert not alive(child)
    with pytest.raises(httpx.ConnectError):
        httpx.get(given["ready"])


def test_an_interrupt_while_it_ends_leaves_nothing() -> None:
    """The second Ctrl-C cuts the grace short."""
    given = server("a", 100.0, "child")
    with Server("a", [sys.executable, *given["command"][1:]], {}) as started:
        started.start(given["ready"], 20.0)
        child = httpx.get(given["ready"]).json()["child"]
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(KeyboardInterrupt):
                started.stop(grace=60.0)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert not alive(child)


def test_others_are_left_alone() -> None:
    """A process of ours that is no server, in our own session, lives on."""
    given = server("a", 100.0)
    with Server("other", [sys.executable, "-c", "import time; time.sleep(60)"], {}) as other:
        with pytest.raises(ServerFailed, match=r"was not ready after 0\.3 s: it said nothing"):
            other.start("http://127.0.0.1:9", 0.3)
        with Server("a", [sys.executable, *given["command"][1:]], {}) as started:
            started.start(given["ready"], 20.0)
        assert other._left(), "ending one server ended another"


def test_what_a_server_said_is_told() -> None:
    given = server("a", 100.0, "die")
    with Server("a", [sys.executable, *given["command"][1:]], {}) as started, pytest.raises(ServerFailed) as caught:
        started.start(given["ready"], 20.0)
    assert caught.value.message == "a ended with code 3 before it was ready: no such model"
    with Server("b", ["/nowhere/server"], {}) as absent, pytest.raises(ServerFailed, match="No such file"):
        absent.start(given["ready"], 1.0)


def test_a_taken_port_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        Server("a", [sys.executable], {}) as started,
        pytest.raises(ServerFailed, match=r"something listens at .* already"),
    ):
        started.start(f"http://127.0.0.1:{taken.getsockname()[1]}/health", 1.0)


# -- the verbs ---------------------------------------------------------------------------------------------------------


def test_the_verb_measures_two_servers_and_keeps_the_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    broken = server("broken", 1.0, "die", info={"weights": "q4"})
    file = plan_file(tmp_path, server("nori", 400.0), [server("slow", 8.0), broken], rounds=2)
    assert main(["bench", "peers", str(file), "--out", str(tmp_path / "results"), "--concurrency", "2"]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    told = capfd.readouterr()
    line = json.loads(told.out.splitlines()[-1])
    kept = Path(line["kept"])
    assert kept.name == f"{line['time'][:10]}-peers.json"
    assert json.loads(kept.read_text())["best_peer_ratio"] == line["best_peer_ratio"]
    assert line["best_peer_ratio"]["c2"] > 1.5
    assert line["servers"][1]["conditions"]["server"] == "someone"
    assert line["servers"][2]["info"] == {"weights": "q4"}
    assert [len(s["startup_s"]) for s in line["servers"]] == [2, 2, 0]
    assert line["servers"][2]["failure"] == "round 1: broken ended with code 3 before it was ready: no such model"
    assert any("broken: round 1" in why for why in line["invalid_because"])
    assert "ours / slow" in told.err


def test_a_load_reproduces_on_the_same_server_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = server("a", 50.0)
    load = ["-c", "2", "-n", "24", "--input", "8", "--output", "5", "--rounds", "3"]
    kept = str(tmp_path / "report")
    with Server("a", [sys.executable, *given["command"][1:]], {}) as started:
        started.start(given["ready"], 20.0)
        assert main(["bench", "serve", "--url", given["url"], *load, "--out", kept, "--json"]) == 0
        line = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert line["metrics"]["tpot_p50"] == pytest.approx(20.0, rel=0.3)
        assert "24 completed requests, fewer than 100" in line["invalid_because"]
        assert main(["bench", "verify", kept, "--rounds", "1"]) == 0
        told = capfd.readouterr()
        assert json.loads(told.out.splitlines()[-1])["verification"]["reproduces"]
        assert "it reproduces" in told.err
        assert "warning: the report is not valid: 24 completed requests" in told.err
    slow = server("b", 10.0)
    with Server("b", [sys.executable, *slow["command"][1:]], {}) as started:
        started.start(slow["ready"], 20.0)
        assert main(["bench", "verify", kept, "--url", slow["url"], "--rounds", "1", "--json"]) == 1
        found = json.loads(capfd.readouterr().out.splitlines()[-1])["verification"]
        assert any(why.startswith("tpot_p50 is ") and "worse" in why for why in found["because"])
    assert main(["bench", "verify", kept]) == 1
    assert "nothing answers at" in capfd.readouterr().err


def test_a_sweep_of_a_real_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = server("a", 50.0)
    load = ["--by", "concurrency", "--highest", "2", "--duration", "1", "--input", "8", "--output", "4"]
    bounds = ["--ttft-p99", "5s", "--tpot-p99", "2s"]
    with Server("a", [sys.executable, *given["command"][1:]], {}) as started:
        started.start(given["ready"], 20.0)
        words = [
            "bench",
            "sweep",
            "--url",
            given["url"],
            *load,
            *bounds,
            "--rounds",
            "2",
            "--out",
            str(tmp_path / "out"),
        ]
        assert main(words) == 0
    told = capfd.readouterr()
    line = json.loads(told.out.splitlines()[-1])
    assert (line["kind"], line["sweep"]["best"], line["sweep"]["next"]) == ("sweep", 2.0, None)
    assert [point["value"] for point in line["sweep"]["points"]] == [1.0, 2.0]
    assert line["load"]["concurrency"] == 2
    assert line["slo"] == {"ttft": 5000.0, "tpot": 2000.0, "e2e": None}
    assert len(line["rounds"]) == 2
    assert "concurrency 2: " in told.err
    assert "Frontier" in (tmp_path / "out/report.html").read_text()


# -- fresh processes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def test_a_start_has_phases(folder: Path) -> None:
    (metrics,), last = startup(StartJob(model=str(folder), settings={"threads": 1, "device": "cpu"}, input=4), 1)
    phases = ("process", "import", "load", "first_token")
    assert metrics["total_ms"] == pytest.approx(sum(metrics[f"{phase}_ms"] for phase in phases))
    assert all(metrics[f"{phase}_ms"] > 0 for phase in phases)
    assert metrics["load/loading_weights_ms"] < metrics["load_ms"]
    assert last.spec.dtype == "float32"


def test_a_failed_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"ended with code 1: .*nowhere"):
        startup(StartJob(model=str(tmp_path / "nowhere"), settings={}, input=4), 1)

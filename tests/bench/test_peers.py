"""`nori bench peers` with tiny programs as servers: turns, ratios, what is left out, that nothing stays behind."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fakes.bench_runs import HOST, TREE, run

from nori_cluster.bench import peers
from nori_cluster.bench.peer_process import Server, ServerFailed
from nori_cluster.bench.peers import Load, Measured, Peer, Plan, measure, missing_program, read_plan, result
from nori_cluster.bench.records import LoadSpec
from nori_cluster.bench.runner import LoadResult
from nori_cluster.cli.main import main
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit
FAKE = str(Path(__file__).with_name("fake_peer.py"))
EXAMPLE = Path(__file__).parents[2] / "bench/peers.yaml"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def server(name: str, rate: float, *words: str, **changes: Any) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["${python}", FAKE, str(port), str(rate), *words]
    return {"name": name, "command": command, "ready": f"{url}/health", "url": url, "start_timeout": 20.0, **changes}


def plan_file(folder: Path, ours: dict[str, Any], others: list[dict[str, Any]], **changes: Any) -> Path:
    load = {"concurrency": [1, 2], "input": 8, "output": 4, "requests_per_client": 1, "min_requests": 2, "warmup": 1}
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump({"ours": ours, "peers": others, "load": load, "rounds": 2, **changes}))
    return path


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


# -- turns and ratios ------------------------------------------------------------------------------------------------


def test_servers_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns: list[str] = []

    class Recorded(Server):
        def start(self, ready: str, timeout: float) -> float:
            turns.append(self._name)
            return 1.0

    monkeypatch.setattr(peers, "Server", Recorded)
    monkeypatch.setattr(peers, "busy_share", lambda: 0.0)
    rates = {"http://a": 10.0, "http://b": 8.0, "http://c": 5.0}
    seeds: dict[str, list[int]] = {}

    def send(url: str, model: str | None, load: LoadSpec) -> LoadResult:
        seeds.setdefault(url, []).append(load.seed)
        return run(LoadSpec(arrival="constant", rate=rates[url] * load.concurrency, requests=50))

    each = [Peer(name=url[-1], command=[sys.executable], ready=url, url=url) for url in rates]
    absent = Peer(name="d", command=["no-such-program"], ready="http://d", url="http://d", install="build it")
    plan = Plan(ours=each[0], peers=[*each[1:], absent], load=Load(concurrency=(1, 8)), rounds=3)
    found = measure(plan, send)
    assert turns == ["a", "b", "c"] * 3
    assert seeds["http://a"] == seeds["http://b"] == [1, 8, 1001, 1008, 2001, 2008]
    values = result(plan, found, time="now", host=HOST, tree=TREE, source="f")
    assert values["best_peer_ratio"].keys() == {"c1", "c8"}
    assert values["ratios"]["c1"]["peer"] == "b"
    assert values["best_peer_ratio"]["c1"] == pytest.approx(1.2, abs=0.03)
    assert values["ratios"]["c1"]["lowest"] <= values["ratios"]["c1"]["ratio"] <= values["ratios"]["c1"]["highest"]
    assert values["not_installed"] == [{"name": "d", "why": "no-such-program is not installed", "install": "build it"}]
    assert values["invalid_because"] == []
    assert len(values["servers"][0]["cells"]["c8"]["output_tok_s"]) == 3


def test_without_peers_there_is_no_ratio() -> None:
    ours = Peer(name="nori", command=[sys.executable], ready="http://a", url="http://a")
    values = result(Plan(ours=ours), [Measured(peer=ours, command=["x"])], time="now", host=HOST, tree=TREE, source="f")
    assert values["best_peer_ratio"] == {"c1": None, "c8": None, "c32": None}
    assert "no peer is installed: there is nothing to compare with" in values["invalid_because"]


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
    assert kept.name == time.strftime("%Y-%m-%d-peers.json", time.gmtime()) or kept.name.endswith("-peers.json")
    assert json.loads(kept.read_text())["best_peer_ratio"] == line["best_peer_ratio"]
    assert line["best_peer_ratio"]["c2"] > 1.5
    assert line["servers"][1]["conditions"]["server"] == "someone"
    assert line["servers"][2]["info"] == {"weights": "q4"}
    assert [len(s["startup_s"]) for s in line["servers"]] == [2, 2, 0]
    assert line["servers"][2]["failure"] == "round 1: broken ended with code 3 before it was ready: no such model"
    assert any("broken: round 1" in why for why in line["invalid_because"])
    assert "ours / slow" in told.err


# -- the file --------------------------------------------------------------------------------------------------------


def test_the_example_is_readable() -> None:
    plan = read_plan(EXAMPLE)
    assert [peer.name for peer in plan.peers] == ["llama.cpp", "vllm"]
    assert plan.load.concurrency == (1, 8, 32)
    assert missing_program(plan.ours) == ""
    assert all(peer.install for peer in plan.peers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "no peers file"),
        ("peers: []", "missing required field `ours`"),
        ("ours: {name: a, command: [], ready: r, url: u}", "a server has no command"),
        ("ours: {name: a, command: [x], ready: r, url: u, port: 1}", "unknown field `port`"),
        (
            "ours: &a {name: a, command: [x], ready: r, url: u}\npeers: [*a]",
            "several servers are called a",
        ),
        ("ours: {name: a, command: [x], ready: r, url: u}\nrounds: 0", "must be at least 1"),
    ],
)
def test_bad_files(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_plan(tmp_path / "p.yaml")


def test_variables_in_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER_PROGRAM", sys.executable)
    given = Peer(name="a", command=["${PEER_PROGRAM}", "-m", "${python}"], ready="r", url="u")
    assert peers.filled(given) == [sys.executable, "-m", sys.executable]
    unset = Peer(name="a", command=["${NO_SUCH_PEER_VARIABLE}/x"], ready="r", url="u")
    assert missing_program(unset) == "${NO_SUCH_PEER_VARIABLE}/x names an environment variable that is not set"


def test_a_peer_that_is_not_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = plan_file(tmp_path, server("nori", 1.0), [server("slow", 1.0)])
    assert main(["bench", "peers", str(file), "--only", "quick"]) == 2
    assert "--only quick: the file has slow" in capsys.readouterr().err

"""`nori bench peers` with tiny programs as servers: turns, ratios, what is left out, that nothing stays behind."""

import sys
from pathlib import Path

import pytest
from fakes.bench_runs import HOST, TREE, run
from fakes.bench_servers import plan_file, server

from nori_cluster.bench import peers
from nori_cluster.bench.peer_process import Server
from nori_cluster.bench.peers import Load, Measured, Peer, Plan, measure, missing_program, read_plan, result
from nori_cluster.bench.records import LoadSpec
from nori_cluster.bench.runner import LoadResult
from nori_cluster.cli.main import main
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit
EXAMPLE = Path(__file__).parents[2] / "bench/peers.yaml"


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

    each = [Peer(name=url[-1], command=["${python}"], ready=url, url=url) for url in rates]
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
    assert values["servers"][0]["command"] == ["${python}"], "as the file has it"
    assert len(values["servers"][0]["cells"]["c8"]["output_tok_s"]) == 3


def test_without_peers_there_is_no_ratio() -> None:
    ours = Peer(name="nori", command=[sys.executable], ready="http://a", url="http://a")
    values = result(Plan(ours=ours), [Measured(peer=ours, command=["x"])], time="now", host=HOST, tree=TREE, source="f")
    assert values["best_peer_ratio"] == {"c1": None, "c8": None, "c32": None}
    assert "no peer is installed: there is nothing to compare with" in values["invalid_because"]


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

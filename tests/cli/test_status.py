"""`nori status` and `nori drain` against a real admin server over a fake backend."""

import json

import pytest
from fakes.admin import FakeAdminBackend

from nori_cluster.cli import status
from nori_cluster.cli.main import main

pytestmark = pytest.mark.unit


def test_table(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--admin", address]) == 0
    out = capsys.readouterr().out
    for words in (
        "9.9",
        "42.5 tokens/s",
        "1/2 ready",
        "tiny-0",
        "busy",
        "stalled",
        "25%",
        "3999",
        "4001",
        "rank 1 [cpu]",
        "tiny-0: lost 1 times, restarted on purpose 3 times",
        "the controller was replaced 2 times",
    ):
        assert words in out, words


def test_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--admin", address, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens_per_second"] == 42.5
    assert shown["models"][0]["ready_groups"] == 1
    assert shown["gateways"][0]["open_requests"] == 6
    first, second = shown["groups"]
    assert (first["state"], second["state"]) == ("busy", "stalled")
    assert first["engine_pid"] == 3999
    assert [worker["pid"] for worker in first["workers"]] == [4000, 4001]
    assert first["load"]["kv_cache_usage"] == 0.25
    assert second["last_failure"] == "rank 1 [cpu] was killed"
    assert (first["incarnation"], first["failures"], first["restarts"]) == (2, 1, 3)
    assert (shown["controller_restarts"], shown["router_restarts"]) == (2, 0)


def test_watch_looks_until_interrupted(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(looks, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert main(["status", "--admin", address, "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["version"] for line in lines] == ["9.9"] * 3


def test_watch_into_a_pipe_prints_every_look(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert main(["status", "--admin", address, "--watch"]) == 0
    assert capsys.readouterr().out.count("Nori Cluster") == 3


@pytest.mark.parametrize("verb", [["status"], ["status", "--watch", "--json"], ["drain", "tiny-0"]])
def test_nothing_listens(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--admin", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "no cluster at 127.0.0.1:1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:port", ":8001", "127.0.0.1:70000"])
def test_a_wrong_address_is_usage(address: str) -> None:
    assert main(["status", "--admin", address]) == 2


def test_resume_and_events(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "tiny-0", "--admin", address]) == 0
    assert capsys.readouterr().out == "tiny-0 is busy\n"
    assert main(["resume", "nobody", "--admin", address]) == 1
    assert "there is no group" in capsys.readouterr().err
    assert main(["events", "--admin", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("tiny-1 #2  lost      rank 1 (pid 7) is gone")
    assert lines[1].endswith("tiny-1 #2  starting")
    assert main(["events", "--json", "--admin", address]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["kind"], first["group"], first["incarnation"]) == ("lost", "tiny-1", 2)


def test_drain_waits(address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "tiny-0", "--grace", "1.5", "--admin", address]) == 0
    assert backend.drains == [("tiny-0", 1.5)]
    assert capsys.readouterr().out == "tiny-0 is drained\n"


def test_drain_without_waiting(address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "tiny-0", "--no-wait", "--admin", address]) == 0
    assert backend.drains == [("tiny-0", None)]
    assert capsys.readouterr().out == "tiny-0 is draining\n"


def test_drain_of_an_unknown_group_and_a_failed_drain(
    address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "nope", "--admin", address]) == 1
    assert "nope" in capsys.readouterr().err
    backend.error_code = 13
    assert main(["drain", "tiny-1", "--admin", address]) == 1
    assert "lost while draining" in capsys.readouterr().err

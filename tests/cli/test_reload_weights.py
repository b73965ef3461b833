"""`nori reload-weights` against a real admin server over a fake backend."""

import json
from pathlib import Path

import pytest
from fakes.admin import FakeAdminBackend

from nori_cluster.cli.main import main

pytestmark = pytest.mark.unit


def test_every_option_reaches_the_cluster(
    address: str,
    backend: FakeAdminBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    folder = str(tmp_path / "new")
    assert main(["reload-weights", "tiny", "new", "--admin", address]) == 0
    assert capsys.readouterr().out == f"every group of tiny holds the weights of {folder}\n"
    options = ["--in-flight-policy", "abort", "--weight-version", "b", "--max-unavailable", "2", "--grace", "3"]
    assert main(["reload-weights", "tiny", folder, *options, "--json", "--admin", address]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "reload-tiny"
    assert main(["reload-weights", "tiny", folder, "--in-flight-policy", "continue", "--admin", address]) == 0
    assert backend.asked == [
        ("reload", "tiny", folder, "", "wait", 1, None),
        ("reload", "tiny", folder, "b", "abort", 2, 3.0),
        ("reload", "tiny", folder, "", "continue", 1, None),
    ]


def test_without_waiting(
    address: str, backend: FakeAdminBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload-weights", "tiny", str(tmp_path), "--no-wait", "--admin", address]) == 0
    assert "is loading the weights of" in capsys.readouterr().out
    assert backend.looks == 0


def test_a_failure_is_told(
    address: str, backend: FakeAdminBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.error_code = 13
    assert main(["reload-weights", "tiny", str(tmp_path), "--admin", address]) == 1
    assert "the reload of tiny failed: lost while draining" in capsys.readouterr().err


def test_wrong_usage(address: str, backend: FakeAdminBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload-weights", "tiny", "/nowhere/at/all", "--admin", address]) == 2
    assert "'/nowhere/at/all' does not exist" in capsys.readouterr().err
    assert main(["reload-weights", "tiny", "/", "--in-flight-policy", "hope", "--admin", address]) == 2
    assert backend.asked == []

"""The `nori` command itself: help, exit codes, what it must not import."""

import json
import subprocess
import sys

import pytest

from nori_cluster.cli import main as command
from nori_cluster.cli.main import SUMMARIES, VERBS, main
from nori_cluster.errors import CheckpointError
from nori_cluster.version import __version__

pytestmark = pytest.mark.unit


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == __version__ + "\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(VERBS) == list(SUMMARIES)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"Usage: nori {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "Did you mean"),
        (["version", "--foo"], "nori version --help"),
        (["chat", "a", "b"], "unexpected extra"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [CheckpointError("a.safetensors: cut\nshort"), RuntimeError("a bug")])
def test_errors_are_one_line_unless_debug(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise error

    app = command.typer.Typer()
    app.command()(broken)
    monkeypatch.setattr("fakes.broken_verb", app, raising=False)
    monkeypatch.setitem(command.VERBS._targets, "version", "fakes:broken_verb")
    monkeypatch.delenv("NORI_DEBUG", raising=False)
    assert main(["version"]) == 1
    quiet = capsys.readouterr().err
    assert quiet.count("\n") == 1
    assert str(error).split()[-1] in quiet
    assert main(["version", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_command_line_loads_nothing_heavy() -> None:
    """`nori --help`, `nori version` and `nori serve --help` answer at once: neither torch nor Ray is imported."""
    code = "import sys; from nori_cluster.cli.main import main; main(sys.argv[1:]); sys.stderr.write(repr(sorted("
    code += "{'torch', 'ray', 'grpc', 'transformers'} & set(sys.modules))))"
    for arguments in (["version"], ["--help"], ["serve", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stderr == "[]"

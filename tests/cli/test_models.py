"""`nori models` on folders that the test makes."""

import json
from pathlib import Path

import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.gguf_files import QUANT, random_llama, write_llama

from nori_cluster.cli.main import main
from nori_cluster.cli.models import size

pytestmark = pytest.mark.contract


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NORI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_list_without_and_with_a_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["models", "list"]) == 0
    assert "nori models pull smollm2-135m" in capsys.readouterr().out
    folder = home / "models" / "tiny"
    folder.mkdir(parents=True)
    make_tiny_llama(folder)
    assert main(["models", "list"]) == 0
    assert "tiny" in capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["architecture"], model["problem"]) == ("tiny", "LlamaForCausalLM", "")


def test_verify_says_what_is_wrong_and_exits_with_1(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_tiny_llama(folder)
    assert main(["models", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("  ok\n")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["models", "verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert "model.safetensors" in report["problems"][0]
    assert main(["models", "pull", str(folder)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_pull_of_a_folder_is_the_folder(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_tiny_llama(folder)
    assert main(["models", "pull", str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder.resolve()
    assert not (home / "models").exists()


def test_convert_refuses_a_full_folder_and_what_is_no_gguf(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model")
    assert main(["models", "convert", str(junk), str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["models", "convert", str(junk), str(tmp_path / "out")]) == 1
    assert "junk.gguf" in capsys.readouterr().err
    assert main(["models", "convert", str(junk), str(junk / "below")]) == 1
    assert f"cannot write {junk / 'below'}: File exists" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convert_writes_a_checkpoint(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_llama(tmp_path / "tiny.gguf", random_llama(), QUANT.Q8_0), tmp_path / "new" / "out"
    assert main(["models", "convert", str(source), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(source), "folder": str(out)}
    assert main(["models", "verify", str(out)]) == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (270_625_111, "270.6 MB"), (2 * 10**15, "2000.0 TB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text

"""`nori serve` and `nori models` refuse a model that is not served with one line, before a cluster is made."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import make_tiny_llama
from fakes.launch import FakeCluster

from nori_cluster.cli import running
from nori_cluster.cli.main import main
from nori_cluster.registry import Registry

pytestmark = pytest.mark.contract
FREE = ["--port", "0", "--grpc-port", "0", "--router-port", "0"]
FREE += ["--admin-port", "0", "--metrics-port", "0", "--data-plane-port", "0"]
COMMANDS = [["serve", *FREE], ["models", "verify"], ["models", "verify", "--json"], ["models", "pull"]]
LIST = "supported: Gemma2ForCausalLM, Gemma3ForCausalLM, "
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MambaForCausalLM"]}, "unknown model architecture 'MambaForCausalLM'; "),
    (
        {"architectures": ["GptOssForCausalLM"], "num_attention_heads": 8},
        "model architecture 'GptOssForCausalLM' is not served (attention sinks and MXFP4 experts); ",
    ),
    (
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"hidden_size": 8}},
        "model architecture 'LlavaForConditionalGeneration' is not served (images); ",
    ),
]


@pytest.fixture(autouse=True)
def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeCluster]:
    class Fresh(FakeCluster):
        journal = []  # noqa: RUF012
        configs = []  # noqa: RUF012

    monkeypatch.setenv("NORI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(running, "LAUNCHERS", Registry("launcher", {"local": "fakes.launch:Patched"}))
    monkeypatch.setattr("fakes.launch.Patched", Fresh, raising=False)
    return Fresh


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_an_architecture_is_refused_with_the_list(
    tmp_path: Path,
    clusters: type[FakeCluster],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    config: dict[str, Any],
    message: str,
) -> None:
    """Whatever else its config.json says or lacks, and without weights."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*command, str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"nori: {message}{LIST}")
    assert clusters.configs == []


@pytest.mark.parametrize("command", COMMANDS[::3], ids=" ".join)
@pytest.mark.parametrize(
    ("config", "code", "key"),
    [({"hidden_act": "gelu"}, 1, "hidden_act"), ({"quantization_config": {"quant_method": "banana"}}, 2, "banana")],
)
def test_a_setting_is_refused_by_name(
    tmp_path: Path,
    clusters: type[FakeCluster],
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    config: dict[str, Any],
    code: int,
    key: str,
) -> None:
    folder = make_tiny_llama(tmp_path / "m", config=config)
    assert main([*command, str(folder)]) == code
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert key in error
    assert clusters.configs == []


def test_verify_lists_a_setting_among_the_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path / "m", config={"hidden_act": "gelu"})
    assert main(["models", "verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (problem,) = report["problems"]
    assert "hidden_act 'gelu' is not supported for Llama" in problem


def test_what_is_served_starts(tmp_path: Path, clusters: type[FakeCluster]) -> None:
    folder = make_tiny_llama(tmp_path / "m")
    assert main(["serve", str(folder), *FREE]) == 0
    assert [config.group.model.path for config in clusters.configs] == [str(folder)]

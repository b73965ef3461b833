"""Other weights in a loaded worker: what it says after is what a fresh start says, and nothing else can be loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.checkpoints import make_tiny_llama, write_weights
from fakes.engine import Engine
from safetensors.torch import load_file, save_file

from nori_cluster.config import ModelConfig, NumericsConfig
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import CheckpointError, ConfigError
from nori_cluster.types import RowSampling

pytestmark = pytest.mark.contract
PROMPT = tuple(range(5, 75))  # four full blocks and some


def ask(key: int) -> SequenceRequest:
    return SequenceRequest(
        key=key,
        prompt_token_ids=PROMPT,
        sampling=RowSampling(temperature=1.0, top_p=1.0, top_k=0, seed=3, candidate=0),
        max_tokens=20,
        ignore_eos=True,
    )


def renew(engine: Engine, folder: Path, version: str = "2") -> None:
    executor = engine.core.executor
    spec = executor.reload(ModelConfig(name="tiny", path=str(folder), dtype="float32", weight_version=version))
    engine.scheduler.renew(spec)
    engine.scheduler.check()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "old", shards=2)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_after_a_reload_are_those_of_a_fresh_start(tmp_path: Path, invariant: bool, tied: bool) -> None:
    numerics = NumericsConfig(batch_invariant=invariant)
    old = make_tiny_llama(tmp_path / "old", tied=tied, shards=2)
    new = make_tiny_llama(tmp_path / "new", tied=tied, seed=1)
    fresh = Engine(new, numerics=numerics)
    wanted, before = fresh.run(ask(1))[1], Engine(old, numerics=numerics).run(ask(1))[1]
    engine = Engine(old, numerics=numerics)
    first = engine.scheduler.spec
    assert engine.run(ask(1))[1] == before != wanted
    renew(engine, new)
    assert engine.run(ask(2))[2] == wanted
    assert engine.cached[2] == 0, "blocks of the old weights were used"
    assert engine.run(ask(3))[3] == wanted
    assert engine.cached[3] == 64
    spec = engine.scheduler.spec
    assert (first.weight_version, spec.weight_version) == ("1", "2")
    assert spec.numerics_id == fresh.scheduler.spec.numerics_id != first.numerics_id
    assert len({spec.weights_id, first.weights_id, fresh.scheduler.spec.weights_id}) == 3
    renew(engine, old, "1")
    assert engine.run(ask(4))[4] == before
    assert engine.scheduler.spec == first


def test_the_old_folder_need_not_be_there_any_more(tmp_path: Path, old: Path) -> None:
    new = make_tiny_llama(tmp_path / "new", seed=1, shards=2)
    engine = Engine(old)
    shutil.rmtree(old)
    renew(engine, new)
    assert engine.run(ask(1)) == Engine(new).run(ask(1))


def test_the_index_forgets_what_it_held_and_says_so(tmp_path: Path, old: Path) -> None:
    engine = Engine(old)
    engine.run(ask(1))
    index = engine.scheduler.pool.index
    held = len(index)
    spec = msgspec.structs.replace(engine.scheduler.spec, weights_id="x")
    news = engine.scheduler.renew(spec)
    assert news is not None
    assert news.cache_events is not None
    assert held == 5 == len(news.cache_events.removed)
    assert engine.scheduler.renew(spec) is None
    assert len(index) == 0
    assert engine.scheduler.pool.evictions == 0
    engine.core.submit(ask(2), 0.0)
    with pytest.raises(AssertionError, match="under a sequence"):
        engine.scheduler.renew(spec)


def change_config(name: str, key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: value}))

    return change


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensor = tensors.pop(name)
        save_file(tensors | ({name: change(tensor)} if change else {}), path)

    return apply


NORM = "model.layers.1.input_layernorm.weight"


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_config("config.json", "rope_theta", 1.0), "rope_theta is 1.0, the loaded model has 10000.0"),
        (change_config("config.json", "sliding_window", 7), "sliding_window is 7, the loaded model has not set"),
        (change_config("generation_config.json", "eos_token_id", 5), "generation_config.json: eos_token_id is 5"),
        (change_config("tokenizer_config.json", "chat_template", "x"), "tokenizer_config.json: chat_template is 'x'"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json differs"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda folder: (folder / "chat_template.jinja").write_text("x"), r"chat_template\.jinja is new"),
        (change_tensor(NORM, None), f"1 tensors are missing, the first is {NORM}"),
        (change_tensor(NORM, lambda t: t[:-1]), rf"{NORM} has shape \(127,\), the loaded model has \(128,\)"),
        (change_tensor(NORM, lambda t: t.half()), f"{NORM} is stored as F16, the loaded model as F32"),
        (cut, "cut short"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors file"),
    ],
)  # fmt: skip
def test_anything_but_other_weights_is_refused_and_nothing_touched(
    tmp_path: Path, old: Path, change: Callable[[Path], object], message: str
) -> None:
    new = make_tiny_llama(tmp_path / "new", seed=1)
    change(new)
    engine = Engine(old)
    before, spec = engine.run(ask(1))[1], engine.scheduler.spec
    with pytest.raises(CheckpointError, match=message):
        renew(engine, new)
    assert engine.run(ask(2))[2] == before
    assert engine.cached[2] == 64
    assert engine.scheduler.spec is spec


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, old: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        renew(Engine(old), tmp_path / "nowhere")


def test_remarks_and_surplus_tensors_do_not_matter(tmp_path: Path, old: Path) -> None:
    new = make_tiny_llama(tmp_path / "new", seed=1, config={"transformers_version": "9", "_name_or_path": "/x"})
    tensors = load_file(new / "model.safetensors")
    write_weights(new, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    renew(Engine(old), new)

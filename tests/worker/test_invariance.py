"""Batch-invariant mode: a token's logits have the same bits however its sequence was scheduled, and beside whom."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.checkpoints import make_tiny_llama
from fakes.mixing import differences
from fakes.stepping import group_config, load_worker

from nori_cluster.config import CacheConfig
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.errors import ConfigError
from nori_cluster.models.invariance import keeps_bits
from nori_cluster.quant import QUANT
from nori_cluster.worker.numerics import BACKENDS, attention_name, processor, require_batch_invariant
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# An inner size of 250 leaves elements over in every vector loop; 1536 columns show oneDNN's own kernel for one row.
SHAPES = {
    "odd": {"vocab": 301, "hidden": 100, "head_dim": 24, "intermediate": 250, "attention_bias": True, "mlp_bias": True},
    "wide": {"vocab": 512, "hidden": 96, "heads": 9, "kv_heads": 3, "head_dim": 32, "intermediate": 1536},
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp(request.param) / "m", tokenizer=False, **SHAPES[request.param])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_the_sequence_alone(folder: Path, dtype: str) -> None:
    threads, every, singles = (1, 5, 60) if "odd" in folder.parent.name else (2, 40, 16)  # two crawl on a busy machine
    worker = load_worker(group_config(folder, dtype=dtype, threads=threads, num_blocks=400, batch_invariant=True))
    assert not any(differences(worker, every=every, singles=singles).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_mode_every_kind_differs(folder: Path, dtype: str) -> None:
    """Else the test above would test nothing."""
    found = differences(load_worker(group_config(folder, dtype=dtype, num_blocks=400)), every=15, singles=40)
    assert all(found[kind] for kind in ("cut", "mixed", "cached", "resumed")), found
    assert found["batch"] or dtype == "bfloat16"  # bfloat16 products do not depend on the number of rows


@pytest.mark.parametrize("block_size", [8, 48])
def test_block_sizes(tmp_path: Path, block_size: int) -> None:
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False)
    config = group_config(folder, batch_invariant=True)
    config = msgspec.structs.replace(config, cache=CacheConfig(num_blocks=2000, block_size=block_size))
    assert not any(differences(load_worker(config), 200, every=40, singles=60).values())


def test_the_number_of_threads_does_not_matter(folder: Path) -> None:
    """So it is not part of the numerics_id."""
    found = []
    for threads in (1, 2, 3):
        worker = load_worker(group_config(folder, threads=threads, batch_invariant=True))
        x = torch.randn(160, worker.model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            found.append(worker.model.logits(x + worker.model.layers[0].mlp(x)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False, **SHAPES["odd"])
    command = [sys.executable, str(Path(__file__).parent / "invariant_rank.py"), str(folder), dtype]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), "140", "60"], env=environment, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [output.strip().splitlines()[-1] for output in outputs] == ["equal", "equal"]


def test_the_machine_is_tried_before_it_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant = load_worker(group_config(folder, batch_invariant=True))
    assert keeps_bits(invariant.model, invariant.backend, invariant.cache)
    assert not invariant.cache.tensor.any()
    plain = load_worker(group_config(folder))
    assert not keeps_bits(plain.model, plain.backend, plain.cache)
    monkeypatch.setitem(BACKENDS, ("cpu", True), "cpu_paged")
    with pytest.raises(ConfigError, match="batch-invariant mode is not available: this machine's kernels"):
        load_worker(group_config(folder, batch_invariant=True))


class Unordered(SoloGroup):
    ordered = False


def test_where_it_is_not_available_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not available: no attention backend on cuda") as caught:
        attention_name(CUDA, True)
    assert caught.value.param == "batch_invariant"
    with pytest.raises(ConfigError, match=r"Unquantized products in bfloat16 on cuda"):
        require_batch_invariant(QUANT["none"], torch.bfloat16, CUDA, SoloGroup())
    with pytest.raises(ConfigError, match=r"sums over ranks on cuda"):
        require_batch_invariant(QUANT["none"], torch.bfloat16, CUDA, Unordered())
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False)
    with pytest.raises(ConfigError, match=r"products in float16 on cpu"):
        load_worker(group_config(folder, dtype="float16", batch_invariant=True))


def test_numerics_id_names_what_decides_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path / "m", tokenizer=False)

    def identity(block_size: int = 16, **options: object) -> str:
        config = group_config(folder, **options)
        config = msgspec.structs.replace(config, cache=CacheConfig(num_blocks=64, block_size=block_size))
        return Worker(config, SoloGroup()).load().numerics_id

    plain, mode = identity(), identity(batch_invariant=True)
    assert plain != mode
    assert mode == identity(batch_invariant=True, threads=2) == identity(64, batch_invariant=True)  # the same splits
    assert mode != identity(48, batch_invariant=True)
    assert mode != identity(batch_invariant=True, dtype="bfloat16")
    monkeypatch.setattr("nori_cluster.worker.numerics.processor", lambda: ("AVX2", "another maker"))
    assert plain == identity()
    assert mode != identity(batch_invariant=True)


def test_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nvendor_id\t: M\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: Q\n\nprocessor\t: 1\n"
    )
    assert processor(info)[1:4] == ("M", "25", "17")
    assert processor(tmp_path / "none")[1:] == ("",) * 5

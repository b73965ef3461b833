"""The cost models against figures worked out by hand, and their command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "bench" / "cost.py"

FIGURES = [  # arguments, bytes, operations
    # 4 rows of 1,000 keys of 8 * 128, keys and values; q of 4 * 32 * 128; as many float32 results and 4 * 32 sums
    ("paged_decode --rows 4 --context 1000", 16_384_000 + 32_768 + 4 * (16_384 + 128), 4 * 4000 * 32 * 128),
    ("paged_decode --rows 4 --context 1000 --kv-dtype fp8e4nv", 8_192_000 + 32_768 + 66_048, 65_536_000),
    ("paged_decode --rows 4 --context 1000 --window 100 --items 8", 1_638_400 + 32_768 + 132_096, 6_553_600),
    # 3 * 4 parts of 8 and their sums; starts and rows; 2 * 4 * 8 results
    ("merge_splits --rows 2 --items 3 --heads 4 --dim 8", 432 + 20 + 128, 3 * 96 + 64),
    # 10 new over 100: 1,055 pairs, 110 keys
    ("paged_prefill --rows 1 --context 100 --new 10", 2 * (225_280 + 81_920), 4 * 1055 * 4096),
    # one token: k and v in and out, q in and out, cos and sin, one slot of 8 bytes
    ("cache_write --tokens 1", 2 * (2048 + 2048 + 8192 + 128) + 8, 3 * 40 * 128),
    ("cache_write --tokens 1 --kv-dtype fp8e4nv --no-rotate", 2 * 1024 * 3 + 8, 0),
    # 16 values: x, residual in and out, result, and 8 of the weight
    ("rms_norm --rows 2 --hidden 8", 2 * (16 + 32 + 16 + 8), 16 * 5),
    ("rms_norm --rows 2 --hidden 8 --no-residual --out i8", 32 + 16 + 16 + 8, 16 * 7),
    ("gated --rows 2 --inner 8", 96, 80),
    ("gated --rows 2 --inner 8 --kind gelu_tanh --dtype fp32", 192, 160),
    ("gated_quantized --rows 2 --inner 8", 64 + 16 + 8, 16 * 13),
    # 3 ids, 2 rows read, 3 written
    ("embed --tokens 3 --hidden 8 --own 2", 24 + 32 + 48, 0),
    ("quantize_rows --rows 2 --width 256 --group 128", 1024 + 512 + 16, 1536),
    ("quantize_rows --rows 2 --width 256", 1024 + 512 + 8, 1536),
    ("quantize_static --rows 2 --width 8", 32 + 16 + 4, 16),
    # 128 logits and scores; counts, prompt and four numbers a row; two words and a number a row; 64 of allowed
    ("edit_scores --rows 2 --vocab 64", 1024 + 672 + 24 + 64, 128 * 11),
    ("edit_scores --rows 2 --vocab 64 --no-penalties --no-mask --no-allowed --dtype bf16", 768, 128 * 3),
    # 1 for the maximum, 4 for the draw, 16 passes of 10 for top_k, 4 and 16 passes of 11 for top_p
    ("choose --rows 2 --vocab 64", 2 * (256 + 45), 128 * (1 + 4 + 160 + 4 + 176)),
    ("choose --rows 2 --vocab 64 --no-drawn", 602, 128),
    ("logprobs --rows 2 --vocab 64 --most 3", 2 * (256 + 8 + 24), 128 * 10),
    ("philox --rows 2 --words 4", 2 * (24 + 32), 800),
    # 2 by 256 and 256 by 256 bytes; scales; 2 by 256 results of bf16
    ("scaled_gemm --rows 2 --columns 256 --inner 256", 66_048 + 4 * 258 + 1024, 262_144),
    ("scaled_gemm --rows 2 --columns 256 --inner 256 --scales block", 66_048 + 4 * (4 + 4) + 1024, 262_144),
    ("scaled_gemm --rows 2 --columns 256 --inner 256 --scales tensor --bias", 66_048 + 8 + 1536, 262_144),
    # 16 rows of 128 nibbles, of 3 scales and zeros; 2 by 96 and 2 by 16
    ("weight_gemm --rows 2 --columns 16 --inner 96 --group 32", 16 * (64 + 9) + 448, 6144),
    ("weight_gemm --rows 2 --columns 16 --inner 96 --group 32 --bits 8 --bias", 16 * (128 + 9) + 480, 6144),
    ("route --tokens 2 --experts 16 --choices 4", 2 * (32 + 32), 256),
    ("count_slots --tokens 2 --experts 16 --choices 4", 4 * (8 + 16), 256),
    ("place_slots --tokens 2 --experts 16 --choices 4 --tiles 8", 4 * (8 + 16 + 128 + 8), 256),
    # 2 rows of x, 5 experts' weights, 8 results, 8 numbers of slots
    ("grouped_gemm --slots 8 --shared 4 --touched 5 --columns 16 --inner 32", 2 * (64 + 2560 + 128) + 32, 8192),
    ("reduce_slots --tokens 2 --choices 4 --width 16", 2 * (128 + 32) + 32, 256),
]


def run(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *line.split()], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("line", "moved", "operations"), FIGURES)
def test_bytes_and_operations(line: str, moved: int, operations: int) -> None:
    answer = run(line)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["bytes"], found["operations"]) == (moved, operations)


def test_every_model_has_figures() -> None:
    assert {line.split()[0] for line, _, _ in FIGURES} == set(run("list").stdout.split())


def test_a_measured_time_is_a_fraction_of_the_floor() -> None:
    found = json.loads(run("paged_decode --measured-us 200").stdout)
    assert found["fraction_of_floor"] == pytest.approx(found["floor_us"] / 200, abs=1e-3)
    assert found["floor_us"] == pytest.approx(found["bytes"] / 3.35e12 * 1e6, abs=0.01)


def test_the_rate_is_that_of_the_operands() -> None:
    for operands, rate in (("i8", 624e12), ("fp8e4nv", 1979e12)):
        target = "sm_80" if operands == "i8" else "sm_90"
        found = json.loads(run(f"scaled_gemm --rows 8192 --operands {operands} --target {target}").stdout)
        assert found["floor_us"] == pytest.approx(found["operations"] / rate * 1e6, abs=0.01)


@pytest.mark.parametrize("line", ["paged_decode --kv-dtype fp8e4nv", "scaled_gemm", "rms_norm --out fp8e4nv"])
def test_a_target_without_fp8_is_refused(line: str) -> None:
    refused = run(f"{line} --target sm_80")
    assert refused.returncode == 2
    assert "E4M3 needs sm_89" in refused.stderr


@pytest.mark.parametrize("line", ["gated --rows -1", "gated --dtype i8", "scaled_gemm --operands bf16", "nothing"])
def test_what_no_kernel_takes_is_refused(line: str) -> None:
    refused = run(line)
    assert refused.returncode == 2
    assert "invalid" in refused.stderr


def test_a_time_is_positive() -> None:
    assert "a measured time is positive, not 0.0" in run("gated --measured-us 0").stderr

"""The cost model against figures worked out by hand, and its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "bench" / "cost.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "moved", "operations"),
    [
        # 4 rows of 1,000 keys: 2 * 4000 * 8 * 128 values of KV and 4 * 32 * 128 of q in and out
        (["decode", "--rows", 4, "--context", 1000], 2 * (8_192_000 + 2 * 16_384), 4 * 4000 * 32 * 128),
        (["decode", "--rows", 4, "--context", 1000, "--kv-dtype", "fp8e4nv"], 8_192_000 + 4 * 16_384, 65_536_000),
        # 10 new over 100: 1,055 pairs, 110 keys
        (["prefill", "--rows", 1, "--context", 100, "--new", 10], 2 * (225_280 + 81_920), 4 * 1055 * 4096),
        # one token: k and v in and out, q in and out, cos and sin, one slot of 8 bytes
        (["cache_write", "--rows", 1, "--new", 1], 2 * (2048 + 2048 + 8192 + 128) + 8, 3 * 40 * 128),
    ],
)
def test_bytes_and_operations(arguments: list[object], moved: int, operations: int) -> None:
    found = json.loads(run(*arguments).stdout)
    assert (found["bytes"], found["operations"]) == (moved, operations)


def test_a_measured_time_is_a_fraction_of_the_floor() -> None:
    found = json.loads(run("decode", "--measured-us", 200).stdout)
    assert found["fraction_of_floor"] == pytest.approx(found["floor_us"] / 200, abs=1e-3)
    assert found["floor_us"] == pytest.approx(found["bytes"] / 3.35e12 * 1e6, abs=0.01)


def test_a_target_without_fp8_is_refused() -> None:
    refused = run("decode", "--target", "sm_80", "--kv-dtype", "fp8e4nv")
    assert refused.returncode == 2
    assert "E4M3 needs sm_89" in refused.stderr

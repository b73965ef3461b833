"""paged_prefill against float64: prompts, chunks over a prefix, rows of 1 + k drafts; NaN where nothing may be read."""

import dataclasses

import pytest
import torch
from kernels.paging import Paged

from nori_kernels.attend import Scoring
from nori_kernels.paged_prefill import paged_prefill, paged_prefill_reference, tile_rows
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract
SHAPES = {  # (prefix, new tokens) of each row
    "prompts": [(0, 1), (0, 15), (0, 16), (0, 17)],
    "chunks": [(16, 16), (5, 20), (33, 0), (15, 2)],
    "drafts": [(40, 5), (15, 3), (31, 1)],
}


def check(paged: Paged, counts: list[int], q: torch.Tensor, scoring: Scoring, bound: float, tile: int = 16) -> None:
    rows = paged.prefill_rows(counts, tile, q.shape[1] // paged.kv.keys.shape[1])
    out = poisoned(*q.shape, dtype=q.dtype)
    paged_prefill(q, paged.kv, rows, scoring, out)
    paged.inputs.close(out, paged_prefill_reference(q, paged.kv, rows, scoring), bound)


def made(inputs: Inputs, shapes: list[tuple[int, int]], kv_heads: int, dim: int, dtype: torch.dtype) -> Paged:
    return Paged(inputs, [prefix + new for prefix, new in shapes], kv_heads, dim, dtype)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_rows_and_groups(name: str, group: int) -> None:
    inputs = Inputs()
    counts = [new for _, new in SHAPES[name]]
    paged = made(inputs, SHAPES[name], 1, 64, torch.float32)
    check(paged, counts, inputs.normal(sum(counts), group, 64), Scoring(0.125), 2e-6, tile=64)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_widths_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    inputs = Inputs()
    paged = made(inputs, [(9, 8)], 2, dim, dtype)
    check(paged, [8], inputs.normal(8, 4, dim, dtype=dtype), Scoring(dim**-0.5), 2e-6 + ROUNDING[dtype])


def test_fp8_cache_with_scales_of_each_head() -> None:
    inputs = Inputs()
    paged = made(inputs, [(9, 8), (0, 3)], 2, 64, torch.float8_e4m3fn)
    check(paged, [8, 3], inputs.normal(11, 8, 64, dtype=torch.bfloat16), Scoring(0.125), 2e-6 + 2.0**-8)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_soft_caps_and_sinks(window: int, softcap: float, with_sinks: bool) -> None:
    inputs = Inputs()
    paged = made(inputs, [(30, 7), (0, 4)], 1, 64, torch.float32)
    sinks = inputs.normal(3) if with_sinks else None
    check(paged, [7, 4], inputs.normal(11, 3, 64), Scoring(0.3, window, softcap, sinks), 2e-6)


def test_one_long_prompt_over_a_long_prefix() -> None:
    inputs = Inputs()
    paged = made(inputs, [(200, 40)], 1, 64, torch.float32)
    check(paged, [40], inputs.normal(40, 2, 64), Scoring(0.125), 3e-6, tile=32)


def test_where_blocks_lie_changes_nothing() -> None:
    inputs = Inputs()
    paged = made(inputs, [(20, 5), (0, 18)], 2, 64, torch.float32)
    q, scoring = inputs.normal(23, 6, 64), Scoring(0.2, window=12)
    rows = paged.prefill_rows([5, 18], 16, 3)
    first, second = poisoned(*q.shape), poisoned(*q.shape)
    paged_prefill(q, paged.kv, rows, scoring, first)
    kv, tables = paged.moved()
    paged_prefill(q, kv, dataclasses.replace(rows, tables=tables), scoring, second)
    assert torch.equal(first, second), inputs.seed


def test_refuses_what_it_does_not_take() -> None:
    inputs = Inputs()
    paged = made(inputs, [(0, 2)], 1, 64, torch.float32)
    q, rows = inputs.normal(2, 17, 64), paged.prefill_rows([2], 32, 17)
    for height, out, reason in (
        (32, poisoned(2, 16, 64), "out is"),
        (16, poisoned(2, 17, 64), "do not hold a group of 17"),
        (24, poisoned(2, 17, 64), "tiles of 24"),
    ):
        with pytest.raises(ValueError, match=reason):
            paged_prefill(q, paged.kv, dataclasses.replace(rows, tile_rows=height), Scoring(1.0), out)


def test_tiles_hold_the_group_and_grow_with_the_longest_row() -> None:
    assert tile_rows(torch.bfloat16, 128, 4, 4) == 16
    assert tile_rows(torch.bfloat16, 128, 4, 5) == 64
    assert tile_rows(torch.bfloat16, 128, 17, 1) == 64
    assert tile_rows(torch.bfloat16, 128, 4, 17) == 128
    assert tile_rows(torch.bfloat16, 128, 1, 5) == 16
    assert tile_rows(torch.bfloat16, 128, 7, 1000) == 128
    assert tile_rows(torch.bfloat16, 256, 7, 1000) == 64
    assert tile_rows(torch.float32, 64, 40, 1) == 64

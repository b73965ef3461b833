"""Mixture of experts against float64: ties, experts that nobody or everybody chose, tiles that are not full."""

import pytest
import torch

from nori_kernels.moe import (
    align,
    grouped_gemm,
    grouped_gemm_reference,
    reduce_reference,
    reduce_slots,
    route,
    route_reference,
)
from nori_kernels.testing import ROUNDING, Inputs, poisoned

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "count", "choices"), [(1, 1, 1), (33, 5, 2), (7, 60, 8)])
@pytest.mark.parametrize("ties", [False, True])
def test_route(tokens: int, count: int, choices: int, renormalize: bool, ties: bool) -> None:
    inputs = Inputs()
    logits = inputs.integers(0, 2, tokens, count).float() if ties else inputs.normal(tokens, count, scale=3.0)
    weights, experts = route(logits, choices, renormalize)
    exact, order = route_reference(logits, choices, renormalize)
    assert torch.equal(experts.long(), order), f"seed {inputs.seed}"
    inputs.close(weights, exact, 1e-6)


@pytest.mark.parametrize(("tokens", "count", "choices"), [(1, 8, 2), (33, 5, 2), (17, 1, 1), (600, 3, 2), (1100, 9, 1)])
@pytest.mark.parametrize("one", [False, True])
def test_align(tokens: int, count: int, choices: int, one: bool) -> None:
    inputs = Inputs()
    experts = inputs.integers(0, 1 if one else count, tokens, choices, dtype=torch.int32)
    slots, owners, tile = align(experts, count)
    flat, place = experts.flatten(), 0
    for expert in range(count):
        own = torch.nonzero(flat == expert).flatten().int()
        used = -(-len(own) // tile)
        assert (owners[place : place + used] == expert).all(), f"seed {inputs.seed}"
        lines = slots[place * tile : (place + used) * tile]
        assert torch.equal(lines[: len(own)], own), f"seed {inputs.seed}"
        assert (lines[len(own) :] == len(flat)).all(), f"seed {inputs.seed}"
        place += used
    assert (owners[place:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "count", "choices"), [(1, 4, 2), (33, 3, 2), (70, 2, 1)])
def test_experts(tokens: int, count: int, choices: int, dtype: torch.dtype) -> None:
    inputs, inner, columns = Inputs(), 70, 65
    x = inputs.normal(tokens, inner, dtype=dtype)
    w = inputs.normal(count, columns, inner, dtype=dtype)
    experts = inputs.integers(0, count, tokens, choices, dtype=torch.int32)
    aligned, bound = align(experts, count), 3e-6 + ROUNDING[dtype]
    y = grouped_gemm(x, w, aligned, poisoned(tokens * choices, columns, dtype=dtype), shared=choices)
    inputs.close(y, grouped_gemm_reference(x, w, experts.flatten(), choices), bound)
    again = inputs.normal(count, inner, columns, dtype=dtype)
    z = grouped_gemm(y, again, aligned, poisoned(tokens * choices, inner), shared=1)
    inputs.close(z, grouped_gemm_reference(y, again, experts.flatten(), 1), 3e-6)
    weights = inputs.uniform(tokens, choices)
    out = reduce_slots(z, weights, poisoned(tokens, inner, dtype=dtype))
    inputs.close(out, reduce_reference(z, weights), bound)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.zeros(1, 3), 4, True)
    aligned = align(torch.zeros(2, 2, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="does not give"):
        grouped_gemm(torch.zeros(2, 8), torch.zeros(2, 8, 8), aligned, torch.empty(4, 8), shared=1)

"""Experts against one token at a time; how many calls and collectives a block makes."""

from typing import Any

import pytest
import torch
from fakes.threaded import ThreadGroup, on_ranks
from torch.nn.functional import linear, silu
from torch.utils._python_dispatch import TorchDispatchMode

from nori_cluster.device.parallel import SoloGroup, TPGroup
from nori_cluster.layers.moe import ExpertsMLP
from nori_cluster.layers.shard import LayerContext
from nori_cluster.quant.none import Unquantized

pytestmark = pytest.mark.unit
HIDDEN, INNER, EXPERTS, CHOSEN = 32, 24, 6, 3


def weights() -> dict[str, torch.Tensor]:
    """Of the whole block, by parameter: router, gate_up [experts, 2 · inner, hidden], down [experts, hidden, inner]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    return {
        "router": draw(EXPERTS, HIDDEN),
        "gate_up": draw(EXPERTS, 2 * INNER, HIDDEN),
        "down": draw(EXPERTS, HIDDEN, INNER),
    }


def block(
    group: TPGroup | None = None, *, normalised: bool = True, dtype: torch.dtype = torch.float32, **changes: Any
) -> ExpertsMLP:
    """Filled as the loader does."""
    context = LayerContext(group or SoloGroup(), dtype, torch.device("cpu"), Unquantized)
    layer = ExpertsMLP(HIDDEN, INNER, EXPERTS, CHOSEN, normalised=normalised, context=context)
    full = weights() | changes
    fill(layer.router, "", full["router"])
    for index, expert in enumerate(layer.experts):
        gate, up = full["gate_up"][index].chunk(2)
        fill(expert.gate_up, "gate", gate)
        fill(expert.gate_up, "up", up)
        fill(expert.down, "", full["down"][index])
    for module in layer.modules():
        if (quant := getattr(module, "quant", None)) is not None:
            quant.after_load(module)
    return layer


def fill(layer: Any, part: str, tensor: torch.Tensor) -> None:
    shard = layer.shard("weight", part)
    assert shard.full == tuple(tensor.shape)
    layer.weight.data[shard.target] = tensor[shard.source].to(layer.weight.dtype)


def one_by_one(x: torch.Tensor, *, normalised: bool) -> torch.Tensor:
    full, rows = weights(), []
    for row in x:
        chances = linear(row, full["router"]).softmax(-1)
        best = sorted(range(EXPERTS), key=lambda index: -float(chances[index]))[:CHOSEN]
        total = sum(chances[index] for index in best) if normalised else 1.0
        outputs = []
        for index in best:
            gate, up = linear(row, full["gate_up"][index]).chunk(2)
            outputs.append(linear(silu(gate) * up, full["down"][index]) * chances[index] / total)
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_equals_one_token_at_a_time(rows: int, normalised: bool) -> None:
    x = inputs(rows)
    torch.testing.assert_close(block(normalised=normalised)(x), one_by_one(x, normalised=normalised))


def test_no_tokens() -> None:
    assert block()(inputs(0)).shape == (0, HIDDEN)


def test_a_token_does_not_see_the_others() -> None:
    x = inputs(40)
    layer = block()
    torch.testing.assert_close(layer(x)[7:9], layer(x[7:9]))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_a_share_of_each_expert_and_sum_once(size: int) -> None:
    x, sums = inputs(40), []

    class Counting(ThreadGroup):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            sums.append(self.rank)
            return super().all_reduce(tensor)

    def work(group: ThreadGroup) -> torch.Tensor:
        group.__class__ = Counting
        return block(group)(x)

    found = on_ranks(size, work)
    for part in found:
        torch.testing.assert_close(part, one_by_one(x, normalised=True))
        assert torch.equal(part, found[0])
    assert sorted(sums) == list(range(size))


def test_the_router_is_float32_in_a_bfloat16_model() -> None:
    """Two experts that differ by less than bfloat16 can say: the better one is chosen first, whichever it is."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    for better in (1, 4):
        router = torch.zeros(EXPERTS, HIDDEN)
        router[[1, 4]] = 1.0
        router[better] += 2.0**-12
        layer = block(dtype=torch.bfloat16, router=router)
        chances, ids = layer.router(x)
        assert ids[0, :2].tolist() == [better, 5 - better]
        assert chances.dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_more_tokens_make_no_more_calls() -> None:
    layer, counts = block(), []
    for rows in (50, 500):
        with Calls() as calls:
            layer(inputs(rows))
        counts.append(calls.count)
    assert counts[0] == counts[1] <= 20 + 8 * EXPERTS


def test_an_expert_without_tokens_makes_no_call() -> None:
    layer, counts = block(), []
    for rows in (1, 500):
        with Calls() as calls:
            layer(inputs(rows))
        counts.append(calls.count)
    assert counts[1] - counts[0] >= 4 * (EXPERTS - CHOSEN)

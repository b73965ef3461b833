"""Sampling kernels choose the ids that the CPU sampler chooses, on vocabularies that are no multiple of a tile."""

import numpy as np
import pytest
import torch

from nori_cluster.worker import sampler
from nori_cluster.worker.penalties import penalize
from nori_kernels.sampling import (
    Bitmask,
    SamplingRows,
    Seen,
    choose,
    choose_reference,
    edit_scores,
    edit_scores_reference,
)
from nori_kernels.testing import Inputs, poisoned

pytestmark = pytest.mark.contract


def rows_of(inputs: Inputs, count: int) -> SamplingRows:
    """Every combination of limits comes up; one row in five is greedy."""
    pick = lambda values: torch.tensor(values)[inputs.integers(0, len(values), count)]  # noqa: E731
    return SamplingRows(
        temperature=pick([0.0, 0.2, 0.7, 1.0, 3.0]),
        top_p=pick([1.0, 0.95, 0.5, 0.1]),
        top_k=pick([0, 1, 2, 7, 40, 10_000]).int(),
        min_p=pick([0.0, 0.05, 0.3]),
        seed=inputs.integers(-(2**63), 2**63 - 1, count),
        candidate=inputs.integers(0, 2**32, count),
        index=inputs.integers(0, 5000, count),
    )


def cpu_ids(scores: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    given = sampler.SamplingRows(
        temperature=rows.temperature.numpy(),
        top_p=rows.top_p.numpy(),
        top_k=rows.top_k.numpy(),
        min_p=rows.min_p.numpy(),
        seed=rows.seed.numpy().view(np.uint64),
        candidate=rows.candidate.numpy().astype(np.uint32),
        output_index=rows.index.numpy().astype(np.int32),
        logprobs=np.full(len(scores), -1, np.int32),
        edits=None,
    )
    return torch.from_numpy(sampler.choose(scores, given).ids)


@pytest.mark.parametrize(
    ("count", "vocab", "block"), [(1, 1, 128), (33, 131, 128), (12, 300, 256), (4, 1000, 1024), (2, 1025, 1024)]
)
def test_ids_are_those_of_the_cpu_sampler(count: int, vocab: int, block: int) -> None:
    inputs = Inputs()
    scores, rows = inputs.normal(count, vocab, scale=3.0), rows_of(inputs, count)
    ids, dead = choose(scores, rows, block)
    assert torch.equal(ids, cpu_ids(scores, rows)), f"seed {inputs.seed}"
    assert torch.equal(ids.long(), choose_reference(scores, rows)), f"seed {inputs.seed}"
    assert not dead.any()


def test_ties_stay_and_dead_rows_are_told() -> None:
    inputs = Inputs()
    scores = inputs.integers(-2, 3, 12, 200).float()  # five different scores: ties at every threshold
    scores[3] = -torch.inf
    scores[4, 7:] = -torch.inf
    rows = rows_of(inputs, 12)
    ids, dead = choose(scores, rows, 128)
    kept = [row for row in range(12) if row != 3]
    assert torch.equal(ids[kept], cpu_ids(scores, rows)[kept]), f"seed {inputs.seed}"
    assert dead.tolist() == [int(row == 3) for row in range(12)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 1030])
def test_edits(vocab: int, dtype: torch.dtype) -> None:
    inputs, count = Inputs(), 5
    logits = inputs.normal(count, vocab, dtype=dtype, scale=4.0)
    logits[0, 0], logits[1, 0], logits[2, 0] = float("nan"), float("inf"), -float("inf")
    counts = inputs.integers(0, 4, 3, vocab, dtype=torch.int32)
    seen = Seen(
        counts,
        inputs.integers(0, 2, 3, vocab).bool(),
        torch.tensor([2, -1, 0, 1, 1], dtype=torch.int32),
        *(inputs.uniform(count, low=0.5, high=2.0) for _ in range(3)),
    )
    words = inputs.integers(
        -(2**31), 2**31, 2, max(1, vocab // 32), dtype=torch.int64
    ).int()  # too few for the last ids
    bitmask = Bitmask(words, torch.tensor([-1, 1, 0, -1, 1], dtype=torch.int32))
    allowed = inputs.uniform(vocab) > 0.2
    for case in ((None, None, None), (seen, None, None), (None, bitmask, allowed), (seen, bitmask, allowed)):
        out = edit_scores(logits, *case, out=poisoned(count, vocab))
        exact = edit_scores_reference(logits, *case)
        assert torch.equal(out == -torch.inf, exact == -torch.inf), f"seed {inputs.seed}"
        shown = exact != -torch.inf
        assert torch.allclose(out.double()[shown], exact[shown], rtol=1e-6, atol=1e-6), f"seed {inputs.seed}"


def test_penalties_are_bit_equal_to_the_workers() -> None:
    inputs = Inputs()
    logits = inputs.normal(4, 130)
    counts, prompt = inputs.integers(0, 4, 4, 130, dtype=torch.int32), inputs.integers(0, 2, 4, 130).bool()
    factors = [inputs.uniform(4, low=0.5, high=2.0) for _ in range(3)]

    class Columns:
        repetition, frequency, presence = (f.numpy() for f in factors)

    slots = np.arange(4, dtype=np.int32)
    expected = penalize(logits.clone(), Columns, slots, counts, prompt)
    out = edit_scores(logits, Seen(counts, prompt, torch.arange(4, dtype=torch.int32), *factors))
    assert torch.equal(out, expected), f"seed {inputs.seed}"

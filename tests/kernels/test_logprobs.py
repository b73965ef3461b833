"""Log-probabilities against float64; order of the likeliest, ties included, is exact."""

import pytest
import torch

from nori_kernels.logprobs import logprobs, logprobs_reference
from nori_kernels.testing import Inputs

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("rows", "vocab", "most"), [(1, 1, 3), (33, 131, 2), (3, 300, 20), (2, 128, 0)])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs(rows: int, vocab: int, most: int, ties: bool) -> None:
    inputs = Inputs()
    logits = inputs.integers(-2, 3, rows, vocab).float() if ties else inputs.normal(rows, vocab, scale=5.0)
    if vocab > 5:
        logits[0, 5:] = -torch.inf
        logits[-1] = -torch.inf  # nothing is possible
    ids = inputs.integers(0, vocab, rows, dtype=torch.int32)
    chosen, top_ids, top = logprobs(logits, ids, most, block=128)
    if vocab > 5:
        assert chosen[-1] == -1e30
        assert (top_ids[-1] == -1).all()
        assert (top[-1] == -torch.inf).all()
    exact = logprobs_reference(logits, ids, most)
    assert torch.equal(top_ids.long(), exact[1]), f"seed {inputs.seed}"
    assert torch.allclose(chosen.double(), exact[0], rtol=1e-6, atol=2e-6), f"seed {inputs.seed}"
    assert torch.allclose(top.double(), exact[2], rtol=1e-6, atol=2e-6), f"seed {inputs.seed}"

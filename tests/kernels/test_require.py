"""Wrappers refuse what their kernels would read or write past the end of, and say what they got."""

from collections.abc import Callable

import pytest
import torch

from nori_kernels.activation import gated, gated_quantized
from nori_kernels.embedding import embed
from nori_kernels.logprobs import logprobs
from nori_kernels.moe import align, grouped_gemm, reduce_slots
from nori_kernels.norm import rms_norm, rms_norm_quantized
from nori_kernels.quant.dynamic import quantize_rows
from nori_kernels.quant.layouts import round_to_nearest
from nori_kernels.quant.scaled import scaled_gemm
from nori_kernels.quant.weight_only import weight_gemm
from nori_kernels.sampling import SamplingRows, choose, edit_scores

pytestmark = pytest.mark.contract
ONE, X = torch.ones(1), torch.zeros(2, 64)
A, W = torch.zeros(2, 32, dtype=torch.int8), torch.zeros(4, 32, dtype=torch.int8)
CHOSEN = torch.zeros(2, 2, dtype=torch.int32)
LIMITS = SamplingRows(
    *[torch.ones(2)] * 2, torch.zeros(2, dtype=torch.int32), torch.ones(2), *[torch.zeros(2).long()] * 3
)
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "norm weight": (lambda: rms_norm(X, X[0, :32], 1e-5), r"weight must be \[64\] with contiguous rows, not \[32\]"),
    "norm residual": (lambda: rms_norm(X, X[0], 1e-5, X[:1]), r"residual must be \[2, 64\]"),
    "norm type": (lambda: rms_norm_quantized(X, X[0], 1e-5, torch.int32), "not torch.int32"),
    "activation": (lambda: gated(X, "relu"), "'relu' is none of silu"),
    "activation out": (lambda: gated(X, "silu", torch.empty(2, 64)), r"out must be \[2, 32\]"),
    "activation type": (lambda: gated_quantized(X, "silu", torch.float16), "not torch.float16"),
    "ids": (lambda: embed(torch.zeros(2), X), "ids must be .* of int64 or int32"),
    "embedding": (lambda: embed(CHOSEN[0], X.T), "weight must be .* with contiguous rows"),
    "logprobs": (lambda: logprobs(X, CHOSEN[0, :1], 1), r"ids must be \[2\] of int32"),
    "scores": (lambda: choose(X.double(), LIMITS), "scores must be .* of float32"),
    "limits": (lambda: choose(X, LIMITS._replace(top_k=torch.zeros(2))), "top_k must be .* of int32"),
    "allowed": (lambda: edit_scores(X, allowed=torch.ones(32).bool()), r"allowed must be \[64\] of bool"),
    "experts": (lambda: align(CHOSEN.T[:1].T.expand(2, 2), 2), "experts must be contiguous"),
    "expert weights": (
        lambda: grouped_gemm(X, torch.zeros(2, 8, 32), align(CHOSEN, 2), X.new_empty(4, 8), 2),
        "w must be",
    ),
    "slots": (lambda: reduce_slots(X, torch.ones(2, 2), X.new_empty(2, 64)), r"y must be \[4, 64\]"),
    "quantized type": (lambda: quantize_rows(X, torch.int16), "not torch.int16"),
    "product": (
        lambda: scaled_gemm(A.float(), ONE, W.float(), ONE, torch.empty(2, 4)),
        "a must be .* of int8 or float8",
    ),
    "product out": (lambda: scaled_gemm(A, ONE, W, ONE, torch.empty(2, 3)), r"out must be \[2, 4\]"),
    "product bias": (lambda: scaled_gemm(A, ONE, W, ONE, torch.empty(2, 4), ONE), r"bias must be \[4\]"),
    "packed": (lambda: weight_gemm(X.half(), round_to_nearest(X, 4, 64), torch.empty(2, 3)), r"out must be \[2, 2\]"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()

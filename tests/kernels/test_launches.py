"""What is compiled ahead of time is what wrappers launch: constants, warps, stages, fusion and pointer types."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nori_kernels import (
    activation,
    cache_write,
    embedding,
    logprobs,
    moe,
    norm,
    paged_decode,
    paged_prefill,
    philox,
    sampling,
)
from nori_kernels.attend import Scoring
from nori_kernels.casts import TRITON_TYPES
from nori_kernels.catalog import MODULES, VARIANTS
from nori_kernels.layout import layer_view
from nori_kernels.quant import dynamic, layouts, scaled, weight_only
from nori_kernels.variant import Variant

pytestmark = pytest.mark.contract
BF16, FP8, INT8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float32
TYPES = {**TRITON_TYPES, torch.uint8: "u8"}
DEFAULTS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}  # Triton's


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class Recorder:
    """Stands where a kernel stands and keeps what it would be launched with."""

    def __init__(self, names: list[str], launches: list[dict[str, Any]]) -> None:
        self._names, self._launches = names, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **given: self._launches.append(
            DEFAULTS | dict(zip(self._names, args, strict=False)) | given
        )


def decode(dtype: torch.dtype, stored: torch.dtype, dim: int, group: int, extras: bool = False) -> None:
    kv = layer_view(zeros(1, 1, 2, 1, 16, dim, dtype=stored), 0, torch.ones(2, 1) if stored == FP8 else None)
    rows = paged_decode.DecodeRows(zeros(1, 3), zeros(2), zeros(1), zeros(1, 1), zeros(1))
    q = zeros(1, group, dim, dtype=dtype)
    paged_decode.paged_decode(q, kv, rows, Scoring(1.0, int(extras), float(extras)), torch.empty_like(q))


def prefill(stored: torch.dtype, dim: int, longest: int, extras: bool = False) -> None:
    kv = layer_view(zeros(1, 1, 2, 1, 16, dim, dtype=stored), 0, torch.ones(2, 1) if stored == FP8 else None)
    height = paged_prefill.tile_rows(BF16, dim, 4, longest)
    rows = paged_prefill.PrefillRows(zeros(1, 2), height, zeros(1), zeros(1), zeros(1, 1), zeros(1))
    scoring = Scoring(1.0, int(extras), float(extras), torch.zeros(4) if extras else None)
    q = zeros(1, 4, dim, dtype=BF16)
    paged_prefill.paged_prefill(q, kv, rows, scoring, torch.empty_like(q))


def attention() -> None:
    for dtype, stored, dim, group, extras in (
        (BF16, BF16, 64, 4, False),
        (BF16, BF16, 128, 4, False),
        (BF16, BF16, 256, 8, True),
        (BF16, FP8, 128, 8, False),
        (FP32, FP32, 128, 4, False),
    ):
        decode(dtype, stored, dim, group, extras)
    for dim, longest in ((80, 128), (128, 128), (256, 128), (128, 4), (128, 16)):
        prefill(BF16, dim, longest)
    prefill(BF16, 64, 128, extras=True)
    prefill(FP8, 128, 128)
    for stored, rotate in ((BF16, False), (FP8, True)):
        kv = layer_view(zeros(1, 1, 2, 1, 16, 128, dtype=stored), 0, torch.ones(2, 1) if stored == FP8 else None)
        k, q, half = zeros(1, 1, 128, dtype=BF16), zeros(1, 4, 128, dtype=BF16), zeros(1, 64, dtype=BF16)
        turned = (q, cache_write.Angles(half, half.clone()), torch.empty_like(q)) if rotate else ()
        cache_write.cache_write(k, k.clone(), zeros(1, dtype=torch.int64), kv, *turned)


def rows() -> None:
    x = zeros(1, 4096, dtype=BF16)
    norm.rms_norm(x, x[0], 1e-5, x.clone())
    norm.rms_norm_quantized(x, x[0], 1e-5, FP8, x.clone())
    activation.gated(x, "silu")
    for dtype in (FP8, INT8):
        activation.gated_quantized(x, "silu", dtype)
        dynamic.quantize_rows(x, dtype)
        dynamic.quantize_static(x, torch.ones(1), dtype)
    dynamic.quantize_rows(x, FP8, 128)
    embedding.embed(zeros(1, dtype=torch.int64), x)


def samples() -> None:
    scores, one, wide = torch.zeros(2, 64), torch.ones(2), zeros(2, dtype=torch.int64)
    seen = sampling.Seen(zeros(2, 64), zeros(2, 64).bool(), zeros(2), one, one.clone(), one.clone())
    sampling.edit_scores(scores, seen, sampling.Bitmask(zeros(2, 2), zeros(2)), zeros(64).bool())
    limits = sampling.SamplingRows(one, one.clone(), zeros(2), one.clone(), wide, wide.clone(), wide.clone())
    sampling.choose(scores, limits)
    logprobs.logprobs(scores, zeros(2), 1)
    philox.philox_words(wide, wide.clone(), wide.clone(), 0, 128)


def products() -> None:
    for count in (1, 64):
        for dtype, grouped in ((INT8, False), (FP8, False), (FP8, True)):
            a, w = zeros(count, 128, dtype=dtype), zeros(64, 128, dtype=dtype)
            scales = (torch.ones(count, 1), torch.ones(1, 1)) if grouped else (torch.ones(1), torch.ones(1))
            scaled.scaled_gemm(a, scales[0], w, scales[1], zeros(count, 64, dtype=BF16))
        for bits in (4, 8):
            q = zeros(64, 16 * bits, dtype=torch.uint8)
            packed = layouts.PackedWeight(q, zeros(64, 2, dtype=BF16), zeros(64, 2, dtype=torch.uint8), bits, 64, 128)
            weight_only.weight_gemm(zeros(count, 128, dtype=BF16), packed)


def experts() -> None:
    moe.route(zeros(1, 128, dtype=BF16), 8, True)
    for tokens in (8, 33 * 16):
        aligned = moe.align(zeros(tokens, 8), 128)
        out = zeros(tokens * 8, 64, dtype=BF16)
        moe.grouped_gemm(zeros(tokens, 64, dtype=BF16), zeros(128, 64, 64, dtype=BF16), aligned, out, shared=8)
        moe.reduce_slots(out, torch.zeros(tokens, 8), zeros(tokens, 64, dtype=BF16))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """What each kernel is launched with."""
    found: dict[str, list[dict[str, Any]]] = {}
    for module in MODULES:
        for variant in module.VARIANTS:
            name = variant.kernel.fn.__name__
            monkeypatch.setattr(module, name, Recorder(variant.kernel.arg_names, found.setdefault(name, [])))
    for launch in (attention, rows, samples, products, experts):
        launch()
    return found


def differences(variant: Variant, launch: dict[str, Any]) -> list[str]:
    """What of a launch is not the variant's. A tensor that is passed twice stands in for one that is not read."""
    expected = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": variant.fp_fusion}
    wrong = [f"{k} {launch[k]}, not {v}" for k, v in (variant.constexprs | expected).items() if launch[k] != v]
    tensors = [id(value) for value in launch.values() if isinstance(value, torch.Tensor)]
    for name, kind in variant.signature.items():
        value = launch[name]
        if not isinstance(value, torch.Tensor):
            wrong += [f"{name} {value} is no multiple of 16"] * (name in variant.aligned and value % 16 != 0)
        elif tensors.count(id(value)) == 1 and f"*{TYPES[value.dtype]}" != kind:
            wrong.append(f"{name} {value.dtype}, not {kind}")
    return wrong


def test_every_variant_is_what_is_launched(launches: dict[str, list[dict[str, Any]]]) -> None:
    wrong = {}
    for variant in VARIANTS:
        found = [differences(variant, launch) for launch in launches[variant.kernel.fn.__name__]]
        wrong[variant.name] = min(found, key=len)
    assert {name: nearest for name, nearest in wrong.items() if nearest} == {}

"""Paged attention by the Triton kernels: on CUDA, and on CPU tensors in the interpreter (TRITON_INTERPRET=1, in tests).

Per layer one cache_write, then paged_decode for rows of one new token and paged_prefill for the others. Layers with a
window have a view of their own of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nori_cluster.attention.base import AttentionPattern, patterns_of
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache
from nori_kernels.attend import Scoring, key_tiling
from nori_kernels.cache_write import cache_write
from nori_kernels.casts import interpreted
from nori_kernels.layout import layer_view
from nori_kernels.paged_decode import DecodeRows, paged_decode
from nori_kernels.paged_prefill import PrefillRows, paged_prefill, tile_rows
from nori_kernels.splits import plan_splits, plan_tiles

WAVES = 2  # decode programs per multiprocessor that a step's keys are shared among
INTERPRETED_PROGRAMS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    slots: torch.Tensor  # [T] where the new KV goes
    decode: tuple[DecodeRows | None, ...]  # one for each window of the model
    prefill: PrefillRows | None


class TritonPagedAttention:
    """Holds no state between steps besides the cache."""

    batch_invariant = False
    numerics = "triton_paged"

    def __init__(self, cache: KVCache, num_heads: int, scale: float, patterns: Sequence[AttentionPattern] = ()) -> None:
        patterns = patterns_of(patterns, cache.num_layers)
        self.cache = cache
        self.group = num_heads // cache.num_kv_heads  # query heads per KV head
        self.windows = sorted({pattern.window for pattern in patterns})
        self._view = [self.windows.index(pattern.window) for pattern in patterns]  # of each layer
        self._scoring = [Scoring(scale, pattern.window, pattern.softcap) for pattern in patterns]
        self._kv = [layer_view(cache.tensor, layer) for layer in range(cache.num_layers)]
        self._programs = max(1, _programs(cache.tensor.device) // cache.num_kv_heads)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        runs = device.type == "cuda" or (device.type == "cpu" and interpreted())
        return runs and dtype in DTYPES and head_dim % 16 == 0 and head_dim <= 256

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        counts = np.diff(batch.query_starts)
        single = np.flatnonzero(counts == 1)
        several = np.flatnonzero(counts > 1)
        return TritonPlan(
            slots=batch.slot_mapping,
            decode=tuple(self._decode(batch, single, window) if len(single) else None for window in self.windows),
            prefill=self._prefill(batch, several, counts[several]) if len(several) else None,
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        kv, scoring = self._kv[layer], self._scoring[layer]
        cache_write(k, v, plan.slots, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode = plan.decode[self._view[layer]]
        if decode is not None:
            paged_decode(q, kv, decode, scoring, out)
        if plan.prefill is not None:
            paged_prefill(q, kv, plan.prefill, scoring, out)
        return out

    def _decode(self, batch: ForwardBatch, rows: NDArray[np.int64], window: int) -> DecodeRows:
        tile = key_tiling(self.cache.tensor.dtype, self.cache.head_dim, self.group).keys
        context = batch.context_lens[rows]
        items, starts = plan_splits(context, self._programs, tile, window)
        tokens, tables = batch.query_starts[rows], batch.block_tables[rows]
        return DecodeRows(*(self._on_device(x) for x in (items, starts, tokens, tables, context)))

    def _prefill(self, batch: ForwardBatch, rows: NDArray[np.int64], counts: NDArray[np.int32]) -> PrefillRows:
        height = tile_rows(self.cache.tensor.dtype, self.cache.head_dim, self.group, int(counts.max()))
        return PrefillRows(
            tiles=self._on_device(plan_tiles(counts, height // self.group)),
            tile_rows=height,
            first_tokens=self._on_device(batch.query_starts[rows]),
            query_lens=self._on_device(counts),
            tables=self._on_device(batch.block_tables[rows]),
            context_lens=self._on_device(batch.context_lens[rows]),
        )

    def _on_device(self, array: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(self.cache.tensor.device)


def _programs(device: torch.device) -> int:
    if device.type == "cuda":
        return WAVES * torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROGRAMS

"""Paged attention for CPUs, made of few large torch calls.

Decode rows (one token) go in buckets of like length: one gather of their pages, two batched matmuls with the query
heads of a KV head folded into the query dimension. Prefill rows go one by one through scaled_dot_product_attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache

BUCKET_BYTES = 6 << 20  # gathered KV of one bucket: it should still be in the last-level cache when it is read
# Rows share a bucket when their block counts lie between the same two edges, so padding stays under half.
EDGES = np.array([8 * 2 ** (i / 2) for i in range(40)])


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """B rows of one token each, padded to `blocks` blocks."""

    tokens: torch.Tensor | None  # [B] index into T; None = all T tokens in order
    pages: torch.Tensor  # [2 * B * kv heads * blocks] pages in layer 0
    mask: torch.Tensor  # float [B, 1, 1, blocks * block_size], -inf past the row's end
    rows: int


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several tokens."""

    start: int
    stop: int
    context: int
    pages: torch.Tensor | None  # [2 * kv heads * blocks] pages in layer 0; None = no prefix, the batch's own k and v do
    mask: torch.Tensor | None  # [stop - start, context] for rows with a prefix


@dataclass(frozen=True, slots=True)
class PagedPlan:
    lines: torch.Tensor  # [2 (k|v), T, kv heads] lines in layer 0 where the new KV goes
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillRow, ...]


class CpuPagedAttention:
    """Owns one scratch buffer for gathered KV; not for use by two threads at once."""

    batch_invariant = False
    numerics = "cpu_paged"

    def __init__(self, cache: KVCache, num_heads: int, scale: float) -> None:
        self.cache = cache
        self.group = num_heads // cache.num_kv_heads  # query heads per KV head
        self.scale = scale
        self._pages = cache.pages()
        self._lines = cache.lines()
        self._scratch = torch.empty(0, self._pages.shape[1], dtype=cache.tensor.dtype, device=cache.tensor.device)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        lengths = np.diff(batch.query_starts)
        single = lengths == 1
        return PagedPlan(
            lines=self.cache.line_index(batch.slot_mapping),
            decode=tuple(self._buckets(batch, np.flatnonzero(single))),
            prefill=tuple(self._prefill_row(batch, int(row)) for row in np.flatnonzero(~single)),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        lines = plan.lines + layer * (self.cache.page_stride * self.cache.block_size)
        self._lines.index_copy_(0, lines[0].flatten(), k.reshape(-1, k.shape[-1]))
        self._lines.index_copy_(0, lines[1].flatten(), v.reshape(-1, v.shape[-1]))
        if len(plan.decode) == 1 and plan.decode[0].tokens is None:
            return self._decode(layer, q, plan.decode[0])
        out = torch.empty(q.shape, dtype=q.dtype)
        for bucket in plan.decode:
            assert bucket.tokens is not None
            out.index_copy_(0, bucket.tokens, self._decode(layer, q[bucket.tokens], bucket))
        for row in plan.prefill:
            out[row.start : row.stop] = self._prefill(layer, q, k, v, row)
        return out

    def _buckets(self, batch: ForwardBatch, rows: NDArray[np.int64]) -> Iterator[DecodeBucket]:
        if not len(rows):
            return
        blocks = -(-batch.context_lens[rows] // self.cache.block_size)
        classes = np.searchsorted(EDGES, blocks)
        cache_bytes = self._pages.shape[1] * self.cache.page_stride * self.cache.tensor.element_size()
        for kind in np.unique(classes):
            members = rows[classes == kind]
            longest = int(blocks[classes == kind].max())
            most = max(1, BUCKET_BYTES // (longest * cache_bytes))
            for first in range(0, len(members), most):
                yield self._bucket(batch, members[first : first + most], longest)

    def _bucket(self, batch: ForwardBatch, rows: NDArray[np.int64], blocks: int) -> DecodeBucket:
        size = self.cache.block_size
        used = -(-batch.context_lens[rows] // size)
        # Padding is the row's own first block: a masked weight of 0 times another row's NaN would still be NaN.
        tables = batch.block_tables[rows]
        table = np.where(np.arange(blocks) < used[:, None], tables[:, :blocks], tables[:, :1])
        pages = self.cache.page_index(torch.from_numpy(table))  # [2, head, B, blocks]
        lengths = torch.from_numpy(batch.context_lens[rows])
        hidden = torch.arange(blocks * size) >= lengths[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        whole = len(rows) == batch.num_rows == batch.num_tokens
        return DecodeBucket(
            tokens=None if whole else torch.from_numpy(batch.query_starts[rows].astype(np.int64)),
            pages=pages.transpose(1, 2).flatten(),
            mask=mask[:, None, None, :],
            rows=len(rows),
        )

    def _prefill_row(self, batch: ForwardBatch, row: int) -> PrefillRow:
        start, stop = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        context = int(batch.context_lens[row])
        prefix = context - (stop - start)
        if prefix == 0:
            return PrefillRow(start, stop, context, None, None)
        used = -(-context // self.cache.block_size)
        pages = self.cache.page_index(torch.from_numpy(batch.block_tables[row, :used].copy()))
        hidden = torch.arange(context) > torch.arange(prefix, context)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.cache.tensor.dtype).masked_fill_(hidden, float("-inf"))
        return PrefillRow(start, stop, context, pages.flatten(), mask)

    def _gather(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """[n, token * dim] of the pages in `layer`; valid until the next call."""
        if len(pages) > len(self._scratch):
            self._scratch = self._scratch.new_empty(len(pages), self._scratch.shape[1])
        out = self._scratch[: len(pages)]
        torch.index_select(self._pages, 0, pages + layer * self.cache.page_stride, out=out)
        return out

    def _decode(self, layer: int, q: torch.Tensor, bucket: DecodeBucket) -> torch.Tensor:
        """q [B, heads, dim] → the same shape."""
        rows, heads, dim = bucket.rows, self.cache.num_kv_heads, self.cache.head_dim
        keys, values = self._gather(layer, bucket.pages).view(2, rows, heads, -1, dim).unbind(0)
        folded = (q * self.scale).view(rows, heads, self.group, dim)
        scores = torch.matmul(folded, keys.transpose(-1, -2)).float().add_(bucket.mask)
        weights = scores.softmax(dim=-1).to(q.dtype)
        return torch.matmul(weights, values).view(rows, heads * self.group, dim)

    def _prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: PrefillRow) -> torch.Tensor:
        """[n, heads, dim] of one row. The KV heads stand in for the batch dimension, expanded without a copy."""
        heads, dim, count = self.cache.num_kv_heads, self.cache.head_dim, row.stop - row.start
        query = q[row.start : row.stop].reshape(count, heads, self.group, dim).permute(1, 2, 0, 3)
        if row.pages is None:
            keys, values = k[row.start : row.stop].transpose(0, 1), v[row.start : row.stop].transpose(0, 1)
        else:
            keys, values = self._gather(layer, row.pages).view(2, heads, -1, dim)[:, :, : row.context].unbind(0)
        shape = (heads, self.group, row.context, dim)
        result = scaled_dot_product_attention(
            query,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self.scale,
        )
        return result.permute(2, 0, 1, 3).reshape(count, heads * self.group, dim)

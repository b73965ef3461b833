"""Paged attention for CPUs whose bits for a token depend on that token's own sequence alone (docs/decisions/0006).

Keys come in splits at fixed positions. Every product is of whole tiles of rows with one split; the weights of a row
are relative to its greatest score, so the splits' sums and outputs are simply added, in the order of positions. A split
that is wholly hidden, past a row's end or before its window, adds exact zeros: a row may be computed with more splits
than it has. One token, a chunk of a prompt and the whole prompt therefore give the same bits at the same position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from nori_cluster.attention.base import AttentionPattern, patterns_of
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache
from nori_cluster.device.tiles import ROW_TILE

SPLIT: Final = 128  # least tokens of a split; a whole number of blocks
QUERY_TILE: Final = 64  # tokens of a prompt that share one pass over its keys: their scores should stay in the cache
BUCKET_BYTES: Final = 6 << 20  # gathered KV of one decode bucket, as in cpu_paged
# Rows share a bucket when their numbers of splits lie between the same two edges, so padding stays under half.
EDGES: Final = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048])


@dataclass(frozen=True, slots=True)
class Queries:
    """Some tokens of `rows` sequences, n of each, against the first `splits` splits of their keys."""

    tokens: torch.Tensor | slice  # which of T, sequence by sequence
    rows: int
    splits: int
    mask: torch.Tensor  # float [last splits, rows, 1, m, split]: -inf where hidden, for the last splits only


@dataclass(frozen=True, slots=True)
class Gathered:
    """Pages of some sequences, [2 * splits * rows * kv heads * blocks of a split] in layer 0, and their readers."""

    pages: torch.Tensor
    rows: int
    queries: tuple[Queries, ...]


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    lines: torch.Tensor  # [2 (k|v), T, kv heads] lines in layer 0 where the new KV goes
    views: tuple[tuple[Gathered, ...], ...]  # the rows of the step, once for each window of the model


class CpuInvariantAttention:
    """Owns one scratch buffer for gathered KV; not for use by two threads at once."""

    batch_invariant = True

    def __init__(self, cache: KVCache, num_heads: int, scale: float, patterns: Sequence[AttentionPattern] = ()) -> None:
        patterns = patterns_of(patterns, cache.num_layers)
        self.windows = sorted({pattern.window for pattern in patterns})
        self._view = [self.windows.index(pattern.window) for pattern in patterns]  # of each layer
        self._softcap = [pattern.softcap for pattern in patterns]
        self.cache = cache
        self.group = num_heads // cache.num_kv_heads  # query heads per KV head
        self.scale = scale
        self.split_blocks = -(-SPLIT // cache.block_size)
        self.split = self.split_blocks * cache.block_size
        self.numerics = f"cpu_invariant/{self.split}"
        self._pages = cache.pages()
        self._lines = cache.lines()
        self._scratch = torch.empty(0, self._pages.shape[1], dtype=cache.tensor.dtype, device=cache.tensor.device)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)

    def plan(self, batch: ForwardBatch) -> InvariantPlan:
        single = np.diff(batch.query_starts) == 1
        return InvariantPlan(
            lines=self.cache.line_index(batch.slot_mapping),
            views=tuple(
                (
                    *self._buckets(batch, np.flatnonzero(single), window),
                    *(self._chunk(batch, int(row), window) for row in np.flatnonzero(~single)),
                )
                for window in self.windows
            ),
        )

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: InvariantPlan
    ) -> torch.Tensor:
        lines = plan.lines + layer * (self.cache.page_stride * self.cache.block_size)
        self._lines.index_copy_(0, lines[0].flatten(), k.reshape(-1, k.shape[-1]))
        self._lines.index_copy_(0, lines[1].flatten(), v.reshape(-1, v.shape[-1]))
        out = torch.empty(q.shape, dtype=q.dtype)
        for part in plan.views[self._view[layer]]:
            keys, values = self._gather(layer, part)
            for queries in part.queries:
                out[queries.tokens] = self._attend(q[queries.tokens], keys, values, queries, self._softcap[layer])
        return out

    def _buckets(self, batch: ForwardBatch, rows: NDArray[np.int64], window: int) -> Iterator[Gathered]:
        """Rows of one token, those of like length together."""
        if not len(rows):
            return
        splits = -(-batch.context_lens[rows] // self.split)
        classes = np.searchsorted(EDGES, splits)
        split_bytes = self.cache.page_stride * self.split * self.cache.head_dim * self.cache.tensor.element_size()
        for kind in np.unique(classes):
            members = rows[classes == kind]
            longest = int(splits[classes == kind].max())
            most = max(1, BUCKET_BYTES // (longest * split_bytes))
            for first in range(0, len(members), most):
                yield self._bucket(batch, members[first : first + most], longest, window)

    def _bucket(self, batch: ForwardBatch, rows: NDArray[np.int64], splits: int, window: int) -> Gathered:
        ends = torch.from_numpy(batch.context_lens[rows]).view(-1, 1, 1, 1)
        places = torch.arange(splits * self.split).view(splits, 1, 1, 1, self.split)
        hidden = places >= ends
        if window:
            hidden |= places < ends - window
        whole = len(rows) == batch.num_rows == batch.num_tokens
        tokens = slice(0, len(rows)) if whole else torch.from_numpy(batch.query_starts[rows].astype(np.int64))
        queries = Queries(tokens, len(rows), splits, _mask(hidden))
        return Gathered(self._page_index(batch, rows, splits), len(rows), (queries,))

    def _chunk(self, batch: ForwardBatch, row: int, window: int) -> Gathered:
        """Several tokens of one sequence, QUERY_TILE at a time."""
        start, stop = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        context = int(batch.context_lens[row])
        tiles = []
        for first in range(start, stop, QUERY_TILE):
            last = min(first + QUERY_TILE, stop)
            places = torch.arange(first, last) - stop + context
            clear = 0 if window else int(places[0]) // self.split  # splits that every token of the tile sees whole
            splits = int(places[-1]) // self.split + 1
            keys = torch.arange(clear * self.split, splits * self.split).view(-1, 1, 1, 1, self.split)
            own = places.repeat_interleave(self.group).view(-1, 1)
            hidden = keys > own
            if window:
                hidden |= keys <= own - window
            hidden = pad(hidden, (0, 0, 0, -hidden.shape[3] % ROW_TILE))
            tiles.append(Queries(slice(first, last), 1, splits, _mask(hidden)))
        rows = np.array([row])
        return Gathered(self._page_index(batch, rows, -(-context // self.split)), 1, tuple(tiles))

    def _page_index(self, batch: ForwardBatch, rows: NDArray[np.int64], splits: int) -> torch.Tensor:
        blocks = splits * self.split_blocks
        used = -(-batch.context_lens[rows] // self.cache.block_size)
        # Padding is the row's own first block: a weight of 0 times another row's NaN would still be NaN.
        tables = batch.block_tables[rows, :blocks]
        table = np.repeat(tables[:, :1], blocks, axis=1)
        table[:, : tables.shape[1]] = np.where(np.arange(tables.shape[1]) < used[:, None], tables, tables[:, :1])
        pages = self.cache.page_index(torch.from_numpy(table))  # [2, head, row, blocks]
        return pages.view(*pages.shape[:3], splits, -1).permute(0, 3, 2, 1, 4).flatten()

    def _gather(self, layer: int, part: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [splits, rows, kv heads, split, dim], valid until the next call."""
        pages = part.pages
        if len(pages) > len(self._scratch):
            self._scratch = self._scratch.new_empty(len(pages), self._scratch.shape[1])
        out = self._scratch[: len(pages)]
        torch.index_select(self._pages, 0, pages + layer * self.cache.page_stride, out=out)
        shape = (2, -1, part.rows, self.cache.num_kv_heads, self.split, self.cache.head_dim)
        keys, values = out.view(shape).unbind(0)
        return keys, values

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, queries: Queries, cap: float
    ) -> torch.Tensor:
        """q [rows * n, heads, dim] → the same shape. m: n · group rows of a product, filled up to whole tiles."""
        rows, splits = queries.rows, queries.splits
        heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        used = len(q) // rows * self.group
        folded = (q * self.scale).view(rows, -1, heads, self.group, dim).transpose(1, 2).reshape(rows, heads, used, dim)
        folded = pad(folded, (0, 0, 0, -used % ROW_TILE))
        scores = torch.matmul(folded, keys[:splits].transpose(-1, -2)).float()  # [splits, rows, heads, m, split]
        if cap:
            scores = scores.div_(cap).tanh_().mul_(cap)
        scores[splits - len(queries.mask) :] += queries.mask
        weights = scores.sub_(scores.amax(dim=(0, 4), keepdim=True)).exp_()
        parts = torch.matmul(weights.to(q.dtype), values[:splits]).float()  # [splits, rows, heads, m, dim]
        sums = weights.sum(dim=-1, keepdim=True)
        out, total = parts[0], sums[0]
        for split in range(1, splits):
            out.add_(parts[split])
            total.add_(sums[split])
        out = out.div_(total)[:, :, :used].to(q.dtype)
        return out.view(rows, heads, -1, self.group, dim).transpose(1, 2).reshape(q.shape)


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

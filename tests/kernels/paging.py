"""Sequences in a paged cache whose every unused slot is NaN, in blocks that lie in random order."""

import numpy as np
import torch

from nori_kernels.layout import PagedKV, layer_view
from nori_kernels.paged_decode import DecodeRows
from nori_kernels.paged_prefill import PrefillRows
from nori_kernels.splits import plan_splits, plan_tiles
from nori_kernels.testing import Inputs


class Paged:
    """lengths: tokens of each sequence. cache: [block, 2 layers, k|v, head, token, dim]; layer 1 is used."""

    def __init__(
        self, inputs: Inputs, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, block: int = 16
    ) -> None:
        self.inputs, self.lengths, self.block = inputs, lengths, block
        blocks = [-(-length // block) for length in lengths]
        self.cache = torch.full((sum(blocks) + 3, 2, 2, kv_heads, block, dim), float("nan")).to(dtype)
        scales = inputs.uniform(2, kv_heads, low=0.5, high=2.0) if dtype == torch.float8_e4m3fn else None
        self.kv: PagedKV = layer_view(self.cache, 1, scales)
        order = inputs.permutation(len(self.cache))
        self.tables = torch.full((len(lengths), max([*blocks, 1]) + 1), 2**30, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(blocks):
            self.tables[row, :count] = order[taken : taken + count]
            taken += count
            for place in range(lengths[row]):
                page, within = int(self.tables[row, place // block]), place % block
                self.cache[page, 1, :, :, within] = inputs.normal(2, kv_heads, dim, dtype=dtype)

    def moved(self) -> tuple[PagedKV, torch.Tensor]:
        """The same sequences with all blocks elsewhere: (kv, tables)."""
        order = self.inputs.permutation(len(self.cache))
        cache = torch.empty_like(self.cache)
        for old, new in enumerate(order.tolist()):
            cache[new] = self.cache[old]
        tables = torch.where(self.tables < len(order), order[self.tables.clamp(max=len(order) - 1).long()], self.tables)
        return layer_view(cache, 1, self.kv.scales), tables.int()

    def decode_rows(self, tile: int = 64, programs: int = 8, window: int = 0, fixed: int | None = None) -> DecodeRows:
        """Every sequence's last token; row r is token R - 1 - r."""
        context = np.array(self.lengths, np.int32)
        items, starts = plan_splits(context, programs, tile, window, fixed)
        rows = torch.arange(len(context) - 1, -1, -1, dtype=torch.int32)
        return DecodeRows(
            torch.from_numpy(items), torch.from_numpy(starts), rows, self.tables, torch.from_numpy(context)
        )

    def prefill_rows(self, counts: list[int], tile_rows: int, group: int) -> PrefillRows:
        """The last counts[r] tokens of each sequence are new."""
        new = np.array(counts, np.int32)
        first = np.concatenate([[0], np.cumsum(new)[:-1]]).astype(np.int32)
        return PrefillRows(
            tiles=torch.from_numpy(plan_tiles(new, tile_rows // group)),
            tile_rows=tile_rows,
            first_tokens=torch.from_numpy(first),
            query_lens=torch.from_numpy(new),
            tables=self.tables,
            context_lens=torch.tensor(self.lengths, dtype=torch.int32),
        )

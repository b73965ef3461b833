"""Paged KV memory of one worker: one tensor, block-major, all layers of a block contiguous.

worker/ sizes and owns it; attention backends write and read it through strided views or flat pages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class KVCache:
    """tensor: [block][layer][k|v][head][token][dim]. A page is [token][dim] of one (block, layer, k|v, head)."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * num_layers * num_kv_heads * block_size * head_dim * dtype.itemsize

    def layer(self, index: int) -> torch.Tensor:
        """[block, k|v, head, token, dim]: a strided view of one layer."""
        return self.tensor[:, index]

    def pages(self) -> torch.Tensor:
        """[block * layer * 2 * head, token * dim]: every page a row; see page_index."""
        return self.tensor.view(-1, self.block_size * self.head_dim)

    def lines(self) -> torch.Tensor:
        """[block * layer * 2 * head * token, dim]: one token of one head a row."""
        return self.tensor.view(-1, self.head_dim)

    def page_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """int64 [2 (k|v), head, *blocks.shape]: pages of these blocks in layer 0; add layer * page_stride."""
        per_block = self.num_layers * self.page_stride
        within = torch.arange(self.page_stride, device=blocks.device).view(2, self.num_kv_heads)
        return within.view(2, self.num_kv_heads, *(1,) * blocks.dim()) + blocks.to(torch.int64) * per_block

    def line_index(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [2 (k|v), T, head]: lines in layer 0 of slot numbers [T]; add layer * page_stride * block_size."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        pages = self.page_index(blocks)  # [2, head, T]
        return (pages * self.block_size + offsets).transpose(1, 2).contiguous()

    @property
    def page_stride(self) -> int:
        """Pages from one layer of a block to the next."""
        return 2 * self.num_kv_heads

    def clear(self, blocks: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Zero whole blocks, so that nothing of an earlier owner (a NaN included) can reach the next one."""
        index = torch.from_numpy(np.array(blocks, np.int64)).to(self.tensor.device)
        self.tensor.index_fill_(0, index, 0)

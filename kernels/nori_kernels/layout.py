"""Where a token's K and V lie: memory is [block][layer][k|v][head][token][dim] and kernels see one layer of it.

Every address of the cache in a kernel comes from token_offsets, in int64: a cache of 141 GB has 2**36 elements.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class PagedKV(NamedTuple):
    """One layer of the cache. keys and values: [block, kv head, token, dim] views with equal strides, dim contiguous.

    scales: None, or float32 [2 (k|v), kv heads]; what is stored times its head's scale is the value.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from one block, head and token to the next."""
        return self.keys.stride()[:3]


def layer_view(cache: torch.Tensor, layer: int, scales: torch.Tensor | None = None) -> PagedKV:
    """cache: [block, layer, k|v, head, token, dim]. ValueError unless dim is contiguous."""
    if cache.dim() != 6 or cache.shape[2] != 2 or cache.stride(5) != 1:
        raise ValueError(
            f"a cache is [block, layer, 2, head, token, dim] with contiguous dim, not {tuple(cache.shape)}"
        )
    if scales is not None and scales.shape != (2, cache.shape[3]):
        raise ValueError(f"scales are [2, {cache.shape[3]}], not {tuple(scales.shape)}")
    return PagedKV(cache[:, layer, 0], cache[:, layer, 1], scales)


def gather_reference(kv: PagedKV, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) float64 [length, kv heads, dim] of the sequence whose blocks `table` lists."""
    blocks = table[: -(-length // kv.block_size)].long()
    pair = []
    for part, pages in enumerate((kv.keys, kv.values)):
        lines = pages[blocks].double().transpose(1, 2).flatten(0, 1)[:length]
        pair.append(lines if kv.scales is None else lines * kv.scales[part].double()[:, None])
    return pair[0], pair[1]


@triton.jit
def token_offsets(table_ptr, positions, mask, head, stride_block, stride_head, stride_token, BLOCK_SIZE: tl.constexpr):
    """int64 offsets of tokens at `positions` of one sequence; table_ptr: its int32 block table. 0 where masked."""
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    within = (positions % BLOCK_SIZE).to(tl.int64)
    return blocks * stride_block + head.to(tl.int64) * stride_head + within * stride_token

"""The oracle: one row and one head at a time, float32 or better, nothing clever. Runs on any device and dtype."""

from collections.abc import Sequence

import torch

from nori_cluster.attention.base import AttentionPattern, patterns_of
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache


class ReferenceAttention:
    """Slow and obvious; also the CUDA backend until the kernels come."""

    batch_invariant = False
    numerics = "reference"

    def __init__(self, cache: KVCache, num_heads: int, scale: float, patterns: Sequence[AttentionPattern] = ()) -> None:
        self.cache = cache
        self.patterns = patterns_of(patterns, cache.num_layers)
        self.num_heads = num_heads
        self.scale = scale

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return True

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ForwardBatch
    ) -> torch.Tensor:
        size = self.cache.block_size
        view = self.cache.layer(layer)  # [block, k|v, head, token, dim]
        blocks, offsets = plan.slot_mapping // size, plan.slot_mapping % size
        view[:, 0][blocks, :, offsets] = k.to(view.dtype)
        view[:, 1][blocks, :, offsets] = v.to(view.dtype)
        out = torch.empty_like(q)
        for row in range(plan.num_rows):
            start, stop = int(plan.query_starts[row]), int(plan.query_starts[row + 1])
            context = int(plan.context_lens[row])
            table = torch.as_tensor(plan.block_tables[row, : -(-context // size)], dtype=torch.int64, device=q.device)
            keys, values = view[table].unbind(1)  # [blocks, head, token, dim] each
            for head in range(self.num_heads):
                source = head // (self.num_heads // self.cache.num_kv_heads)
                out[start:stop, head] = self._attend(
                    q[start:stop, head],
                    keys[:, source].reshape(-1, q.shape[-1])[:context],
                    values[:, source].reshape(-1, q.shape[-1])[:context],
                    self.patterns[layer],
                )
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: AttentionPattern) -> torch.Tensor:
        """q [n, dim] are the last n of the context's tokens; k, v [context, dim]."""
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = q.to(exact) @ k.to(exact).T * self.scale
        if pattern.softcap:
            scores = pattern.softcap * (scores / pattern.softcap).tanh()
        context, count = len(k), len(q)
        places = torch.arange(context, device=q.device)
        own = places[context - count :, None]
        hidden = places > own
        if pattern.window:
            hidden |= places <= own - pattern.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return (weights @ v.to(exact)).to(q.dtype)

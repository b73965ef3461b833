"""Token embedding and output head, split over the ranks by vocabulary; the vocabulary is padded to a multiple of them.

Padding rows are zero, and the head cuts them off before anybody can see them.
"""

import torch
from torch import nn
from torch.nn.functional import embedding

from nori_cluster.layers.shard import LayerContext, Shard
from nori_cluster.quant.none import Unquantized


class VocabEmbedding(nn.Module):
    """Rows rank · n : (rank + 1) · n of the padded vocabulary, n = ⌈vocab / size⌉. weight: [n, hidden]."""

    def __init__(self, vocab: int, hidden: int, context: LayerContext) -> None:
        super().__init__()
        self.group = context.group
        self.vocab, self.hidden = vocab, hidden
        self.rows = -(-vocab // self.group.size)
        self.first = self.group.rank * self.rows
        weight = torch.empty(self.rows, hidden, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def shard(self, parameter: str, part: str) -> Shard:
        every = slice(0, self.hidden)
        source = slice(min(self.first, self.vocab), min(self.first + self.rows, self.vocab))
        return Shard((self.vocab, self.hidden), (source, every), (slice(0, self.rows), every))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] → [T, hidden]."""
        if self.group.size == 1:
            return embedding(ids, self.weight)
        local = ids - self.first
        foreign = (local < 0) | (local >= self.rows)
        found = embedding(local.masked_fill(foreign, 0), self.weight)
        return self.group.all_reduce(found.masked_fill_(foreign[:, None], 0))


class VocabHead(VocabEmbedding):
    """[n, hidden] → float32 logits [n, vocab] on rank 0, None elsewhere. May share its weight with the embedding."""

    def __init__(self, vocab: int, hidden: int, context: LayerContext) -> None:
        super().__init__(vocab, hidden, context)
        self.quant = context.method(Unquantized)  # heads keep their precision whatever the layers do

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        logits = self.group.gather(self.quant.apply(self, x))
        return None if logits is None else logits[:, : self.vocab].float().contiguous()

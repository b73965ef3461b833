"""Whether this machine's kernels keep the promise of batch-invariant mode, tried on the loaded model before it serves.

The promise rests on how libraries choose their loops (docs/decisions/0006), so it is not taken on trust.
"""

import numpy as np
import torch

from nori_cluster.attention.base import AttentionBackend
from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache
from nori_cluster.models.base import ModelSpec
from nori_cluster.models.decoder import Decoder

CHUNKS = (1, 2, 3, 4, 5, 6, 7, 9, 17, 31, 64, 100)  # one sequence cut so
ROWS = (1, 2, 3, 5, 7, 8, 13)  # and its last token, so many times in one batch


@torch.inference_mode()
def keeps_bits(model: Decoder, backend: AttentionBackend, cache: KVCache) -> bool:
    """One sequence through the first layer of each kind and the head: whole, in chunks, and its last token in batches.

    The same answer on every rank. Uses the first blocks of the cache and leaves them zeroed.
    """
    length = min(sum(CHUNKS), cache.num_blocks * cache.block_size)
    used = np.arange(-(-length // cache.block_size), dtype=np.int32)
    cache.clear(used)
    whole = _run(model, backend, cache, [(0, length)])
    same, start = True, 0
    while start < length:
        for count in CHUNKS:
            stop = min(start + count, length)
            if stop > start:
                found = _run(model, backend, cache, [(start, stop)])
                same &= _equal(found, [part if part is None else part[start:stop] for part in whole])
            start = stop
    for rows in ROWS:
        found = _run(model, backend, cache, [(length - 1, length)] * rows)
        last = [part if part is None else part[-1:].expand(rows, -1) for part in whole]
        same &= _equal(found, last)
    cache.clear(used)
    return bool(model.embed.group.minimum(int(same)))


def _run(
    model: Decoder, backend: AttentionBackend, cache: KVCache, rows: list[tuple[int, int]]
) -> list[torch.Tensor | None]:
    """Hidden states of the layers tried and the logits of them, for rows of (first, end) tokens of the one sequence."""
    device = cache.tensor.device
    positions = np.concatenate([np.arange(first, end) for first, end in rows])
    places = torch.from_numpy(positions).to(device)
    blocks = -(-max(end for _, end in rows) // cache.block_size)
    batch = ForwardBatch(
        token_ids=places * 7919 % model.spec.vocab_size,
        positions=places,
        slot_mapping=places,
        query_starts=np.cumsum([0, *(end - first for first, end in rows)]).astype(np.int32),
        context_lens=np.array([end for _, end in rows], np.int32),
        block_tables=np.tile(np.arange(blocks, dtype=np.int32), (len(rows), 1)),
        sample_rows=np.arange(0),
        sample_places=np.arange(0),
        sample_tokens=places[:0],
    )
    x = model.embedded(batch)
    rotations, plan = model.rotations(batch, x.dtype), backend.plan(batch)
    for index in _tried(model.spec):
        x = model.layers[index](x, rotations[model.rope_of_layer[index]], backend, plan)
    return [x, model.logits(x)]


def _tried(spec: ModelSpec) -> list[int]:
    """The first layer, and the first one with experts where that is another."""
    with_experts = spec.experts.layers if spec.experts is not None else ()
    return sorted({0, with_experts.index(True)} if True in with_experts else {0})


def _equal(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(a is None or b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))

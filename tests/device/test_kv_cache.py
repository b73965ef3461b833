"""KVCache: layout, flat pages, clearing."""

import pytest
import torch

from nori_cluster.device.kv_cache import KVCache

pytestmark = pytest.mark.unit


def test_pages_are_the_tensor_seen_flat() -> None:
    cache = KVCache(5, 3, 2, 4, 8, torch.float32, torch.device("cpu"))
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view(cache.tensor.shape))
    blocks = torch.tensor([3, 0])
    index = cache.page_index(blocks) + 1 * cache.page_stride  # layer 1
    assert index.shape == (2, 2, 2)
    for kv in range(2):
        for head in range(2):
            for place, block in enumerate(blocks.tolist()):
                page = cache.pages()[index[kv, head, place]].view(4, 8)
                assert torch.equal(page, cache.tensor[block, 1, kv, head])


def test_layer_is_a_view() -> None:
    cache = KVCache(4, 2, 1, 4, 8, torch.float32, torch.device("cpu"))
    cache.layer(1)[2] = 7.0
    assert torch.equal(cache.tensor[2, 1], torch.full((2, 1, 4, 8), 7.0))
    assert cache.tensor.sum() == 7.0 * 2 * 4 * 8


def test_clear_removes_nan() -> None:
    cache = KVCache(4, 2, 1, 4, 8, torch.float32, torch.device("cpu"))
    cache.tensor.fill_(float("nan"))
    cache.clear([1, 3])
    assert (cache.tensor[[1, 3]] == 0).all()
    assert cache.tensor[[0, 2]].isnan().all()


def test_block_bytes() -> None:
    cache = KVCache(4, 2, 3, 16, 8, torch.bfloat16, torch.device("cpu"))
    assert KVCache.block_bytes(2, 3, 16, 8, torch.bfloat16) * 4 == cache.tensor.nbytes

"""The kernel's Philox words are those of the CPU sampler, bit for bit."""

import numpy as np
import pytest
import torch

from nori_cluster.worker.philox import philox
from nori_kernels.philox import philox_reference, philox_words

pytestmark = pytest.mark.contract
SEEDS = np.array([0, 1, 42, 2**32 - 1, 2**33 + 5, 2**63, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)


def test_words_are_bit_equal() -> None:
    index = np.array([0, 1, 2**31, 2**32 - 1, 7, 8, 9, 10], np.uint64)
    who = np.array([0, 2**32 - 1, 3, 2**31, 0, 1, 2, 3], np.uint64)
    for level, count in ((0, 131), (1, 64)):
        word = np.arange(-(-count // 4), dtype=np.uint64)[None, :]
        counter = (word, index[:, None], who[:, None], np.full_like(word, level))
        expected = philox(counter, SEEDS[:, None]).reshape(len(SEEDS), -1)[:, :count]
        assert np.array_equal(philox_reference(counter, SEEDS[:, None]).reshape(len(SEEDS), -1)[:, :count], expected)
        arguments = (torch.from_numpy(a.view(np.int64)) for a in (SEEDS, index, who))
        assert np.array_equal(philox_words(*arguments, level, count).numpy().view(np.uint64), expected)


def test_first_word_of_seed_zero_is_the_published_one() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert int(philox_words(zero, zero, zero, 0, 1)[0, 0]) == 0x6627E8D5

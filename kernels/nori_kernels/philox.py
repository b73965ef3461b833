"""Philox4x32-10 (Salmon et al. 2011) in a kernel: the words of the CPU sampler's philox, bit for bit.

Counter (c0, c1, c2, c3) of 32-bit words, key (k0, k1) = low and high half of the seed; tl.philox has the same
rounds. All noise of a draw is numbered: word w is lane w % 4 of counter (w / 4, output index, candidate, level).
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from nori_kernels.variant import Variant

BLOCK = 128


def philox_reference(counter: tuple[NDArray[np.uint64], ...], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter: four arrays of 32-bit words in uint64, key uint64; broadcast together → [..., 4]."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key & low, key >> shift
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & low, (a >> shift) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


@triton.jit
def words_at(word, index, candidate, level, seed):
    """Random word `word` (int32 tile) of one draw: lane word % 4 of counter (word / 4, index, candidate, level)."""
    zero = (word * 0).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(seed, (word // 4).to(tl.uint32), zero + index, zero + candidate, zero + level)
    lane = word % 4
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@triton.jit
def philox_kernel(seed_ptr, index_ptr, candidate_ptr, out_ptr, out_stride, count, level, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + row).to(tl.uint32)
    candidate = tl.load(candidate_ptr + row).to(tl.uint32)
    values = words_at(word, index, candidate, level.to(tl.uint32), tl.load(seed_ptr + row))
    tl.store(out_ptr + row * out_stride + word, values.to(tl.int64), mask=word < count)


def philox_words(
    seed: torch.Tensor, index: torch.Tensor, candidate: torch.Tensor, level: int, count: int
) -> torch.Tensor:
    """The first `count` words of n draws, int64 [n, count] in 0 : 2^32.

    seed int64 [n]: the 64 bits of the key; index and candidate int64 [n] below 2^32; level: 0 = of a block, 1 = inside.
    """
    out = torch.empty(len(seed), count, dtype=torch.int64, device=seed.device)
    if out.numel():
        philox_kernel[(len(seed), triton.cdiv(count, BLOCK))](
            seed, index, candidate, out, out.stride(0), count, level, BLOCK=BLOCK
        )
    return out


VARIANTS = [
    Variant(
        kernel=philox_kernel,
        label="words",
        signature={
            "seed_ptr": "*i64",
            "index_ptr": "*i64",
            "candidate_ptr": "*i64",
            "out_ptr": "*i64",
            "out_stride": "i64",
            "count": "i32",
            "level": "i32",
        },
        constexprs={"BLOCK": BLOCK},
    )
]

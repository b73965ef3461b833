"""Philox4x32-10 (Salmon et al. 2011): random words as a pure function of key and counter, equal on every device.

The sampler's only source of randomness. Bit-equal to Triton's tl.randint4x for counters (offset, 0, 0, 0).
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # 32-bit values in 64-bit lanes

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10


def philox(counter: tuple[Words, Words, Words, Words], key: Words) -> Words:
    """counter: four arrays of 32-bit words, key: 64-bit; all broadcast together. Returns [..., 4] 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> _SHIFT
    for _ in range(ROUNDS):
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def gumbel(words: Words) -> NDArray[np.float64]:
    """Standard Gumbel noise from uniform 32-bit words; finite for each of them."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise

"""Costs of kernels that go over rows: norm, activation, embedding, quantization, sampling, log-probabilities."""

from floor import SIZES, Cost, ceil_div

GATED = {"silu": 5, "gelu": 6, "gelu_tanh": 10}  # operations a value, the product with up among them
QUANTIZE = 3  # magnitude, maximum, division
PHILOX = 100  # of a word: ten rounds of four products, four exclusive ors and two sums
PASSES = 16  # over the vocabulary by `reach`: 32 bits, two a pass
ENDS = 4  # of a pass, each with a comparison and a sum a value


def rms_norm(rows: int = 32, hidden: int = 4096, dtype: str = "bf16", out: str = "bf16", residual: bool = True) -> Cost:
    """x, weight and result; with a residual that is read and written. out of one byte: quantized, a scale a row."""
    size, quantize, values = SIZES[dtype], SIZES[out] == 1, rows * hidden
    moved = values * (size + SIZES[out] + 2 * size * residual) + hidden * size + 4 * rows * quantize
    return Cost(moved, values * (4 + residual + QUANTIZE * quantize), "fp32")


def gated(rows: int = 32, inner: int = 14336, dtype: str = "bf16", kind: str = "silu") -> Cost:
    return Cost(3 * rows * inner * SIZES[dtype], rows * inner * GATED[kind], "fp32")


def gated_quantized(rows: int = 32, inner: int = 14336, dtype: str = "bf16", kind: str = "silu") -> Cost:
    """One byte a result and a scale a row; every value is computed twice."""
    moved = rows * (2 * inner * SIZES[dtype] + inner + 4)
    return Cost(moved, rows * inner * (2 * GATED[kind] + QUANTIZE), "fp32")


def embed(tokens: int = 32, hidden: int = 4096, dtype: str = "bf16", own: int = 0) -> Cost:
    """own: tokens whose ids this rank holds (0: all); the others' rows are written only. Ids of 8 bytes."""
    return Cost(8 * tokens + ((own or tokens) + tokens) * hidden * SIZES[dtype], 0, "fp32")


def quantize_rows(rows: int = 32, width: int = 4096, dtype: str = "bf16", group: int = 0) -> Cost:
    """group: columns of one scale, 0 for the whole row."""
    scales = rows * (ceil_div(width, group) if group else 1)
    return Cost(rows * width * (SIZES[dtype] + 1) + 4 * scales, QUANTIZE * rows * width, "fp32")


def quantize_static(rows: int = 32, width: int = 4096, dtype: str = "bf16") -> Cost:
    return Cost(rows * width * (SIZES[dtype] + 1) + 4, rows * width, "fp32")


def edit_scores(
    rows: int = 32,
    vocab: int = 128256,
    dtype: str = "fp32",
    penalties: bool = True,
    mask: bool = True,
    allowed: bool = True,
) -> Cost:
    """penalties: int32 counts and a byte of prompt per id, 16 bytes a row. mask: a bit per id; allowed: a byte.

    Operations an id: 3 against NaN and infinities, 4 of penalties, 3 of the mask, 1 of allowed.
    """
    values = rows * vocab
    moved = values * (SIZES[dtype] + 4) + (5 * values + 16 * rows) * penalties
    moved += rows * (4 * ceil_div(vocab, 32) + 4) * mask + vocab * allowed
    return Cost(moved, values * (3 + 4 * penalties + 3 * mask + allowed), "fp32")


def choose(rows: int = 32, vocab: int = 128256, drawn: bool = True, top_k: bool = True, top_p: bool = True) -> Cost:
    """Scores once and 45 bytes a row. Each pass over a drawn row subtracts and divides; the noise is not counted."""
    each = 1  # of an id: the likeliest
    if drawn:
        each += 4  # exponential and sum for the draw
        each += PASSES * (2 + 2 * ENDS) * top_k
        each += (4 + PASSES * (3 + 2 * ENDS)) * top_p
    return Cost(rows * (4 * vocab + 45), rows * vocab * each, "fp32")


def logprobs(rows: int = 32, vocab: int = 128256, most: int = 5, dtype: str = "fp32") -> Cost:
    """Maximum and sum of exponentials, then two comparisons an id for each of the `most` likeliest."""
    return Cost(rows * (vocab * SIZES[dtype] + 8 + 8 * most), rows * vocab * (4 + 2 * most), "fp32")


def philox(rows: int = 32, words: int = 2048) -> Cost:
    """Of `rows` draws: 24 bytes in, 8 a word out. A word's counter is computed for each of its four words."""
    return Cost(rows * (24 + 8 * words), PHILOX * rows * words, "fp32")

"""Costs of attention's kernels: of one layer on one rank, for `rows` rows alike."""

from floor import SIZES, Cost


def paged_decode(
    rows: int = 32,
    context: int = 2048,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    window: int = 0,
    items: int = 0,
) -> Cost:
    """One token a row over `context` keys, or the window's; items: of all rows (0: one a row), written in float32."""
    keys = rows * (min(context, window) if window else context)
    queries = rows * heads * dim * SIZES[dtype]
    results = (items or rows) * heads * (dim + 1) * 4
    moved = 2 * keys * kv_heads * dim * SIZES[kv_dtype] + queries + results
    return Cost(moved, 4 * keys * heads * dim, dtype)


def merge_splits(rows: int = 32, items: int = 32, heads: int = 32, dim: int = 128, dtype: str = "bf16") -> Cost:
    """Per item, head and dim two products and a sum, per result a division."""
    results = rows * heads * dim
    moved = items * heads * (dim + 1) * 4 + (2 * rows + 1) * 4 + results * SIZES[dtype]
    return Cost(moved, 3 * items * heads * dim + results, "fp32")


def paged_prefill(
    rows: int = 32,
    context: int = 2048,
    new: int = 512,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
) -> Cost:
    """`new` tokens a row over a prefix of `context`: every key once, every visible pair of query and key."""
    pairs = rows * (context * new + new * (new + 1) // 2)
    queries = rows * new * heads * dim * SIZES[dtype]
    moved = 2 * rows * (context + new) * kv_heads * dim * SIZES[kv_dtype] + 2 * queries
    return Cost(moved, 4 * pairs * heads * dim, dtype)


def cache_write(
    tokens: int = 512,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    rotate: bool = True,
) -> Cost:
    """k and v read and stored, a slot of 8 bytes; with rope q read and stored, cos and sin read.

    Turning a value takes three operations.
    """
    size = SIZES[dtype]
    moved = 2 * tokens * kv_heads * dim * (size + SIZES[kv_dtype]) + 8 * tokens
    if rotate:
        moved += 2 * tokens * heads * dim * size + tokens * dim * size
    return Cost(moved, 3 * tokens * (heads + kv_heads) * dim * rotate, "fp32")

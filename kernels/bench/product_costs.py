"""Costs of products of quantized operands and of a mixture of experts' kernels."""

from floor import SIZES, Cost, ceil_div

GROUP = 128  # rows and columns of one block scale
RUN = 64  # columns that a packed weight is filled up to


def scaled_gemm(
    rows: int = 32,
    columns: int = 4096,
    inner: int = 4096,
    operands: str = "fp8e4nv",
    out: str = "bf16",
    scales: str = "row",
    bias: bool = False,
) -> Cost:
    """Operands of one byte; scaling is not counted.

    scales: "tensor" two in all, "row" rows + columns, "block" one per 128 of inner for a row or 128 columns.
    """
    groups = ceil_div(inner, GROUP)
    count = {
        "tensor": 2,
        "row": rows + columns,
        "block": (rows + ceil_div(columns, GROUP)) * groups,
    }[scales]
    moved = (rows + columns) * inner + 4 * count + (rows + bias) * columns * SIZES[out]
    return Cost(moved, 2 * rows * columns * inner, operands)


def weight_gemm(
    rows: int = 32,
    columns: int = 4096,
    inner: int = 4096,
    bits: int = 4,
    group: int = 128,
    dtype: str = "bf16",
    bias: bool = False,
) -> Cost:
    """Weights of `bits` in whole runs, a scale and a zero of one byte per group; the product is of `dtype`."""
    size = SIZES[dtype]
    weight = columns * (ceil_div(inner, RUN) * RUN * bits // 8 + ceil_div(inner, group) * (size + 1))
    moved = weight + (rows * inner + (rows + bias) * columns) * size
    return Cost(moved, 2 * rows * columns * inner, dtype)


def route(tokens: int = 32, experts: int = 128, choices: int = 8, dtype: str = "bf16") -> Cost:
    """Maximum and sum of exponentials, then one comparison a logit and choice; a weight and a number a choice."""
    return Cost(tokens * (experts * SIZES[dtype] + 8 * choices), tokens * experts * (4 + choices), "fp32")


def count_slots(tokens: int = 32, experts: int = 128, choices: int = 8) -> Cost:
    """Every expert compares and sums every slot."""
    slots = tokens * choices
    return Cost(4 * (slots + experts), 2 * experts * slots, "fp32")


def place_slots(tokens: int = 32, experts: int = 128, choices: int = 8, tiles: int = 128, tile: int = 16) -> Cost:
    """As count_slots; `tiles` tiles of slots and an expert for each are written."""
    slots = tokens * choices
    return Cost(4 * (slots + experts + tiles * (tile + 1)), 2 * experts * slots, "fp32")


def grouped_gemm(
    slots: int = 256,
    shared: int = 8,
    touched: int = 128,
    columns: int = 1536,
    inner: int = 2048,
    dtype: str = "bf16",
) -> Cost:
    """touched: experts that any slot chose, whose weights are read; shared: slots that read a row of x."""
    size = SIZES[dtype]
    moved = (slots // shared * inner + touched * columns * inner + slots * columns) * size + 4 * slots
    return Cost(moved, 2 * slots * columns * inner, dtype)


def reduce_slots(tokens: int = 32, choices: int = 8, width: int = 2048, dtype: str = "bf16") -> Cost:
    slots = tokens * choices
    return Cost((slots + tokens) * width * SIZES[dtype] + 4 * slots, 2 * slots * width, "fp32")

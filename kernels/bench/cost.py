"""What a kernel must at least move and compute, from shapes; a measured time prints as a fraction of that floor.

The floor is the longer of bytes / bandwidth and operations / peak rate of the part: no launch, no latency, overlapped.
`python kernels/bench/cost.py decode --rows 32 --context 2048 --target sm_90 --measured-us 120`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nori_kernels.targets import TARGETS, Target

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and head_dim of one layer on one rank, dtypes of queries and cache."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def query_bytes(self, tokens: int) -> int:
        return tokens * self.query * self.dim * SIZES[self.dtype]

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values."""
        return 2 * tokens * self.kv * self.dim * SIZES[self.kv_dtype]


@dataclass(frozen=True, slots=True)
class Cost:
    """bytes: to and from device memory, each once. operations: multiply and add counted as two, by tensor cores."""

    bytes: int
    operations: int
    dtype: str  # of the operands

    def floor_s(self, target: Target) -> float:
        return max(self.bytes / target.bytes_per_s, self.operations / target.operations_per_s[self.dtype])

    def fraction(self, target: Target, measured_s: float) -> float:
        """Of the floor that a measured time reaches: 1 is perfect. ValueError unless the time is positive."""
        if measured_s <= 0:
            raise ValueError(f"a measured time is positive, not {measured_s}")
        return self.floor_s(target) / measured_s


def decode(heads: Heads, context: Sequence[int], splits: int = 0, window: int = 0) -> Cost:
    """paged_decode of one token per row; splits: items in all, whose float32 partial results are written and read."""
    keys = sum(min(length, window) if window else length for length in context)
    partial = 2 * splits * heads.query * (heads.dim + 1) * 4
    moved = heads.kv_bytes(keys) + 2 * heads.query_bytes(len(context)) + partial
    return Cost(moved, 4 * keys * heads.query * heads.dim, heads.dtype)


def prefill(heads: Heads, rows: Sequence[tuple[int, int]]) -> Cost:
    """paged_prefill of (prefix, new tokens) rows: every key once, every visible pair of query and key."""
    tokens = sum(new for _, new in rows)
    pairs = sum(prefix * new + new * (new + 1) // 2 for prefix, new in rows)
    moved = heads.kv_bytes(sum(prefix + new for prefix, new in rows)) + 2 * heads.query_bytes(tokens)
    return Cost(moved, 4 * pairs * heads.query * heads.dim, heads.dtype)


def cache_write(heads: Heads, tokens: int, rotate: bool = True) -> Cost:
    """k and v read and stored; with rope q read and stored, cos and sin read."""
    size = SIZES[heads.dtype]
    moved = 2 * tokens * heads.kv * heads.dim * size + heads.kv_bytes(tokens) + 8 * tokens
    rotated = tokens * (heads.query + heads.kv) * heads.dim
    if rotate:
        moved += 2 * heads.query_bytes(tokens) + tokens * heads.dim * size
    return Cost(moved, 3 * rotated * rotate, "fp32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=("decode", "prefill", "cache_write"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a row, or prefix of a prefill row")
    parser.add_argument("--new", type=int, default=512, help="new tokens of a row")
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--kv-dtype", choices=SIZES, default="bf16")
    parser.add_argument("--measured-us", type=float)
    asked = parser.parse_args()
    heads, target = Heads(kv_dtype=asked.kv_dtype), TARGETS[asked.target]
    if (reason := target.refusal({asked.kv_dtype})) is not None:
        parser.error(reason)
    cost = {
        "decode": lambda: decode(heads, [asked.context] * asked.rows),
        "prefill": lambda: prefill(heads, [(asked.context, asked.new)] * asked.rows),
        "cache_write": lambda: cache_write(heads, asked.rows * asked.new),
    }[asked.kernel]()
    shown = {"part": target.part, "bytes": cost.bytes, "operations": cost.operations}
    shown["floor_us"] = round(cost.floor_s(target) * 1e6, 2)
    if asked.measured_us is not None:
        shown["fraction_of_floor"] = round(cost.fraction(target, asked.measured_us * 1e-6), 3)
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

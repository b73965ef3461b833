"""What a launch must move and compute, and how long a part takes for it at least."""

from dataclasses import dataclass

from nori_kernels.targets import Target

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "i8": 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """bytes: to and from device memory, each once: what is read again comes from a cache.

    operations: those of the kernel's algorithm without what padding adds. In products multiply and add count as two, at
    the rate of the operands' dtype; elsewhere every sum, product, comparison, exponential and so on is one at "fp32".
    """

    bytes: int
    operations: int
    dtype: str

    def floor_s(self, target: Target) -> float:
        return max(self.bytes / target.bytes_per_s, self.operations / target.operations_per_s[self.dtype])

    def fraction(self, target: Target, measured_s: float) -> float:
        """Of the floor that a measured time reaches: 1 is perfect. ValueError unless the time is positive."""
        if measured_s <= 0:
            raise ValueError(f"a measured time is positive, not {measured_s}")
        return self.floor_s(target) / measured_s


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)

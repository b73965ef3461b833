"""What kernel tests share: fresh seeded inputs, poisoned outputs, and comparisons with float64 at a stated bound."""

import secrets

import torch

# Greatest relative error of rounding once.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}


class Inputs:
    """Random tensors from a seed that is new each time and stands in every failure's message; give it to repeat."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(32) if seed is None else seed
        self._generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """low ≤ x < high."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator)

    def close(self, actual: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
        """AssertionError unless |actual - exact| ≤ bound * max(1, max |exact|) everywhere; a NaN fails."""
        assert actual.shape == exact.shape, (tuple(actual.shape), tuple(exact.shape))
        if actual.numel() == 0:
            return
        assert exact.dtype == torch.float64, "the reference computes in float64"
        error = (actual.double() - exact).abs()
        worst = float(error.nan_to_num(nan=float("inf")).max() / max(1.0, float(exact.abs().max())))
        assert worst <= bound, f"error {worst:.3g}, at most {bound:.3g}; seed {self.seed}"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN everywhere (integers: their least value), so that what a kernel leaves unwritten shows."""
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype)
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)

"""Shapes that batch-invariant mode fixes, shared by products of weights and of attention."""

from typing import Final

# Float32 kernels of oneDNN and MKL sum 1, 2, 3, 5, 6 or 7 rows in another order than whole tiles (docs/decisions/0006).
ROW_TILE: Final = 8

"""Every kernel of the package: its files, their variants, and what the source itself declares."""

import ast
from pathlib import Path

from nori_kernels import (
    activation,
    cache_write,
    embedding,
    logprobs,
    merge_splits,
    moe,
    norm,
    paged_decode,
    paged_prefill,
    philox,
    sampling,
)
from nori_kernels.quant import dynamic, scaled, weight_only
from nori_kernels.variant import Variant

MODULES = (
    activation,
    cache_write,
    embedding,
    logprobs,
    merge_splits,
    moe,
    norm,
    paged_decode,
    paged_prefill,
    philox,
    sampling,
    dynamic,
    scaled,
    weight_only,
)  # a new kernel file: one import and one word here
VARIANTS: tuple[Variant, ...] = tuple(variant for module in MODULES for variant in module.VARIANTS)


def jit_functions() -> dict[str, Path]:
    """Name → file of everything under @triton.jit. Entries end in `_kernel`; the rest are called from kernels."""
    found: dict[str, Path] = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = path
    return found


def entries() -> list[str]:
    """Names of the kernels that are launched."""
    return sorted(name for name in jit_functions() if name.endswith("_kernel"))

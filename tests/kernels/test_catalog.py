"""Every kernel is compiled ahead of time, every helper is used, and every variant names its arguments."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nori_kernels.casts import interpreted
from nori_kernels.catalog import VARIANTS, entries, jit_functions
from nori_kernels.compile import large_tiles
from nori_kernels.targets import TARGETS, for_capability
from nori_kernels.variant import Variant

pytestmark = pytest.mark.contract
ROOT = Path(__file__).resolve().parents[2]
MAX_COMPILES = 120  # of the issue; what wrappers take beyond them stands in docs/kernels.md


def compiles() -> Iterator[tuple[Variant, str]]:
    for variant in VARIANTS:
        for target in TARGETS.values():
            if variant.meant_for(target.name) and target.refusal(variant.uses) is None:
                yield variant, target.name


def test_every_kernel_has_variants() -> None:
    """`make kernels-report` compiles what VARIANTS lists: a kernel that is absent there is never compiled."""
    assert sorted({variant.kernel.fn.__name__ for variant in VARIANTS}) == entries()


def test_every_other_jit_function_is_called_by_a_kernel() -> None:
    texts = {path: path.read_text() for path in jit_functions().values()}
    for name in jit_functions():
        calls = sum(text.count(f"{name}(") for text in texts.values())
        assert name.endswith("_kernel") or calls > 1, f"{name} is neither a kernel nor called"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variants_name_every_argument_once(variant) -> None:
    signature = variant.full_signature()
    assert list(signature) == list(variant.kernel.arg_names)
    assert set(variant.aligned) <= variant.signature.keys()


def test_names_are_unique_and_compiles_few() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    assert len(list(compiles())) <= MAX_COMPILES


def test_every_kernel_is_compiled_for_every_target() -> None:
    for target in TARGETS:
        assert sorted({variant.kernel.fn.__name__ for variant, name in compiles() if name == target}) == entries()
    assert {name for variant in VARIANTS for name in variant.targets} <= TARGETS.keys()


def launches() -> Iterator[tuple[str, bool]]:
    """(kernel, whether it fuses products and sums) of every `x_kernel[grid](…)` in the package."""
    for path in set(jit_functions().values()):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                yield ast.unparse(node.func.value), given.get("enable_fp_fusion", "True") == "True"


def test_products_and_sums_are_fused_as_launched() -> None:
    launched = set(launches())
    assert sorted(name for name, _ in launched) == entries()
    assert {(variant.kernel.fn.__name__, variant.fp_fusion) for variant in VARIANTS} == launched
    assert ("choose_kernel", False) in launched


def test_large_tiles_want_large_instructions_where_triton_has_them() -> None:
    found = {}
    for variant in VARIANTS:
        for version in ("3.6.0", "3.9.0"):
            wanted = large_tiles(variant, TARGETS["sm_100"], version)
            assert (wanted is None) or variant.tensor_cores == "large"
            found[variant.name, version] = wanted
    assert found["scaled_gemm_kernel[i8 64x128x128]", "3.6.0"] is None
    assert found["scaled_gemm_kernel[i8 64x128x128]", "3.9.0"] == "tcgen05.mma"
    assert found["scaled_gemm_kernel[fp8e4nv 64x128x128]", "3.6.0"] == "tcgen05.mma"
    assert found["scaled_gemm_kernel[i8 16x64x128]", "3.9.0"] is None


def test_every_kernel_has_a_cost_model() -> None:
    command = [sys.executable, str(ROOT / "kernels" / "bench" / "cost.py"), "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(f"{name}_kernel" for name in listed) == entries()


def test_targets_refuse_what_they_lack() -> None:
    assert TARGETS["sm_80"].refusal({"fp8e4nv", "bf16"}) == "fp8e4nv: E4M3 needs sm_89 or newer"
    assert TARGETS["sm_90"].refusal({"fp8e4nv", "bf16"}) is None
    assert for_capability(8, 6).name == "sm_80"
    assert for_capability(10, 0).name == "sm_100"
    with pytest.raises(ValueError, match="sm_80 or newer"):
        for_capability(7, 5)


def test_these_tests_run_in_the_interpreter() -> None:
    assert interpreted()

"""Ahead-of-time compile of variants without a GPU, and what the machine code uses; cached by source and versions."""

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nori_kernels.targets import Target
from nori_kernels.variant import Variant

MAX_REGISTERS = 255  # of a thread
REGISTERS_PER_PROGRAM = 65536
LARGE_TILES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
ANY_TILES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one compiled variant. stack_bytes > 0 means spilled registers."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]  # tensor-core instructions and asynchronous copies found

    def problems(self, variant: Variant, target: Target) -> list[str]:
        """What keeps this code from running well, or at all, on the target."""
        found = []
        if self.stack_bytes:
            found.append(f"{self.stack_bytes} bytes of spills")
        if self.registers > MAX_REGISTERS or self.registers * 32 * variant.num_warps > REGISTERS_PER_PROGRAM:
            found.append(f"{self.registers} registers of {32 * variant.num_warps} threads")
        if self.shared_bytes > target.shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, {target.name} has {target.shared_bytes}")
        wanted = large_tiles(variant, target, triton.__version__)
        if variant.tensor_cores != "none" and not set(self.instructions) & ({wanted} if wanted else set(ANY_TILES)):
            found.append(f"no {wanted or 'tensor-core'} instruction")
        return found


def large_tiles(variant: Variant, target: Target, version: str) -> str | None:
    """The instruction for large tiles that this Triton should have used; None where any tensor-core one will do."""
    if variant.tensor_cores != "large":
        return None
    if version.startswith("3.6.") and target.capability == 100 and "i8" in variant.uses:
        return None  # that Triton leaves integers to mma.sync on Blackwell; 3.9 does not
    return LARGE_TILES.get(target.capability)


def usage(variant: Variant, target: Target, cache: Path) -> Usage:
    """Compile, or read what an earlier compile of the same source, options and Triton found."""
    place = cache / f"{_key(variant, target)}.json"
    if place.is_file():
        fields = json.loads(place.read_text())
        return Usage(**{**fields, "instructions": tuple(fields["instructions"])})
    found = _compile(variant, target)
    cache.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(asdict(found)))
    return found


def _options(variant: Variant) -> dict[str, Any]:
    return {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fp_fusion,
    }


def _key(variant: Variant, target: Target) -> str:
    parts = (
        variant.kernel.cache_key,
        variant.full_signature(),
        sorted((name, str(value)) for name, value in variant.constexprs.items()),
        variant.attributes(),
        _options(variant),
        target.name,
        triton.__version__,
        Path(__file__).read_text(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compile(variant: Variant, target: Target) -> Usage:
    constexprs = {(variant.kernel.arg_names.index(name),): value for name, value in variant.constexprs.items()}
    source = ASTSource(variant.kernel, variant.full_signature(), constexprs, variant.attributes())
    built = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=_options(variant))
    registers, stack = _resources(built.asm["cubin"])
    ptx = built.asm["ptx"]
    instructions = tuple(name for name in (*ANY_TILES, "cp.async", "cp.async.bulk") if name in ptx)
    return Usage(registers, stack, built.metadata.shared, instructions)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of stack), by the cuobjdump that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {text!r}")
    return int(found[1]), int(found[2])

"""A variant: one way in which a kernel is compiled ahead of time. Kernel files list theirs in VARIANTS."""

from dataclasses import dataclass
from typing import Any, Literal

TensorCores = Literal["none", "any", "large"]


@dataclass(frozen=True)
class Variant:
    """kernel: what @triton.jit made. signature: argument → Triton type, constexprs left out, order of the kernel.

    aligned: integer arguments (strides) that are multiples of 16; every pointer is one too.
    Without these attributes Triton does not pipeline loads. tensor_cores: "any" instruction of them, or for tiles of 64
    rows and more the target's "large" one (wgmma, tcgen05), must be in the code.
    targets: names of those it is compiled for; none = all that have its dtypes.
    """

    kernel: Any
    label: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    tensor_cores: TensorCores = "none"
    targets: tuple[str, ...] = ()
    fp_fusion: bool = True  # as launched: False where a product and a sum are rounded apart, like the CPU's

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__name__}[{self.label}]"

    @property
    def uses(self) -> set[str]:
        """Triton dtypes without which this variant does not exist."""
        return {kind.removeprefix("*") for kind in self.signature.values()}

    def meant_for(self, target: str) -> bool:
        """Whether this target compiles it, unless it lacks a dtype."""
        return not self.targets or target in self.targets

    def full_signature(self) -> dict[str, str]:
        """Every argument in order. ValueError where the lists and the kernel's own arguments differ."""
        names = list(self.kernel.arg_names)
        given = self.signature.keys() | self.constexprs.keys()
        if set(names) != given:
            raise ValueError(f"{self.name}: arguments {sorted(set(names) ^ given)} are not declared once each")
        return {name: self.signature.get(name, "constexpr") for name in names}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        chosen = {n for n, kind in self.signature.items() if kind.startswith("*")}
        chosen |= set(self.aligned)
        names = list(self.kernel.arg_names)
        return {(names.index(name),): [["tt.divisibility", 16]] for name in sorted(chosen)}

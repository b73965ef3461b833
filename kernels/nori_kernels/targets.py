"""The parts that kernels are compiled for: what they lack, what a kernel may use, and their peak rates."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Target:
    """One part. Rates are dense peaks per second from the makers' data sheets; bytes are of device memory."""

    name: str
    part: str
    capability: int  # 10 * major + minor
    shared_bytes: int  # most that one program may ask for
    bytes_per_s: float
    operations_per_s: dict[str, float]  # dtype of the operands → multiply and add counted as two
    lacks: dict[str, str] = field(default_factory=dict)  # Triton dtype → why

    def refusal(self, dtypes: set[str]) -> str | None:
        """Why kernels on these dtypes do not exist for this target; None where they do."""
        reasons = [f"{dtype}: {self.lacks[dtype]}" for dtype in sorted(dtypes & self.lacks.keys())]
        return "; ".join(reasons) or None


NO_FP8 = {"fp8e4nv": "E4M3 needs sm_89 or newer"}
TARGETS = {
    t.name: t
    for t in (
        Target(
            "sm_80",
            "A100 SXM 80 GB",
            80,
            163 << 10,
            2.039e12,
            {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12, "i8": 624e12},
            NO_FP8,
        ),
        Target(
            "sm_90",
            "H100 SXM",
            90,
            227 << 10,
            3.35e12,
            {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12, "i8": 1979e12, "fp8e4nv": 1979e12},
        ),
        Target(
            "sm_100",
            "B200 SXM",
            100,
            227 << 10,
            8.0e12,
            {"fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12, "i8": 4500e12, "fp8e4nv": 4500e12},
        ),
    )
}
WITHOUT_FP8 = tuple(t.name for t in TARGETS.values() if "fp8e4nv" in t.lacks)  # what quantizes there gives int8


def for_capability(major: int, minor: int) -> Target:
    """The newest target that a device of this capability runs. ValueError below sm_80."""
    own = 10 * major + minor
    fitting = [t for t in TARGETS.values() if t.capability <= own]
    if not fitting:
        raise ValueError(f"kernels need sm_80 or newer, this device is sm_{own}")
    return max(fitting, key=lambda t: t.capability)

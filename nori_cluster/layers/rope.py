"""Rotary position embedding: which frequencies a config asks for, and the rotation of query and key heads.

Frequencies are computed as the reference library does, in float32; kinds not listed are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nori_cluster.errors import CheckpointError

KINDS = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: base of the geometric series. The rest belongs to llama3 (Llama 3.1's length extension)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


def rope_from_hf(raw: Mapping[str, Any]) -> RopeSpec:
    """From config.json: rope_parameters (newer) or rope_scaling, rope_theta inside or beside.

    rope_type wins over the older `type`. Raises CheckpointError naming the key.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _number(scaling if "rope_theta" in scaling else raw, "rope_theta", key, 10000.0)
    if kind not in KINDS:
        raise CheckpointError(f"config.json: {key} type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if float(raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeSpec(theta)
    low = _number(scaling, "low_freq_factor", key)
    high = _number(scaling, "high_freq_factor", key)
    if high <= low:
        raise CheckpointError(f"config.json: {key}: high_freq_factor {high} must exceed low_freq_factor {low}")
    original = int(_number(scaling, "original_max_position_embeddings", key))
    return RopeSpec(theta, kind, _number(scaling, "factor", key), low, high, original)


def _number(source: Mapping[str, Any], name: str, key: str, default: float | None = None) -> float:
    value = source.get(name, default)
    if value is None:
        raise CheckpointError(f"config.json: {key} lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key}: {name} must be a positive number, not {value!r}")
    return float(value)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position."""
    frequencies = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if spec.kind == "default":
        return frequencies
    # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended linearly in 1 / wavelength.
    ratio = spec.original_max_position_embeddings * frequencies / (2 * math.pi)  # turns within the original length
    blend = (ratio - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


class Rotation:
    """cos and signed sin of one step's positions, shared by all layers: [T, 1, head_dim] in the run dtype."""

    def __init__(self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        angles = positions.float()[:, None] * frequencies
        sin = angles.sin()
        self.half = len(frequencies)
        self.cos = angles.cos().repeat(1, 2).to(dtype).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] → rotated. Element i of the first half pairs with i of the second (GPT-NeoX order)."""
        return torch.addcmul(x * self.cos, x.roll(self.half, dims=-1), self.sin)

"""Rotary position embedding: which frequencies a config asks for, and the rotation of query and key heads.

Frequencies are computed as the reference library does, in float32; kinds not listed are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nori_cluster.errors import CheckpointError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: base of the geometric series. factor: of linear, llama3 and yarn. low_freq_factor, high_freq_factor: of
    llama3 (Llama 3.1's length extension). beta_fast, beta_slow: turns within the original length between which yarn
    (Peng et al. 2023) blends; truncate: to whole dimensions. magnitude: of cos and sin.

    dynamic changes the frequencies of sequences longer than max_position_embeddings only, and none is served: it is
    `default` here.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


def rope_from_hf(raw: Mapping[str, Any], default_theta: float = 10000.0) -> RopeSpec:
    """From config.json: rope_parameters (newer) or rope_scaling, rope_theta inside or beside.

    default_theta: the family's own, for configs that name none. rope_type wins over the older `type`. Raises
    CheckpointError naming the key.
    """
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if raw.get("rope_parameters") and raw.get("rope_scaling") and raw["rope_scaling"] != raw["rope_parameters"]:
        raise CheckpointError("config.json: rope_parameters and rope_scaling differ; only one of them may be given")
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {scaling!r:.80}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _number(scaling if "rope_theta" in scaling else raw, "rope_theta", key, default_theta)
    if kind not in KINDS:
        raise CheckpointError(f"config.json: {key} type {kind!r:.80} is not supported; supported: {', '.join(KINDS)}")
    if any(each.get("partial_rotary_factor") not in (None, 1) for each in (raw, scaling)):
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeSpec(theta)
    if kind in ("linear", "dynamic"):
        factor = _number(scaling, "factor", key)
        return RopeSpec(theta, "linear", factor) if kind == "linear" else RopeSpec(theta)
    if kind == "yarn":
        return _yarn(scaling, key, theta, raw)
    low = _number(scaling, "low_freq_factor", key)
    high = _number(scaling, "high_freq_factor", key)
    if high <= low:
        raise CheckpointError(f"config.json: {key}: high_freq_factor {high} must exceed low_freq_factor {low}")
    original = _original(scaling, key, raw, None)
    return RopeSpec(theta, kind, _number(scaling, "factor", key), low, high, original)


def _yarn(scaling: Mapping[str, Any], key: str, theta: float, raw: Mapping[str, Any]) -> RopeSpec:
    if theta <= 1:
        raise CheckpointError(f"config.json: {key}: rope_theta must be above 1 for yarn, not {theta:g}")
    factor = _number(scaling, "factor", key)
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is not None:
        magnitude = _number(scaling, "attention_factor", key)
    elif numerator and denominator:
        over, under = _number(scaling, "mscale", key), _number(scaling, "mscale_all_dim", key)
        magnitude = _growth(factor, over) / _growth(factor, under)
    else:
        magnitude = _growth(factor, 1.0)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=_original(scaling, key, raw, raw.get("max_position_embeddings")),
        beta_fast=_number(scaling, "beta_fast", key, 32.0) if scaling.get("beta_fast") else 32.0,
        beta_slow=_number(scaling, "beta_slow", key, 1.0) if scaling.get("beta_slow") else 1.0,
        truncate=bool(scaling.get("truncate", True)),
        magnitude=magnitude,
    )


def _original(scaling: Mapping[str, Any], key: str, raw: Mapping[str, Any], default: float | None) -> int:
    """original_max_position_embeddings beside the rope wins over the rope's own, as in the reference library."""
    name = "original_max_position_embeddings"
    value = _number(raw if raw.get(name) else scaling, name, key, default)
    if not value.is_integer():
        raise CheckpointError(f"config.json: {key}: {name} must be a whole number, not {value!r}")
    return int(value)


def _growth(factor: float, weight: float) -> float:
    """How much longer contexts sharpen attention (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(source: Mapping[str, Any], name: str, key: str, default: float | None = None) -> float:
    value = source.get(name, default)
    if value is None:
        raise CheckpointError(f"config.json: {key} lacks {name!r}")
    return positive(value, f"config.json: {key}: {name}")


def positive(value: Any, what: str) -> float:
    """CheckpointError unless it is a number from 1e-30 to 1e30, which no formula of a model turns into infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
        raise CheckpointError(f"{what} must be a positive number, not {value!r:.80}")
    return float(value)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position."""
    frequencies = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "yarn":
        keep = _kept(spec, head_dim)
        return frequencies / spec.factor * (1 - keep) + frequencies * keep
    # Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended linearly in 1 / wavelength.
    ratio = spec.original_max_position_embeddings * frequencies / (2 * math.pi)  # turns within the original length
    blend = (ratio - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / spec.factor + blend * frequencies


def _kept(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: 1 where yarn keeps a frequency, 0 where it slows it by `factor`, a ramp between."""

    def dimension(turns: float) -> float:
        length = spec.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)


class Rotation:
    """cos and signed sin of one step's positions, shared by all layers: [T, 1, head_dim] in the run dtype."""

    def __init__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0
    ) -> None:
        angles = positions.float()[:, None] * frequencies
        sin, cos = angles.sin(), angles.cos()
        if magnitude != 1.0:
            sin, cos = sin * magnitude, cos * magnitude
        self.half = len(frequencies)
        self.cos = cos.repeat(1, 2).to(dtype).unsqueeze(1)
        self.sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] → rotated. Element i of the first half pairs with i of the second (GPT-NeoX order)."""
        return torch.addcmul(x * self.cos, x.roll(self.half, dims=-1), self.sin)

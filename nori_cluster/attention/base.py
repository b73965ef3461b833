"""What a model needs of an attention backend: plan once per step, forward once per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from nori_cluster.device.forward import ForwardBatch
from nori_cluster.device.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """What one layer sees. window: a token sees itself and the window - 1 tokens before it; 0: all before it.

    softcap: a scaled score s becomes softcap * tanh(s / softcap) before masks and softmax; 0: it stays s.
    """

    window: int = 0
    softcap: float = 0.0


def patterns_of(patterns: Sequence[AttentionPattern], num_layers: int) -> tuple[AttentionPattern, ...]:
    """One for each layer; an empty sequence is a model without windows and soft caps."""
    assert len(patterns) in (0, num_layers)
    return tuple(patterns) or (AttentionPattern(),) * num_layers


class AttentionBackend(Protocol):
    """Causal attention over paged KV. Constructed once per worker as Backend(cache, num_heads, scale, patterns).

    patterns: one for each layer of the cache, or none when every layer sees everything uncapped (patterns_of).

    batch_invariant: whether the bits of a token's result depend on its own sequence alone: not on the rows beside it,
    on how its sequence was cut into steps or on cache hits.
    num_heads: query heads of this rank; query head h reads KV head h // (num_heads / num_kv_heads).
    """

    batch_invariant: ClassVar[bool]

    @property
    def numerics(self) -> str:
        """The backend and what of its settings decides bits."""

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether this backend runs on such tensors."""

    def __init__(
        self, cache: KVCache, num_heads: int, scale: float, patterns: Sequence[AttentionPattern] = ()
    ) -> None: ...

    def plan(self, batch: ForwardBatch) -> Any:
        """Everything of a step that does not depend on the layer."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        """Write k and v [T, kv heads, dim] into the cache, then attend q [T, heads, dim] → [T, heads, dim]."""

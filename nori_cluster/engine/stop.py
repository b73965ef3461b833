"""When a sequence ends by a token id or by length. Stop strings are the gateway's."""

import numpy as np
from numpy.typing import NDArray

from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import FinishReason


class StopRules:
    """EOS ids of the model, and per slot whether they count and which further ids stop it."""

    def __init__(self, eos_token_ids: tuple[int, ...], num_slots: int) -> None:
        self._eos = np.array(eos_token_ids, dtype=np.int32)
        self._eos_set = frozenset(eos_token_ids)
        self._ignore_eos = np.zeros(num_slots, dtype=np.bool_)
        self._has_ids = np.zeros(num_slots, dtype=np.bool_)
        self._ids: list[frozenset[int]] = [frozenset()] * num_slots

    def start(self, slot: int, request: SequenceRequest) -> None:
        self._ignore_eos[slot] = request.ignore_eos
        self._has_ids[slot] = bool(request.stop_token_ids)
        self._ids[slot] = frozenset(request.stop_token_ids)

    def stopped(self, slots: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which rows end with the id they just got."""
        hit = np.isin(ids, self._eos) & ~self._ignore_eos[slots]
        for row in np.flatnonzero(self._has_ids[slots]):
            hit[row] |= int(ids[row]) in self._ids[slots[row]]
        return hit

    def reason(self, slot: int, token: int, stopped: bool) -> tuple[FinishReason, int | None]:
        """Why a finished slot ended, and the request's own stop id that did it (None for EOS and length)."""
        if not stopped:
            return FinishReason.LENGTH, None
        by_eos = token in self._eos_set and not self._ignore_eos[slot]
        return FinishReason.STOP, None if by_eos else token

"""Least loaded: the group with the fewest outstanding tokens; near ties go to the gateway's own order of groups.

The order is a rendezvous hash, so a gateway keeps to a stable subset of groups and its messages carry more tokens each.
"""

from collections.abc import Sequence
from hashlib import blake2b

from nori_cluster.routing.base import Candidate, Left, Place, Placed

NEAR_TIE_SHIFT = 3  # loads within 1/8 of the least count as equal; at no load only exact ties do


class LeastLoaded:
    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], bytes] = {}

    def choose(self, place: Place, gateway_id: str, groups: Sequence[Candidate]) -> Candidate:
        least = min(group.load for group in groups)
        bound = least + (least >> NEAR_TIE_SHIFT)
        near = [group for group in groups if group.load <= bound]
        return min(near, key=lambda group: self._rank(gateway_id, group.group_id)) if len(near) > 1 else near[0]

    def observe(self, event: Placed | Left) -> None:
        if isinstance(event, Left):
            self._ranks = {pair: rank for pair, rank in self._ranks.items() if pair[1] != event.group_id}

    def _rank(self, gateway_id: str, group_id: str) -> bytes:
        rank = self._ranks.get((gateway_id, group_id))
        if rank is None:
            rank = blake2b(f"{gateway_id}\0{group_id}".encode(), digest_size=8).digest()
            self._ranks[gateway_id, group_id] = rank
        return rank

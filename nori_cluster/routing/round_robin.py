"""Round robin: the groups in turn, in the order of their ids."""

from collections.abc import Sequence

from nori_cluster.routing.base import Candidate, Left, Place, Placed


class RoundRobin:
    def __init__(self) -> None:
        self._last = ""

    def choose(self, place: Place, gateway_id: str, groups: Sequence[Candidate]) -> Candidate:
        return next((group for group in groups if group.group_id > self._last), groups[0])

    def observe(self, event: Placed | Left) -> None:
        if isinstance(event, Placed):
            self._last = event.group_id

"""The waiting queue of the router: FIFO per model, bounded over all, with deadlines. Owned by routing/router.py."""

import heapq
from collections.abc import Iterator

import msgspec

from nori_cluster.routing.base import Place

RequestKey = tuple[str, int]  # gateway_id, request


class Waiting(msgspec.Struct, frozen=True):
    """A place that has no group yet. arrived and deadline: router clock, seconds; deadline None = none."""

    key: RequestKey
    place: Place
    order_key: int
    arrived: float
    deadline: float | None


class WaitingQueue:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._models: dict[str, dict[RequestKey, Waiting]] = {}
        self._index: dict[RequestKey, str] = {}
        self._deadlines: list[tuple[float, int, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._index

    @property
    def overfull(self) -> bool:
        return len(self._index) > self.limit

    def push(self, waiting: Waiting) -> None:
        assert waiting.key not in self._index
        self._models.setdefault(waiting.place.model, {})[waiting.key] = waiting
        self._index[waiting.key] = waiting.place.model
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.order_key, waiting.key))

    def remove(self, key: RequestKey) -> Waiting | None:
        """None when it does not wait."""
        model = self._index.pop(key, None)
        if model is None:
            return None
        queue = self._models[model]
        waiting = queue.pop(key)
        if not queue:
            del self._models[model]
        return waiting

    def of_model(self, model: str) -> Iterator[Waiting]:
        """Oldest first; the queue may be changed meanwhile only through a list() of this."""
        return iter(self._models.get(model, {}).values())

    def models(self) -> list[str]:
        return list(self._models)

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        return [key for key in self._index if key[0] == gateway_id]

    def expired(self, now: float) -> list[Waiting]:
        """Removes and returns those whose deadline has passed."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order_key, key = heapq.heappop(self._deadlines)
            model = self._index.get(key)
            # A key may have been cancelled and used again: the order_key tells the two apart.
            if model is not None and self._models[model][key].order_key == order_key:
                out.append(self._models[model][key])
                self.remove(key)
        return out

    def check(self) -> None:
        """Index and queues agree; each queue is in the order of arrival; the bound holds."""
        listed = {key: model for model, queue in self._models.items() for key in queue}
        assert listed == self._index, "index and queues disagree"
        assert len(self._index) <= self.limit, "more wait than the bound allows"
        for queue in self._models.values():
            assert queue, "an empty queue is kept"
            keys = [waiting.order_key for waiting in queue.values()]
            assert keys == sorted(keys), "not first in, first out"

"""The waiting queue of the router: by order_key per model, bounded over all, with deadlines. Of routing/router.py."""

import bisect
import heapq
from collections.abc import Iterator

import msgspec

from nori_cluster.routing.base import Place

RequestKey = tuple[str, int]  # gateway_id, request


class Waiting(msgspec.Struct, frozen=True):
    """A place that has no group yet. number: unique, growing. arrived, deadline: router clock, seconds; None = none."""

    key: RequestKey
    place: Place
    order_key: int
    number: int
    arrived: float
    deadline: float | None

    @property
    def rank(self) -> tuple[int, int]:
        return self.order_key, self.number


class WaitingQueue:
    """limit: requests that may wait. token_limit: prompt tokens that may, of all candidates' requests; None = any."""

    def __init__(self, limit: int, token_limit: int | None = None) -> None:
        self.limit = limit
        self.token_limit = token_limit
        self.tokens = 0
        self._models: dict[str, list[Waiting]] = {}  # sorted by rank
        self._index: dict[RequestKey, Waiting] = {}
        self._deadlines: list[tuple[float, int, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._index

    @property
    def overfull(self) -> bool:
        return len(self._index) > self.limit or (self.token_limit is not None and self.tokens > self.token_limit)

    @property
    def full(self) -> bool:
        """Whether the next place that has to wait will be refused."""
        return len(self._index) >= self.limit or (self.token_limit is not None and self.tokens >= self.token_limit)

    def push(self, waiting: Waiting) -> None:
        assert waiting.key not in self._index
        bisect.insort(self._models.setdefault(waiting.place.model, []), waiting, key=lambda w: w.rank)
        self._index[waiting.key] = waiting
        self.tokens += waiting.place.prompt_tokens
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.number, waiting.key))

    def remove(self, key: RequestKey) -> Waiting | None:
        """None when it does not wait."""
        waiting = self._index.pop(key, None)
        if waiting is None:
            return None
        queue = self._models[waiting.place.model]
        del queue[bisect.bisect_left(queue, waiting.rank, key=lambda w: w.rank)]
        self.tokens -= waiting.place.prompt_tokens
        if not queue:
            del self._models[waiting.place.model]
        return waiting

    def of_model(self, model: str) -> Iterator[Waiting]:
        """First to run first; the queue may be changed meanwhile only through a list() of this."""
        return iter(self._models.get(model, ()))

    def models(self) -> list[str]:
        return list(self._models)

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        return [key for key in self._index if key[0] == gateway_id]

    def expired(self, now: float) -> list[Waiting]:
        """Removes and returns those whose deadline has passed."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, key = heapq.heappop(self._deadlines)
            waiting = self._index.get(key)
            # A key may have been cancelled and used again: the number tells the two apart.
            if waiting is not None and waiting.number == number:
                out.append(waiting)
                self.remove(key)
        return out

    def check(self) -> None:
        """Index and queues agree; each queue is in order; the bounds hold."""
        listed = {waiting.key: waiting for queue in self._models.values() for waiting in queue}
        assert listed == self._index, "index and queues disagree"
        assert not self.overfull, "more wait than the bounds allow"
        assert self.tokens == sum(waiting.place.prompt_tokens for waiting in listed.values())
        for queue in self._models.values():
            assert queue, "an empty queue is kept"
            ranks = [waiting.rank for waiting in queue]
            assert ranks == sorted(ranks), "the queue is out of order"

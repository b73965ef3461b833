"""Sequences that wait for a slot, in the order the router gave; bounded, with deadlines."""

import heapq

from nori_cluster.engine.sequence import Sequence
from nori_cluster.errors import Overloaded

_STALE = 64  # entries of sequences that left, always tolerated


class WaitingQueue:
    """A heap by `order`. Removal is lazy: entries whose sequence left are skipped when they surface, and swept out
    when they outnumber the rest."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.tokens = 0  # to compute, of all that wait
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: dict[int, Sequence] = {}  # by key
        self._deferred: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        """A new sequence. Overloaded when the bound is reached."""
        if len(self._members) >= self.max_requests:
            raise Overloaded(f"the group's queue is full ({self.max_requests} requests wait)", retry_after=1.0)
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        """A preempted sequence comes back; it was admitted before, so the bound does not apply."""
        self._members[sequence.request.key] = sequence
        self.tokens += sequence.waiting_tokens
        heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The sequence to start next."""
        while self._heap:
            sequence = self._heap[0][1]
            if self._members.get(sequence.request.key) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def defer_head(self) -> None:
        """Look past the head, until `end_deferral`."""
        self._deferred.append(heapq.heappop(self._heap))

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def end_deferral(self) -> None:
        for entry in self._deferred:
            heapq.heappush(self._heap, entry)
        self._deferred.clear()

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.request.key]
        self.tokens -= sequence.waiting_tokens
        if len(self._heap) > 2 * len(self._members) + _STALE:
            self._heap = [(waiting.order, waiting) for waiting in self._members.values()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        assert self.tokens == sum(s.waiting_tokens for s in self._members.values())
        assert not self._deferred
        assert len(self._heap) <= 2 * len(self._members) + _STALE, "the heap keeps those that left"
        in_heap = {id(s) for _, s in self._heap}
        assert all(id(s) in in_heap and s.slot == -1 for s in self._members.values())

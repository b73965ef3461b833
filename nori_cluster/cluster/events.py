"""What happened to the groups of a cluster, newest last: for `nori events` and StreamClusterEvents."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable

from nori_cluster.rpc.admin_types import EventInfo

REMEMBERED = 1000


class EventLog:
    """Belongs to one loop. Sequence numbers start at 1 and have no gaps; the oldest events are forgotten."""

    def __init__(self, past: Iterable[EventInfo] = ()) -> None:
        """past: what another log held last; the numbers go on."""
        self._events: deque[EventInfo] = deque(past, maxlen=REMEMBERED)
        self._last = self._events[-1].sequence if self._events else 0
        self._news = asyncio.Event()

    def add(self, kind: str, group: str, incarnation: int, message: str = "") -> None:
        self._last += 1
        event = EventInfo(
            sequence=self._last, time=time.time(), kind=kind, group=group, incarnation=incarnation, message=message
        )
        self._events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[EventInfo]:
        """Remembered events with a greater sequence number, then new ones as they come; never ends by itself."""
        while True:
            news = self._news
            for event in [event for event in self._events if event.sequence > after]:
                after = event.sequence
                yield event
            await news.wait()

    def past(self, after: int) -> list[EventInfo]:
        return [event for event in self._events if event.sequence > after]

"""The ranks of a tensor-parallel group as threads of one process: collectives meet at a barrier, sums in rank order."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a rank that waits in vain breaks the barrier for all


class Meeting:
    """What the ranks share: one place per rank for a tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.places: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.places[rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found


class ThreadGroup:
    """One rank's end; a TPGroup."""

    ordered = True

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.exchange(self.rank, tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._meeting.exchange(self.rank, tensor)
        return None if self.rank else torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])

    def minimum(self, value: int) -> int:
        return min(int(part) for part in self._meeting.exchange(self.rank, torch.tensor(value)))


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """work(group) on each rank at once; what each returned, in rank order. The first rank's error is raised."""
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))

"""How long work on a model reports its progress; the CLI draws it, everybody else passes nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    def task(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        """A bar while the context is open. total: bytes, None = unknown. Call the value with bytes done since."""


class NoProgress:
    """A Progress that shows nothing."""

    def task(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        return nullcontext(_ignore)


def _ignore(count: int) -> None:
    """Progress nobody looks at."""

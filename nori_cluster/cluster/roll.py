"""An operation on group after group, few of them out of service at a time: the order as a pure state machine.

Operations.roll drives it: drain with hand-over, act, wait until ready, next. The first failure lets what is under way
end and takes no further group.
"""

from collections.abc import Collection, Sequence

from nori_cluster.errors import ConfigError, EngineFailure


class Roll:
    """waiting: in order, not yet taken. active: taken and not back. failures: group → why it is not back."""

    def __init__(self, names: Sequence[str], max_unavailable: int) -> None:
        if max_unavailable < 1:
            raise ConfigError(f"max_unavailable must be at least 1, not {max_unavailable}", param="max_unavailable")
        self.max_unavailable = max_unavailable
        self.waiting = list(names)
        self.active: set[str] = set()
        self.done: list[str] = []
        self.failures: dict[str, str] = {}
        self._total = len(self.waiting)

    def take(self, down: Collection[str]) -> list[str]:
        """Groups to act on now. down: groups of the same set that are out of service by themselves: they count."""
        if self.failures:
            return []
        free = self.max_unavailable - len(self.active.union(down))
        taken = [name for name in self.waiting if name not in down][: max(0, free)]
        self.waiting = [name for name in self.waiting if name not in taken]
        self.active.update(taken)
        return taken

    def back(self, name: str) -> None:
        """It is in service again."""
        self.active.remove(name)
        self.done.append(name)

    def failed(self, name: str, reason: str) -> None:
        """It is not; also for a group that nobody brings back, in whatever state it stood here."""
        self.active.discard(name)
        self.waiting = [other for other in self.waiting if other != name]
        self.done = [other for other in self.done if other != name]
        self.failures[name] = reason

    @property
    def over(self) -> bool:
        return not self.active and (bool(self.failures) or not self.waiting)

    @property
    def percent(self) -> int:
        return 100 * len(self.done) // self._total if self._total else 100

    def verdict(self) -> EngineFailure | None:
        """What to raise at the end, if anything."""
        if not self.failures:
            return None
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
        return EngineFailure(
            f"{reasons} (done: {', '.join(self.done) or 'none'}; not touched: {', '.join(self.waiting) or 'none'})"
        )

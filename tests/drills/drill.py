"""What a drill is, and what came of one."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drills.load import Load
from drills.stage import Setting, Stage

LONGEST_GAP = 10.0  # seconds, where another ready group exists

Act = Callable[[Stage, Load], Awaitable[str]]  # returns what was seen beside the counts; AssertionError: not as it must


@dataclass(frozen=True, kw_only=True)
class Drill:
    """act runs under load. setting: makes its cluster's kind, and may raise Missing.

    longest_gap: seconds that a stream may pause. queues: requests wait for their first token, which is no pause.
    hits: incarnations of groups it costs (a group that is lost again and again starts later each time, by design).
    """

    act: Act
    setting: Callable[[], Setting] = Setting
    tokens: int = 150
    streams: int = 6
    longest_gap: float = LONGEST_GAP
    queues: bool = False
    hits: int = 0

    @property
    def name(self) -> str:
        return self.act.__name__


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one run of one drill. failure: what did not come as it must; "" = nothing."""

    name: str
    requests: int
    lost: int
    changed: int
    refused: int
    gap: float
    longest_gap: float
    recovery: float
    verdict: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.why

    @property
    def why(self) -> str:
        """Why it failed; "" = it did not."""
        counts = ((self.lost, f"{self.lost} lost"), (self.changed, f"{self.changed} changed"))
        reasons = [self.failure, *(text for count, text in counts if count)]
        if self.gap > self.longest_gap:
            reasons.append(f"a pause of {self.gap:.1f} s, at most {self.longest_gap:g}")
        return "; ".join(reason for reason in reasons if reason)

    def line(self) -> str:
        text = (
            f"{self.name:22} {self.requests:4d} requests, {self.lost} lost, {self.changed} changed, "
            f"longest pause {self.gap:.2f} s, whole again after {self.recovery:.1f} s"
        )
        return text if self.passed else f"{text}: FAILED: {self.why}"


def report_of(results: list[Result], skipped: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object: counts of all, by drill, and the verdicts that drills gave in words."""
    table: dict[str, dict[str, Any]] = {}
    verdicts: dict[str, str] = {}
    for result in results:
        row = table.setdefault(
            result.name,
            {"drills": 0, "requests": 0, "lost": 0, "changed": 0, "failed": 0, "gap_s": 0.0, "recovery_s": 0.0},
        )
        row["drills"] += 1
        for name in ("requests", "lost", "changed"):
            row[name] += getattr(result, name)
        row["failed"] += not result.passed
        row["gap_s"] = round(max(row["gap_s"], result.gap), 2)
        row["recovery_s"] = round(max(row["recovery_s"], result.recovery), 1)
        if result.why:
            verdicts[result.name] = f"FAILED: {result.why}"
        elif result.verdict and not verdicts.get(result.name, "").startswith("FAILED"):
            verdicts[result.name] = result.verdict
    usual = [result.gap for result in results if result.longest_gap == LONGEST_GAP]
    return {
        "drills": len(results),
        "requests": sum(r.requests for r in results),
        "lost": sum(r.lost for r in results),
        "changed": sum(r.changed for r in results),
        "failed": sum(not r.passed for r in results),
        "refused": sum(r.refused for r in results),
        "longest_gap_s": round(max(usual, default=0.0), 2),
        "by_drill": table,
        "verdicts": verdicts | {name: f"SKIPPED: {why}" for name, why in skipped.items()},
    }

"""Where a run is in its steady state. Pure: records in, a window out.

The rule. The window begins when the load is up: in a closed loop at the `concurrency`-th completion (every client has
been through once), in an open one when the median request's time has passed once. It ends with the last arrival, after
which the load falls. It is called steady when it holds MIN_HALF arrivals in each half and its halves agree: output
tokens within RATE_TOLERANCE and requests in flight within FLIGHT_TOLERANCE (a queue that grows is no steady state),
both widened by 2 / sqrt(arrivals of a half), the noise of random arrivals. Otherwise the window is the whole run.

Figures are of the steady state in open loops, whose last requests would else count as idle time, and of the whole run
in closed ones, as other load generators measure them; LoadSpec.window says otherwise.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from nori_cluster.bench.records import LoadSpec, RequestRecord

MIN_HALF = 8
RATE_TOLERANCE = 0.10
FLIGHT_TOLERANCE = 0.20


class Window(msgspec.Struct, frozen=True):
    """Seconds of the run that figures are of. whole: all of it. steady, rule: was a steady state found, and how."""

    start: float
    end: float
    whole: bool
    steady: bool
    rule: str


class Tokens(msgspec.Struct, frozen=True):
    """Output over time. times ascending [E]; counts: tokens of each event [E]."""

    times: NDArray[np.float64]
    counts: NDArray[np.float64]

    def between(self, start: float, end: float) -> float:
        """Tokens in (start, end], so that neighbouring windows share none."""
        first, last = np.searchsorted(self.times, [start, end], side="right")
        return float(self.counts[first:last].sum())


def in_flight(records: Sequence[RequestRecord], start: float, end: float) -> float:
    """Mean number of requests between `due` and their last event, over [start, end]."""
    busy = sum(max(0.0, min(r.last, end) - max(r.due, start)) for r in records if r.last is not None)
    return busy / (end - start)


def find_window(spec: LoadSpec, records: Sequence[RequestRecord], tokens: Tokens) -> Window:
    """records: those that ended well, by number; tokens: their output."""
    found = find_steady(spec, records, tokens)
    wanted = spec.window == "steady" or (spec.window == "auto" and spec.arrival != "closed")
    if found.whole or wanted:
        return found
    last = max(r.last for r in records if r.last is not None)
    return Window(0.0, last, True, True, f"whole run; steady from {found.start:.1f} to {found.end:.1f} s: {found.rule}")


def find_steady(spec: LoadSpec, records: Sequence[RequestRecord], tokens: Tokens) -> Window:
    """The steady state, or the whole run where there is none."""
    if not records:
        return Window(0.0, 0.0, True, False, "no request ended well")
    ends = sorted(r.last for r in records if r.last is not None)
    whole_end = ends[-1]

    def unsteady(reason: str) -> Window:
        return Window(0.0, whole_end, True, False, f"whole run: {reason}")

    end = max(r.due for r in records)
    if spec.arrival == "closed":
        if len(ends) < spec.concurrency:
            return unsteady("fewer completions than clients")
        start, begins = ends[spec.concurrency - 1], f"completion {spec.concurrency}"
    else:
        start = float(np.median([r.last - r.due for r in records if r.last is not None]))
        begins = "the median request's time"
    middle = (start + end) / 2
    dues = np.array([r.due for r in records])
    halves = int(((dues >= start) & (dues < middle)).sum()), int(((dues >= middle) & (dues <= end)).sum())
    if end <= start or min(halves) < MIN_HALF:
        return unsteady(f"fewer than {MIN_HALF} arrivals in a half between {begins} and the last arrival")
    noise = 2 / float(np.sqrt(min(halves)))
    spans = ((start, middle), (middle, end))
    rates = [tokens.between(*span) for span in spans]
    flights = [in_flight(records, *span) for span in spans]
    if _apart(rates) > RATE_TOLERANCE + noise:
        return unsteady(f"output of the halves differs by {_apart(rates):.0%}")
    if _apart(flights) > FLIGHT_TOLERANCE + noise:
        return unsteady(f"requests in flight differ by {_apart(flights):.0%} between the halves")
    return Window(start, end, False, True, f"{begins} to the last arrival; halves agree")


def _apart(pair: Sequence[float]) -> float:
    """|a - b| over their mean."""
    mean = (pair[0] + pair[1]) / 2
    return abs(pair[0] - pair[1]) / mean if mean else 0.0

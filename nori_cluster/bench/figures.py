"""Records → the few hundred numbers that a page draws: distributions of TTFT and TPOT, and the run over time."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from nori_cluster.bench.metrics import output_over_time, tpot_of
from nori_cluster.bench.records import RequestRecord

CURVE_POINTS = 200
BUCKETS = 120


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Points of a line, x ascending."""

    x: list[float]
    y: list[float]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """ttft, tpot: ms → share of requests at or below. output: s → tokens/s. in_flight: s → requests. failed_at: s."""

    ttft: Curve | None = None
    tpot: Curve | None = None
    output: Curve | None = None
    in_flight: Curve | None = None
    failed_at: list[float] = []


def figures(records: Sequence[RequestRecord]) -> Figures:
    """Of one round. Latencies are of all requests that ended well, in the window or not."""
    ended = [record for record in records if record.failure is None and record.events]
    failed = sorted(record.last or record.sent for record in records if record.failure is not None)
    if not ended:
        return Figures(failed_at=failed[:CURVE_POINTS])
    times = _edges(max(max(r.events[-1] for r in ended), failed[-1] if failed else 0.0))
    tokens = output_over_time(ended)
    rate = [tokens.between(*span) / (span[1] - span[0]) for span in itertools.pairwise(times)]
    starts = np.sort([record.due for record in records])
    ends = np.sort([max(record.due, record.last or record.sent) for record in records])
    flight = np.searchsorted(starts, times, side="right") - np.searchsorted(ends, times, side="right")
    return Figures(
        ttft=distribution([record.first - record.due for record in ended if record.first is not None]),
        tpot=distribution([tpot for record in ended if (tpot := tpot_of(record)) is not None]),
        output=Curve(x=_short(times[1:]), y=_short(rate)),
        in_flight=Curve(x=_short(times), y=_short(flight.tolist())),
        failed_at=_short(failed[:CURVE_POINTS]),
    )


def distribution(seconds: Sequence[float]) -> Curve | None:
    """The cumulative distribution in ms, thinned to CURVE_POINTS ranks; the last point is the maximum."""
    if not seconds:
        return None
    ordered = np.sort(seconds) * 1e3
    count = len(ordered)
    ranks = np.unique(np.linspace(1, count, min(count, CURVE_POINTS)).round().astype(int))
    return Curve(x=_short(ordered[ranks - 1].tolist()), y=_short((ranks / count).tolist()))


def _edges(end: float) -> list[float]:
    """Whole tenths of seconds where a run is long enough."""
    width = max(0.1, round(end / BUCKETS, 1))
    edges: list[float] = (np.arange(0, int(end / width) + 2) * width).tolist()
    return edges


def _short(values: Sequence[float]) -> list[float]:
    """Four significant digits: a report is for people too."""
    return [float(f"{value:.4g}") for value in values]

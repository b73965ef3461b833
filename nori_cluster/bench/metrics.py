"""RequestRecords → Summary. Pure arithmetic on what the clients saw; steady.find_window says which part of it counts.

Latencies are of requests due in the window; token rates of events in it. TTFT and E2E count from `due`, so a request
that waited in the client for its turn, or behind a stall, has waited (no coordinated omission).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from nori_cluster.bench.records import LoadSpec, Percentiles, RequestRecord, Slo, Summary
from nori_cluster.bench.steady import Tokens, Window, find_window

EXAMPLES = 3  # failures told in full, per kind


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Nearest rank: the smallest sample with p % of all at or below it. In ms; None when there is no sample."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(percent: float) -> float:
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] * 1e3

    mean = math.fsum(ordered) / len(ordered) * 1e3
    return Percentiles(count=len(ordered), mean=mean, p50=rank(50), p90=rank(90), p99=rank(99), max=ordered[-1] * 1e3)


def output_tokens(record: RequestRecord) -> int:
    """As the server counts; else one per event."""
    return len(record.events) if record.output_tokens is None else record.output_tokens


def input_tokens(record: RequestRecord) -> int:
    return record.asked_input if record.prompt_tokens is None else record.prompt_tokens


def event_tokens(record: RequestRecord) -> Sequence[float]:
    """Tokens of each event; where the server does not say, its total spread evenly."""
    if len(record.event_tokens) == len(record.events):
        return record.event_tokens
    return [output_tokens(record) / len(record.events)] * len(record.events)


def tpot_of(record: RequestRecord) -> float | None:
    """Seconds per token after the first; None for an output of one token."""
    tokens = output_tokens(record)
    if tokens < 2 or record.first is None or record.last is None:
        return None
    return (record.last - record.first) / (tokens - 1)


def itl_of(record: RequestRecord) -> list[float]:
    """Gaps between events, each divided by the tokens that came with its end: one sample per event after the first."""
    gaps = zip(record.events, record.events[1:], event_tokens(record)[1:], strict=False)
    return [(later - earlier) / max(1, tokens) for earlier, later, tokens in gaps]


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Ended well, within every bound that is set."""
    if record.failure is not None or record.first is None or record.last is None:
        return False
    seen = ((record.first - record.due, slo.ttft), (tpot_of(record), slo.tpot), (record.last - record.due, slo.e2e))
    return all(bound is None or value is None or value * 1e3 <= bound for value, bound in seen)


def output_over_time(records: Sequence[RequestRecord]) -> Tokens:
    times = np.array([time for r in records for time in r.events], np.float64)
    counts = np.array([tokens for r in records for tokens in event_tokens(r)], np.float64)
    order = np.argsort(times, kind="stable")
    return Tokens(times[order], counts[order])


def max_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests that were sent and not over at one time."""
    changes = sorted(change for r in records for change in ((r.sent, 1), (max(r.sent, r.last or r.sent), -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def failure_examples(records: Sequence[RequestRecord]) -> list[str]:
    """The first EXAMPLES messages of each kind, alike ones once."""
    told: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            examples = told.setdefault(record.failure, [])
            text = f"{record.failure}: request {record.number}: {record.message}"
            alike = any(example.endswith(record.message) for example in examples)
            if len(examples) < EXAMPLES and not alike:
                examples.append(text)
    return [text for examples in told.values() for text in examples]


def summarize(
    records: Sequence[RequestRecord],
    spec: LoadSpec,
    slo: Slo,
    client_cpus: Sequence[float],
    *,
    reference: bool = False,
) -> Summary:
    """client_cpus: busy share per client process. reference: tokens were compared, so mismatches are counted.

    Never raises for bad runs: with nothing completed the latencies are None and the rates 0.
    """
    completed = [r for r in records if r.failure is None and r.events]
    tokens = output_over_time(completed)
    window = find_window(spec, completed, tokens)
    due = [r for r in records if window.whole or window.start <= r.due <= window.end]
    counted = [r for r in due if r.failure is None and r.events]
    failures = Counter(r.failure for r in records if r.failure is not None)
    run = max((r.last or r.sent for r in records), default=0.0)
    cached = [r.cached_tokens for r in completed]
    return Summary(
        requests=len(records),
        completed=len(completed),
        failures=dict(sorted(failures.items())),
        failure_examples=failure_examples(records),
        window_start=window.start,
        window_end=window.end,
        steady=window.steady,
        steady_rule=window.rule,
        **_rates(completed, tokens, window, slo),
        ttft=percentiles([r.first - r.due for r in counted if r.first is not None]),
        tpot=percentiles([tpot for r in counted if (tpot := tpot_of(r)) is not None]),
        itl=percentiles([gap for r in counted for gap in itl_of(r)]),
        e2e=percentiles([r.last - r.due for r in counted if r.last is not None]),
        good_share=sum(is_good(r, slo) for r in due) / len(due) if due else 0.0,
        input_tokens=sum(map(input_tokens, completed)),
        output_tokens=sum(map(output_tokens, completed)),
        cached_tokens=None if None in cached or not cached else sum(c or 0 for c in cached),
        max_concurrency=max_concurrency(records),
        client_cpu=max(client_cpus, default=0.0),
        client_cpus=list(client_cpus),
        client_events_s=_per(sum(len(r.events) for r in records), run),
        mismatched=failures.get("mismatch", 0) if reference else None,
        run_s=run,
        run_output_tok_s=_per(sum(map(output_tokens, completed)), run),
        send_lag=percentiles([max(0.0, r.sent - r.due) for r in records]),
        short_outputs=sum(spec.ignore_eos and output_tokens(r) < r.asked_output for r in completed),
    )


def _rates(completed: Sequence[RequestRecord], tokens: Tokens, window: Window, slo: Slo) -> dict[str, Any]:
    """Per second of the window. A prompt counts where its first token came; requests where they ended."""
    span = window.end - window.start
    start = -math.inf if window.whole else window.start
    prefilled = [r for r in completed if r.first is not None and start < r.first <= window.end]
    output, prompt = tokens.between(start, window.end), sum(map(input_tokens, prefilled))
    ended = [r for r in completed if r.last is not None and start < r.last <= window.end]
    uncached = None
    if prefilled and all(r.cached_tokens is not None for r in prefilled):
        uncached = _per(output + prompt - sum(r.cached_tokens or 0 for r in prefilled), span)
    return {
        "output_tok_s": _per(output, span),
        "total_tok_s": _per(output + prompt, span),
        "uncached_tok_s": uncached,
        "request_s": _per(len(ended), span),
        "goodput_request_s": _per(sum(is_good(r, slo) for r in ended), span),
    }


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0

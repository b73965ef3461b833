"""Records → numbers: percentiles, latencies from `due`, rates in the window, goodput, failures, steady state."""

from typing import Any

import pytest

from nori_cluster.bench.metrics import is_good, itl_of, max_concurrency, percentiles, summarize, tpot_of
from nori_cluster.bench.records import Lengths, LoadSpec, RequestRecord, Slo

pytestmark = pytest.mark.unit
SPEC = LoadSpec(concurrency=2, requests=40, output=Lengths(median=5))


def record(
    number: int, due: float, first: float = 0.1, gap: float = 0.02, tokens: int = 5, **more: Any
) -> RequestRecord:
    """first and gap: seconds after due, and between events of one token each."""
    events = tuple(due + first + gap * i for i in range(tokens))
    values = {
        "number": number,
        "due": due,
        "sent": due,
        "first": events[0] if events else None,
        "last": events[-1] if events else None,
        "events": events,
        "event_tokens": (1,) * tokens,
        "asked_input": 10,
        "asked_output": tokens,
        "prompt_tokens": 10,
        "output_tokens": tokens,
        "cached_tokens": 4,
        "finish_reason": "length",
    }
    return RequestRecord(**{**values, **more})


def closed_loop(count: int, clients: int = 2, length: float = 0.2) -> list[RequestRecord]:
    return [record(i, (i // clients) * length, first=length - 0.081) for i in range(count)]


def test_percentiles_are_nearest_rank() -> None:
    found = percentiles([i / 1000 for i in range(100, 0, -1)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == pytest.approx((50, 90, 99, 100))
    assert found.mean == pytest.approx(50.5)
    assert found.count == 100
    single = percentiles([0.007])
    assert single is not None
    assert single.p50 == single.p99 == single.max == pytest.approx(7)
    assert percentiles([]) is None


def test_tpot_and_itl() -> None:
    several = record(0, 0.0, event_tokens=(1, 4, 1, 2, 2), output_tokens=10)
    assert tpot_of(several) == pytest.approx(0.08 / 9)
    assert itl_of(several) == pytest.approx([0.005, 0.02, 0.01, 0.01])
    unknown = record(0, 0.0, event_tokens=(), output_tokens=10)
    assert itl_of(unknown) == pytest.approx([0.01] * 4)
    assert tpot_of(record(0, 0.0, tokens=1)) is None


def test_latencies_count_from_due_and_not_from_sent() -> None:
    summary = summarize([record(0, 1.0, first=0.5, sent=1.4)], SPEC, Slo(), [0.1])
    assert summary.ttft is not None
    assert summary.e2e is not None
    assert summary.send_lag is not None
    assert summary.ttft.p50 == pytest.approx(500)
    assert summary.e2e.p50 == pytest.approx(580)
    assert summary.send_lag.p50 == pytest.approx(400)


def test_figures_of_a_closed_loop_are_of_the_whole_run_unless_asked_otherwise() -> None:
    records = closed_loop(80)
    summary = summarize(records, SPEC, Slo(), [])
    assert summary.steady
    assert (summary.window_start, summary.window_end) == (0, records[-1].last)
    assert summary.ttft is not None
    assert summary.ttft.count == 80
    assert summary.output_tok_s == summary.run_output_tok_s


def test_a_steady_closed_loop_and_its_rates() -> None:
    spec = LoadSpec(concurrency=2, requests=80, output=Lengths(median=5), window="steady")
    summary = summarize(closed_loop(80), spec, Slo(), [0.1, 0.3])
    assert summary.steady, summary.steady_rule
    assert summary.window_start == pytest.approx(0.199)
    assert summary.window_end == pytest.approx(7.8)
    assert summary.output_tok_s == pytest.approx(50, rel=0.01)  # 2 clients, 5 tokens in 0.2 s
    assert summary.total_tok_s == pytest.approx(150, rel=0.01)
    assert summary.uncached_tok_s == pytest.approx(110, rel=0.01)
    assert summary.request_s == pytest.approx(10, rel=0.01)
    assert summary.run_output_tok_s == pytest.approx(50, rel=0.01)
    assert summary.client_cpu == 0.3
    assert summary.max_concurrency == 2
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (800, 400, 320)


def test_a_run_that_slows_down_is_not_steady() -> None:
    records, at = [], 0.0
    for i in range(60):
        records.append(record(i, at, first=0.1 + i * 0.02))
        at += 0.2 + i * 0.02
    summary = summarize(records, LoadSpec(concurrency=1, requests=60), Slo(), [])
    assert not summary.steady
    assert "halves" in summary.steady_rule
    assert summary.window_start == 0
    assert summary.window_end == pytest.approx(records[-1].last)


def test_an_open_loop_whose_queue_grows_is_not_steady() -> None:
    spec = LoadSpec(arrival="constant", rate=10.0, requests=100)
    growing = [record(i, i / 10, first=0.1 + i * 0.05) for i in range(100)]
    assert not summarize(growing, spec, Slo(), []).steady
    level = [record(i, i / 10, first=0.3) for i in range(100)]
    assert summarize(level, spec, Slo(), []).steady


def test_a_short_run_is_taken_whole() -> None:
    summary = summarize(closed_loop(6), SPEC, Slo(), [])
    assert not summary.steady
    assert "fewer than" in summary.steady_rule
    assert summary.output_tok_s == pytest.approx(50, rel=0.01)


def test_goodput_needs_every_bound() -> None:
    good, slow_start, slow_rest = record(0, 0.0), record(1, 0.0, first=0.6), record(2, 0.0, gap=0.04)
    one_token = record(3, 0.0, tokens=1)
    failed = record(4, 0.0, failure="timeout")
    assert [is_good(r, Slo()) for r in (good, slow_start, slow_rest, one_token, failed)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert is_good(slow_start, Slo(ttft=None))
    assert not is_good(good, Slo(e2e=100.0))
    summary = summarize([good, slow_start, slow_rest, one_token, failed], SPEC, Slo(), [])
    assert summary.good_share == pytest.approx(2 / 5)


def test_failures_by_kind_with_examples_once_each() -> None:
    broken = [record(i, 0.0, tokens=2, failure="broken_stream", message="cut after 2") for i in range(5)]
    refused = [record(9, 0.0, tokens=0, failure="status", message="HTTP 503: full")]
    summary = summarize([record(7, 0.0), *broken, *refused], SPEC, Slo(), [])
    assert summary.failures == {"broken_stream": 5, "status": 1}
    assert summary.failure_examples == ["broken_stream: request 0: cut after 2", "status: request 9: HTTP 503: full"]
    assert (summary.requests, summary.completed) == (7, 1)
    assert summary.output_tokens == 5


def test_nothing_ended_well() -> None:
    for records in ([], [record(0, 0.0, tokens=0, failure="connect", message="refused")]):
        summary = summarize(records, SPEC, Slo(), [])
        assert summary.ttft is None
        assert summary.output_tok_s == summary.goodput_request_s == 0
        assert not summary.steady


def test_what_the_server_does_not_say_is_not_made_up() -> None:
    silent = [
        record(i, 0.0, event_tokens=(), output_tokens=None, prompt_tokens=None, cached_tokens=None) for i in range(2)
    ]
    summary = summarize(silent, SPEC, Slo(), [])
    assert summary.uncached_tok_s is None
    assert summary.cached_tokens is None
    assert (summary.input_tokens, summary.output_tokens) == (20, 10)


def test_short_outputs_and_mismatches_are_counted() -> None:
    records = [record(0, 0.0, asked_output=9), record(1, 0.0, failure="mismatch", message="token 3")]
    summary = summarize(records, SPEC, Slo(), [], reference=True)
    assert summary.short_outputs == 1
    assert summary.mismatched == 1
    assert summarize(records[:1], SPEC, Slo(), []).mismatched is None


def test_max_concurrency() -> None:
    assert max_concurrency([record(0, 0.0), record(1, 0.05), record(2, 5.0)]) == 2
    assert max_concurrency([]) == 0

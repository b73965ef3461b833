"""Log set-up and the gateway's Prometheus metrics (names: `nori_` and vLLM's suffixes).

Counts are plain Python numbers owned by the event loop; a scrape reads them through one collector.
"""

import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nori_cluster.errors import NoriError, NotReady, Overloaded, RateLimited

# Seconds. The first are vLLM's buckets, so that dashboards carry over.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0,
    960.0,
)  # fmt: skip


def configure_logging(component: str, level: str = "INFO") -> None:
    """One line per record on stderr: time, level, component, logger, message. Replaces the root handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {component} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").setLevel("ERROR")  # below: start, stop, and a line or two per malformed request


class Histogram:
    """Observations in fixed buckets; about 0.2 us each. bounds: ascending upper bounds in seconds, inclusive."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count at or below it) pairs, the last one +Inf."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


class ModelMetrics:
    """What one gateway counts for one model. Written by the frontend's Generations only."""

    def __init__(self) -> None:
        self.running = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.success: Counter[str] = Counter()  # finish reason → candidates
        self.errors: Counter[str] = Counter()  # error code → calls
        self.aborted = 0  # calls closed before their end
        self.stop_overrun_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        self.latency = Histogram(REQUEST_BUCKETS)
        self.queue_time = Histogram(REQUEST_BUCKETS)


HISTOGRAMS = {
    "first_token": ("nori_time_to_first_token_seconds", "Submit to first token of a call."),
    "inter_token": ("nori_inter_token_latency_seconds", "Between two messages of tokens of one candidate."),
    "per_output_token": ("nori_request_time_per_output_token_seconds", "Mean time per output token after the first."),
    "latency": ("nori_e2e_request_latency_seconds", "Submit to the last token of a call."),
    "queue_time": ("nori_request_queue_time_seconds", "Waiting in a group before the first step."),
}
COUNTERS = {
    "prompt_tokens": ("nori_prompt_tokens", "Prompt tokens of ended calls."),
    "generation_tokens": ("nori_generation_tokens", "Generated tokens counted in usage."),
    "aborted": ("nori_request_aborted", "Calls closed before their end: client gone, drain, deadline."),
    "stop_overrun_tokens": ("nori_stop_overrun_tokens", "Tokens that arrived after a stop string had matched."),
}


class GatewayMetrics(Collector):
    """All counts of one gateway process; register it in a CollectorRegistry to export it."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self.http: Counter[tuple[str, int]] = Counter()  # (route, status) → responses
        self.refused: Counter[str] = Counter()  # error code → calls, of HTTP and gRPC

    def refuse(self, error: NoriError) -> None:
        """Counts a call that was turned away for lack of room or of a group; a probe that hears NotReady is none."""
        if isinstance(error, Overloaded | RateLimited) and not isinstance(error, NotReady):
            self.refused[error.code or "error"] += 1

    def model(self, name: str) -> ModelMetrics:
        return self.models.setdefault(name, ModelMetrics())

    def collect(self) -> Iterator[Metric]:
        models = list(self.models.items())
        running = GaugeMetricFamily("nori_num_requests_running", "Calls in this gateway.", labels=["model_name"])
        for name, metrics in models:
            running.add_metric([name], metrics.running)
        yield running
        for field, (metric, text) in COUNTERS.items():
            counter = CounterMetricFamily(metric, text, labels=["model_name"])
            for name, metrics in models:
                counter.add_metric([name], getattr(metrics, field))
            yield counter
        for field, (metric, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(metric, text, labels=["model_name"])
            for name, metrics in models:
                histogram: Histogram = getattr(metrics, field)
                family.add_metric([name], histogram.cumulative(), histogram.total)
            yield family
        yield from self._labelled()

    def _labelled(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "nori_request_success", "Candidates that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        errors = CounterMetricFamily("nori_request_errors", "Calls that failed.", labels=["model_name", "code"])
        for name, metrics in list(self.models.items()):
            for reason, count in list(metrics.success.items()):
                success.add_metric([name, reason], count)
            for code, count in list(metrics.errors.items()):
                errors.add_metric([name, code], count)
        yield success
        yield errors
        http = CounterMetricFamily("nori_http_responses", "HTTP responses.", labels=["route", "code"])
        for (route, status), count in list(self.http.items()):
            http.add_metric([route, str(status)], count)
        yield http
        refused = CounterMetricFamily(
            "nori_requests_refused", "Calls answered with 429 or 503 (gRPC: the same), by reason.", labels=["reason"]
        )
        for code, count in list(self.refused.items()):
            refused.add_metric([code], count)
        yield refused

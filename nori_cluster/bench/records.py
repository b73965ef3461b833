"""The words of the benchmark as frozen structs: what is asked for, what one request saw, what a run amounts to.

LoadSpec: the user → runner. RequestRecord: client → metrics. Summary: metrics → report. Times are float seconds on one
monotonic clock, 0 at the start of the measured run; latencies in a Summary are milliseconds.
"""

from typing import Any, Literal

import msgspec

Arrival = Literal["closed", "poisson", "gamma", "constant", "trace"]
Failure = Literal["connect", "status", "timeout", "broken_stream", "protocol", "mismatch"]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per request. fixed: exactly `median`. lognormal: fitted to median and mean, cut at [minimum, maximum]."""

    kind: Literal["fixed", "lognormal"] = "fixed"
    median: int = 128
    mean: float | None = None
    minimum: int = 1
    maximum: int | None = None


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One load, complete: with the same spec and seed the same requests are sent again.

    arrival closed: `concurrency` clients, each sends its next request when its last one ended. The others are open: at
    `rate` requests per second whatever the server does; gamma needs burstiness (shape; 1 = Poisson, lower = burstier).
    trace: a file in `trace_format`, its clock sped up by trace_speed. duration (s) or requests bounds the run.
    """

    arrival: Arrival = "closed"
    concurrency: int = 8
    rate: float | None = None
    burstiness: float = 1.0
    requests: int | None = None
    duration: float | None = None
    trace: str | None = None
    trace_format: Literal["azure", "mooncake", "burstgpt"] | None = None
    trace_speed: float = 1.0
    input: Lengths = Lengths()
    output: Lengths = Lengths()
    shared_prefix: int = 0  # leading tokens that all prompts share
    vocab_size: int = 32_000  # prompts are made of token ids from 100 to below this
    ignore_eos: bool = True
    sampling: dict[str, Any] = {}  # extra fields of the request body, e.g. temperature
    endpoint: Literal["completions", "chat", "grpc"] = "completions"
    warmup: int = 2  # requests sent before, not counted
    window: Literal["auto", "steady", "run"] = "auto"  # what figures are of; auto: run in a closed loop, else steady
    seed: int = 0
    processes: int = 1
    timeout: float = 600.0


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good when it is within all bounds that are set (ms)."""

    ttft: float | None = 500.0
    tpot: float | None = 30.0
    e2e: float | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the client saw of one request.

    due: when it should have been sent (open loops), so that waiting in the client counts; closed loops: when it was.
    events: time of each stream event with text or tokens; event_tokens: tokens of each, as far as the server says.
    prompt_tokens, output_tokens, cached_tokens: as the server's usage says; None where it says nothing.
    token_ids: of the output when the server returns them (reference check), else empty. failure None = it ended well.
    """

    number: int
    due: float
    sent: float
    first: float | None
    last: float | None
    events: tuple[float, ...]
    event_tokens: tuple[int, ...]
    asked_input: int
    asked_output: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    token_ids: tuple[int, ...] = ()
    failure: Failure | None = None
    message: str = ""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds over `count` samples; nearest-rank percentiles."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. Rates are per second of the measured window [window_start, window_end].

    ttft from `due`; tpot = (last - first) / (tokens - 1) per request; itl between events, divided by their tokens.
    uncached_tok_s counts prompt tokens that no cache answered plus output. goodput: good requests per second, and their
    share. client_cpu: busy share of the client's processes; client_events_s: events they took per second.
    steady: whether a steady state was found; the window is it where the load asks for that, else the whole run.
    """

    requests: int
    completed: int
    failures: dict[str, int]
    failure_examples: list[str]
    window_start: float
    window_end: float
    steady: bool
    output_tok_s: float
    total_tok_s: float
    uncached_tok_s: float | None
    request_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    goodput_request_s: float
    good_share: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    max_concurrency: int
    client_cpu: float
    client_events_s: float
    mismatched: int | None = None  # requests whose tokens differ from the reference run
    run_s: float = 0.0  # the whole run: 0 to the last event; run_output_tok_s is over it, with ramp-up and tail
    run_output_tok_s: float = 0.0
    steady_rule: str = ""  # how the window was found, or why there is no steady state
    send_lag: Percentiles | None = None  # sent - due: what the client itself was late, or waited for a connection
    short_outputs: int = 0  # ended with fewer tokens than asked for although ignore_eos was set
    client_cpus: list[float] = []  # busy share of each client process; client_cpu is the highest

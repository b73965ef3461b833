"""Whole runs against a null server in another process: exact delays, stalls, broken streams, references, processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nori_cluster.bench.client import TargetError
from nori_cluster.bench.metrics import percentiles, summarize
from nori_cluster.bench.null_server import NullServerProcess, Reply, Script
from nori_cluster.bench.records import Lengths, LoadSpec, Percentiles, RequestRecord, Slo, Summary
from nori_cluster.bench.reference import BadReference, write_tokens
from nori_cluster.bench.runner import LoadResult, run_load
from nori_cluster.bench.workload import Workload
from nori_cluster.cli.main import main
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.contract
EXACT = 2.0  # ms
TRIES = 4  # a busy machine wakes a process late now and then


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[NullServerProcess]:
    with NullServerProcess(getattr(request, "param", Script())) as process:
        yield process


def load(**fields: Any) -> LoadSpec:
    small = {"input": Lengths(median=16), "output": Lengths(median=8), "warmup": 0, "concurrency": 1, "timeout": 20.0}
    return LoadSpec(**{**small, **fields})


def of(result: LoadResult, spec: LoadSpec) -> Summary:
    return summarize(result.records, spec, Slo(), result.cpus)


def near(seen: Percentiles | None, scripted: Percentiles | None) -> bool:
    assert seen is not None
    assert scripted is not None
    assert seen.count == scripted.count
    return all(
        abs(getattr(seen, name) - getattr(scripted, name)) <= EXACT for name in ("p50", "p90", "p99", "max", "mean")
    )


DELAYS = [0.004 * (1 + i % 10) for i in range(15)]  # too few for a steady state: all are counted
SCRIPTED = Script(replies=tuple(Reply(first=delay, gap=0.003 + delay / 10) for delay in DELAYS))


@pytest.mark.parametrize("server", [SCRIPTED], indirect=True)
def test_percentiles_are_the_scripted_ones_to_two_milliseconds(server: NullServerProcess) -> None:
    """A busy machine wakes one side late now and then: of several runs each request's best one counts."""
    spec = load(requests=len(DELAYS))
    gaps = [0.003 + delay / 10 for delay in DELAYS]
    ends = [delay + 7 * gap for delay, gap in zip(DELAYS, gaps, strict=True)]
    best: dict[int, RequestRecord] = {}

    def error(record: RequestRecord) -> float:
        assert record.first is not None
        assert record.last is not None
        late_start = record.first - record.due - DELAYS[record.number]
        return max(abs(late_start), abs(record.last - record.due - ends[record.number]))

    for _ in range(2 * TRIES):
        for record in run_load(server.url, None, spec).records:
            assert record.failure is None, record.message
            best[record.number] = min(record, best.get(record.number, record), key=error)
        summary = summarize(list(best.values()), spec, Slo(), [])
        pairs = ((summary.ttft, DELAYS), (summary.tpot, gaps), (summary.e2e, ends))
        if all(near(seen, percentiles(scripted)) for seen, scripted in pairs):
            break
    for seen, scripted in pairs:
        assert near(seen, percentiles(scripted)), (seen, scripted)
    assert summary.output_tokens == 8 * len(DELAYS)


STALL = 0.5


@pytest.mark.parametrize(
    "server", [Script(replies=(Reply(first=0.005, gap=0.002, tokens=3),), stall=(0.5, STALL))], indirect=True
)
def test_a_stall_shows_in_the_p99_of_an_open_loop(server: NullServerProcess) -> None:
    """Requests that were due during the stall waited, whether the client had sent them or not."""
    spec = load(arrival="constant", rate=100.0, requests=200)
    result = run_load(server.url, None, spec)
    summary = of(result, spec)
    assert summary.ttft is not None
    assert summary.ttft.p99 > 0.9 * STALL * 1000
    assert summary.max_concurrency >= 45
    every = percentiles([record.first - record.due for record in result.records if record.first is not None])
    assert every is not None
    assert every.max == pytest.approx(STALL * 1000, abs=100)
    waited = 0.25  # of the run: the waits of those due in the stall fall evenly from 0.5 s to nothing
    assert every.p90 == pytest.approx(STALL * 1000 * (1 - 0.1 / waited), rel=0.25)
    assert every.p50 < 100


@pytest.mark.parametrize("server", [Script(replies=(Reply(first=0.02, gap=0.001, tokens=4),))], indirect=True)
def test_open_loop_requests_leave_when_they_are_due(server: NullServerProcess) -> None:
    spec = load(arrival="poisson", rate=200.0, requests=200, seed=4)
    result = run_load(server.url, None, spec)
    dues = [plan.due for plan in Workload(spec).plans()]
    assert [record.due for record in result.records] == pytest.approx(dues, abs=1e-6)
    summary = of(result, spec)
    assert summary.send_lag is not None
    assert summary.send_lag.p50 < EXACT


FAULTS = {
    "status": ("status", "HTTP 503: too many requests wait"),
    "cut": ("broken_stream", "lost after 4 events"),
    "no_done": ("broken_stream", "before [DONE], after 4 events"),
    "garbage": ("protocol", "{not json"),
    "error_event": ("broken_stream", "the engine fell over"),
    "silent": ("timeout", "4 events had come"),
    "hang_up": ("broken_stream", "closed before any answer"),
    "not_http": ("protocol", "not HTTP/1.1"),
    "no_stream": ("protocol", "no event stream"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_answers_by_kind_and_the_others_go_on(fault: Any) -> None:
    kind, words = FAULTS[fault]
    replies = (Reply(first=0.001, gap=0.001, fault=fault), Reply(first=0.001, gap=0.001))
    with NullServerProcess(Script(replies=replies)) as server:
        spec = load(requests=4, timeout=0.3)
        result = run_load(server.url, None, spec)
        summary = of(result, spec)
        failed = [record for record in result.records if record.failure is not None]
        assert {record.failure for record in failed} == {kind}
        assert all(words in record.message for record in failed)
        assert sum(summary.failures.values()) + summary.completed == 4
        assert summary.completed >= 2
        assert any(words in example for example in summary.failure_examples)


def test_a_server_that_dies_in_the_run_is_in_the_failures() -> None:
    with NullServerProcess(Script(replies=(Reply(first=0.01, gap=0.05),))) as server:
        spec = load(requests=12)

        def kill(phase: str, ended: int, failed: int, total: int | None) -> None:
            if ended >= 1:
                server.__exit__(None, None, None)

        summary = of(run_load(server.url, None, spec, progress=kill), spec)
    assert summary.failures["broken_stream"] >= 1
    assert summary.failures.get("connect", 0) >= 5
    assert any("Connection refused" in example or "111" in example for example in summary.failure_examples)


def test_processes_share_the_load(server: NullServerProcess) -> None:
    spec = load(requests=31, concurrency=5, processes=2, warmup=3)
    result = run_load(server.url, None, spec)
    assert [record.number for record in result.records] == list(range(31))
    assert len(result.warmup) == 3
    assert len(result.cpus) == 2
    assert of(result, spec).max_concurrency <= 5


def test_a_closed_loop_ends_after_its_duration(server: NullServerProcess) -> None:
    spec = load(duration=0.4)
    result = run_load(server.url, None, spec)
    assert len(result.records) > 1
    assert max(record.due for record in result.records) < 0.6


def test_chat(server: NullServerProcess) -> None:
    spec = load(requests=3, endpoint="chat")
    assert of(run_load(server.url, None, spec), spec).output_tokens == 24


def tokens_of(result: LoadResult) -> list[tuple[int, ...]]:
    return [record.token_ids for record in result.records]


def test_a_reference_run(server: NullServerProcess, tmp_path: Path) -> None:
    spec, path = load(requests=4), tmp_path / "tokens.jsonl"
    first = run_load(server.url, None, spec, with_ids=True)
    assert write_tokens(path, first.model, Workload(spec), first.records) == 4
    assert of(run_load(server.url, None, spec, reference=path), spec).failures == {}
    lines = path.read_text().splitlines()
    changed = json.loads(lines[2])
    changed["token_ids"][5] += 1
    path.write_text("\n".join([*lines[:2], json.dumps(changed), *lines[3:]]))
    result = run_load(server.url, None, spec, reference=path)
    summary = summarize(result.records, spec, Slo(), result.cpus, reference=True)
    assert summary.failures == {"mismatch": 1}
    assert summary.mismatched == 1
    assert "request 1: token 5 is" in summary.failure_examples[0]


def test_references_that_do_not_fit(server: NullServerProcess, tmp_path: Path) -> None:
    spec, path = load(requests=2), tmp_path / "tokens.jsonl"
    result = run_load(server.url, None, spec, with_ids=True)
    write_tokens(path, result.model, Workload(spec), result.records)
    with pytest.raises(BadReference, match="another prompt"):
        run_load(server.url, None, load(requests=2, seed=1), reference=path)
    with pytest.raises(BadReference, match="sampling"):
        run_load(server.url, None, load(requests=2, sampling={"temperature": 1}), reference=path)
    path.write_text("{}\n")
    with pytest.raises(BadReference, match=":1: not written by"):
        run_load(server.url, None, spec, reference=path)
    with pytest.raises(BadReference, match="No such file"):
        run_load(server.url, None, spec, reference=tmp_path / "none")


def test_a_server_that_is_not_there_or_serves_something_else(server: NullServerProcess) -> None:
    with pytest.raises(TargetError, match=r"nothing answers at http://127\.0\.0\.1:9 "):
        run_load("http://127.0.0.1:9", None, load(requests=1))
    with pytest.raises(TargetError, match="does not serve 'other'; it serves null"):
        run_load(server.url, "other", load(requests=1))
    with pytest.raises(ConfigError, match="not an address"):
        run_load("ftp://x", None, load(requests=1))


@pytest.mark.parametrize("server", [Script(replies=(Reply(fault="status"),))], indirect=True)
def test_a_server_that_answers_no_warm_up_request_ends_the_run(server: NullServerProcess) -> None:
    with pytest.raises(TargetError, match="status: HTTP 503: too many requests wait"):
        run_load(server.url, None, load(requests=5, warmup=2))


def test_the_command_prints_one_object_last(server: NullServerProcess, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "serve", "--url", server.url, "-c", "2", "-n", "8", "--input", "16", "--output", "4:6"]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert json.loads(out.splitlines()[-1])["summary"]["completed"] == 8
    assert "TTFT" in err


def test_the_client_takes_thirty_thousand_events_per_core_second(capfd: pytest.CaptureFixture[str]) -> None:
    """Of its own CPU time, also when nearly every event is a read of its own."""
    for _ in range(TRIES):
        assert main(["bench", "null", "--seconds", "0.5"]) == 0
        line = json.loads(capfd.readouterr().out.splitlines()[-1])
        limits = [line[name]["events_per_core_s"] for name in ("paced", "flat_out")]
        if min(limits) >= 30_000:
            break
    assert min(limits) >= 30_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slo-ttft", "0"], "--slo-ttft"),
        (["--slo-tpot", "soon"], "--slo-tpot"),
        (["--input", "x"], "--input"),
        (["--rate", "0"], "--rate"),
        (["--rate", "2", "-c", "4"], "--concurrency"),
        (["--trace", "none.csv"], "none.csv"),
        (["--save-tokens", "none/tokens"], "--save-tokens"),
        (["--endpoint", "grpc", "--url", "127.0.0.1"], "host:port"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert words in err[-1]
    assert "Traceback" not in "".join(err)


def test_records_survive_the_way_between_processes() -> None:
    record = RequestRecord(
        number=1, due=0.5, sent=0.6, first=None, last=None, events=(), event_tokens=(), asked_input=1, asked_output=1,
        prompt_tokens=None, output_tokens=None, cached_tokens=None, finish_reason=None, failure="connect", message="no",
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RequestRecord) == record

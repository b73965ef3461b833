"""Reports: the schema, what makes one invalid, the headline that is refused, what the pages hold."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from fakes.bench_runs import HOST, KNOWN, LOAD, TREE, report, rounds, run

from nori_cluster.bench import environment
from nori_cluster.bench.conditions import Conditions
from nori_cluster.bench.cost import Price, Prices
from nori_cluster.bench.environment import Device, Git, busy_share, is_loopback, machine
from nori_cluster.bench.figures import distribution
from nori_cluster.bench.markdown import number, to_markdown
from nori_cluster.bench.page import to_html
from nori_cluster.bench.records import Slo
from nori_cluster.bench.report import (
    SCHEMA_FILE,
    NoHeadline,
    Report,
    Sweep,
    SweepPoint,
    command,
    headline,
    median_round,
    missing_for_headline,
    read,
    schema,
    to_json,
)
from nori_cluster.bench.served import write
from nori_cluster.bench.svg import Line, plot, ticks
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit
PRICES = Prices(prices={"fake": Price(per_hour=3.6)}, currency="EUR", source="a list")


def swept() -> Report:
    good = report(prices=PRICES)
    assert good.summary is not None
    points = [
        SweepPoint(value=rate, summary=report([run(LOAD, tpot=0.01 * rate)]).summary or good.summary, missed=[])
        for rate in (4.0, 1.0, 2.0)
    ]
    sweep = Sweep(by="rate", bounds={"ttft_p99": 500.0, "tpot_p99": 30.0}, points=points, best=2.0, next=4.0)
    return msgspec.structs.replace(good, kind="sweep", sweep=sweep)


# -- schema ----------------------------------------------------------------------------------------------------------


def test_the_kept_schema_is_the_generated_one() -> None:
    kept = json.loads(SCHEMA_FILE.read_text())
    assert kept == json.loads(json.dumps(schema())), "nori bench schema > nori_cluster/bench/report.schema.json"
    jsonschema.Draft202012Validator.check_schema(kept)


@pytest.mark.parametrize(
    "made", [report(), report(rounds(3), prices=PRICES), report([run(LOAD, failures=200)]), swept()],
    ids=["one round", "rounds and cost", "all failed", "sweep"],
)  # fmt: skip
def test_reports_validate_and_come_back(made: Report, tmp_path: Path) -> None:
    jsonschema.validate(json.loads(to_json(made)), json.loads(SCHEMA_FILE.read_text()))
    write(made, tmp_path / "new" / "folder")
    assert read(tmp_path / "new/folder") == made
    assert read(tmp_path / "new/folder/report.json") == made


def test_the_schema_refuses_what_is_no_report() -> None:
    values = json.loads(to_json(report()))
    del values["conditions"]
    with pytest.raises(jsonschema.ValidationError, match="conditions"):
        jsonschema.validate(values, json.loads(SCHEMA_FILE.read_text()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "schema_version None"),
        ('{"schema_version": 99}', "knows reports up to 1"),
        ("[1]", "no benchmark report"),
        ("{", "no benchmark report"),
        ('{"schema_version": 1, "kind": "serve"}', "no benchmark report"),
    ],
)
def test_other_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.json")


# -- validity and the headline ---------------------------------------------------------------------------------------


def test_a_headline_carries_all_its_conditions() -> None:
    made = report(rounds(3), prices=PRICES)
    assert made.invalid_because == []
    text = headline(made)
    for words in (
        "output tokens/s ± 10% over 3 rounds", "total without cached input",
        "tiny (revision r1; weights bfloat16, KV bfloat16)",
        "1 × Fake CPU", "TP 1 × 1 group", "constant 10 requests/s", "16 in / 8 out", "TTFT P50 100 ms, P99 10",
        "TPOT P50 10.0 ms, P99 10.", "goodput ", "100% within TTFT ≤ 500 ms, TPOT ≤ 30 ms",
        "EUR per million output tokens (1 × Fake CPU at 3.6/h; prices: a list)",
    ):  # fmt: skip
        assert words in text
    assert "cost not stated" in headline(report(rounds(3)))


def refused(made: Report) -> str:
    with pytest.raises(NoHeadline, match="no headline: ") as caught:
        headline(made)
    return caught.value.message


def without(name: str) -> Conditions:
    empty: Any = getattr(Conditions(), name)
    return msgspec.structs.replace(KNOWN, **{name: empty})


@pytest.mark.parametrize(
    "name",
    ["server", "model", "revision", "weights", "kv_cache", "parallelism", "devices", "clocks", "software", "flags",
     "cache_state", "numerics_id"],
)  # fmt: skip
def test_no_headline_without_a_condition(name: str) -> None:
    assert f"unknown {name}" in refused(report(conditions=without(name)))


def test_other_servers_need_no_numerics_id() -> None:
    foreign = msgspec.structs.replace(KNOWN, server="vllm 0.32", numerics_id="")
    assert report(conditions=foreign).invalid_because == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: report(tree=Git(revision="abc", dirty=True)), "dirty tree: files differ from revision abc"),
        (lambda: report([run(LOAD, failures=3)]), r"3 of 200 requests failed \(3 status\), more than 1%"),
        (lambda: report([run(msgspec.structs.replace(LOAD, requests=60))]), "60 completed requests, fewer than 100"),
        (lambda: report([run(msgspec.structs.replace(LOAD, requests=12))]), "no steady state: whole run: fewer than"),
        (lambda: report([msgspec.structs.replace(run(LOAD), cpus=[0.2, 0.9])]), "client saturated: .* 90% busy"),
        (lambda: report([run(LOAD, failures=200)]), "TTFT was not measured"),
        (lambda: report(slo=Slo(ttft=None, tpot=None)), "no SLO, so no goodput"),
        (
            lambda: report(host=msgspec.structs.replace(HOST, busy_before=0.6)),
            "busy before the run: 60% of its processors",
        ),
        (lambda: report([*rounds(2), fast()]), r"the 3 rounds differ by \d+% in output"),
        (lambda: msgspec.structs.replace(swept(), summary=None), "`nori bench sweep` sends no requests"),
    ],
)
def test_no_headline_for_a_bad_run(made: Any, words: str) -> None:
    assert re.search(words, refused(made()))


def fast() -> Any:
    """A round at twice the rate."""
    load = msgspec.structs.replace(LOAD, rate=20.0)
    return run(load)


def test_a_server_elsewhere_is_not_disturbed_by_this_machine() -> None:
    busy = msgspec.structs.replace(HOST, busy_before=0.9)
    far = [msgspec.structs.replace(run(LOAD), url="http://far.example:8000")]
    assert report(far, host=busy).invalid_because == []


def test_late_clients_and_wrong_tokens_are_told() -> None:
    late = [msgspec.structs.replace(r, sent=r.due + 0.05) for r in run(LOAD).records]
    assert any("sent late" in why for why in report([msgspec.structs.replace(run(LOAD), records=late)]).invalid_because)
    short = [msgspec.structs.replace(r, output_tokens=3) for r in run(LOAD).records]
    made = report([msgspec.structs.replace(run(LOAD), records=short)])
    assert "200 outputs were shorter than asked although ignore_eos was set" in made.invalid_because


def test_the_median_round_counts() -> None:
    assert [median_round(rates) for rates in ([3.0], [1.0, 9.0, 2.0], [4.0, 1.0])] == [0, 2, 1]
    made = report(rounds(3))
    rates = [values["output_tok_s"] for values in made.rounds]
    assert made.metrics["output_tok_s"] == sorted(rates)[1]
    assert made.spread_rule.startswith("twice the range over the median of 3 rounds, at least 10%")


def test_a_spread_has_floors_and_grows_with_the_noise() -> None:
    calm, wild = report(rounds(3)), report([*rounds(1), *rounds(1, ttft=0.2), *rounds(1, ttft=0.3)])
    assert calm.spread["ttft_p50"] == 0.15
    assert calm.spread["ttft_p99"] == 0.35
    assert report(rounds(2)).spread["ttft_p50"] == 0.30
    assert wild.spread["ttft_p50"] == pytest.approx(2.0, abs=0.1)
    one = report()
    assert one.spread["output_tok_s"] == 0.20, "one round: the floor is doubled"
    assert one.spread_rule.startswith("one round")


# -- pages -----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Counts tags, keeps attributes and checks that what is opened is closed."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_the_figures_and_fetches_nothing() -> None:
    made = swept()
    text = to_html(made)
    tags = Tags(text)
    assert tags.open == []
    assert tags.addresses == []
    assert "script" not in tags.seen
    assert "url(" not in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert captions == [
        "Frontier: output against TTFT P99", "Frontier: output against TPOT P99",
        "TTFT: share of requests at or below", "TPOT: share of requests at or below",
        "Output over the run", "Requests in flight", "Cost of a million output tokens",
    ]  # fmt: skip
    assert tags.seen["svg"] == 7
    assert text.count("<circle") == 9, "three loads in both frontiers and in the cost"
    assert number(made.metrics["output_tok_s"]) in text
    assert "Highest rate within ttft_p99 ≤ 500 ms, tpot_p99 ≤ 30 ms: 2 (4 is outside)." in text


def test_what_a_server_says_is_escaped() -> None:
    odd = msgspec.structs.replace(KNOWN, flags="<script>alert(1)</script>|x")
    made = report([run(LOAD, failures=5)], conditions=odd)
    assert "<script" not in to_html(made)
    assert "&lt;full&gt;" in to_html(made)
    assert "<script>alert(1)</script>\\|x" in to_markdown(made)


def test_markdown_tells_reasons_or_the_headline() -> None:
    made = report(rounds(3))
    assert f"**{headline(made)}**" in to_markdown(made)
    assert "## Rounds" in to_markdown(made)
    bad = report(tree=Git(revision="abc", dirty=True))
    assert "- dirty tree" in to_markdown(bad)
    assert "| model | tiny |" in to_markdown(bad)


def test_a_run_in_which_all_failed_has_a_page() -> None:
    made = report([run(LOAD, failures=200)])
    assert Tags(to_html(made)).open == []
    assert "503 &lt;full&gt;" in to_html(made)
    assert missing_for_headline(made)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (12.3456, "12.35"),
        (0.0123456, "0.01235"),
        (100.0, "100"),
        (None, "unknown"),
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("top", [0.0003, 0.7, 1.0, 9.99, 10.0, 123.0, 1e6])
def test_ticks_are_round_and_hold_the_top(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-1] >= top * (1 - 1e-9)
    assert 3 <= len(found) <= 8


def test_a_plot_of_nothing_and_of_zero() -> None:
    assert plot("t", "x", "y", [Line(label="a", x=[], y=[])]).startswith("<figure>")
    assert "NaN" not in plot("t", "x", "y", [Line(label="a", x=[0.0], y=[0.0], names=["n"])])


def test_a_distribution_keeps_its_ends() -> None:
    curve = distribution([value / 1000 for value in range(1, 1001)])
    assert curve is not None
    assert len(curve.x) <= 200
    assert (curve.x[0], curve.x[-1], curve.y[-1]) == (1.0, 1000.0, 1.0)
    assert distribution([]) is None


# -- machine and tree ------------------------------------------------------------------------------------------------


def test_this_machine_says_what_it_is() -> None:
    here = machine(0.5)
    assert here.cores >= 1
    assert here.memory_bytes
    assert here.cpu
    assert here.busy_before == 0.5


def test_a_machine_without_proc_says_nothing(tmp_path: Path) -> None:
    bare = machine(None, tmp_path, tmp_path)
    assert (bare.memory_bytes, bare.clocks) == (None, "")
    assert busy_share(0.0, tmp_path / "stat") is None


def test_gpus_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA H200, 143771, 1980, [N/A], 570.1"
    monkeypatch.setattr(environment, "_output", lambda *words: f"{row}\n{row}\n")
    here = machine()
    assert here.gpus == (Device(name="NVIDIA H200", count=2, memory_bytes=143771 << 20, clocks="SM up to 1980 MHz"),)
    assert here.driver == "570.1"


def test_a_tree_is_dirty_or_not(tmp_path: Path) -> None:
    assert environment.git(tmp_path) is None
    say = environment._output
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        say("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example", *words)
    tree = environment.git(tmp_path)
    assert tree is not None
    assert not tree.dirty
    (tmp_path / "a").write_text("1")
    say("git", "-C", str(tmp_path), "add", "a")
    assert environment.git(tmp_path) == Git(revision=tree.revision, dirty=True)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True), ("localhost:50051", True), ("http://[::1]:8000", True),
        ("http://10.0.0.1:8000", False), ("http://example.com", False),
    ],
)  # fmt: skip
def test_loopback(url: str, local: bool) -> None:
    assert is_loopback(url) is local


def test_the_command_holds_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/nori", "bench", "serve", "--api-key", "s3cret", "--api-key=s3cret"])
    assert command() == ["nori", "bench", "serve", "--api-key", "…", "--api-key=…"]
    assert TREE.revision

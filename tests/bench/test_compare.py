"""Comparing and verifying made-up reports, and what a million tokens cost."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from fakes.bench_runs import KNOWN, LOAD, report, rounds, run

from nori_cluster.bench.compare import Comparison, compare, judge
from nori_cluster.bench.cost import Price, Prices, cost, per_hour, read_prices
from nori_cluster.bench.environment import Device
from nori_cluster.bench.report import Report
from nori_cluster.bench.served import write
from nori_cluster.bench.verify import Verification, again_loads, check_can_run, verify
from nori_cluster.cli.main import main
from nori_cluster.errors import ConfigError

pytestmark = pytest.mark.unit


def verdicts(found: Comparison | Verification) -> dict[str, str]:
    rows = found.ratios if isinstance(found, Comparison) else found.checked
    return {row.metric: row.verdict for row in rows}


@pytest.mark.parametrize(
    ("metric", "ratio", "spread", "verdict"),
    [
        ("output_tok_s", 1.2, 0.1, "better"),
        ("output_tok_s", 0.8, 0.1, "worse"),
        ("ttft_p50", 1.2, 0.1, "worse"),
        ("ttft_p50", 0.8, 0.1, "better"),
        ("ttft_p50", 0.92, 0.1, "same"),
        ("latency_p50", 1.09, 0.1, "same"),
    ],
)
def test_a_ratio_is_judged_by_its_direction(metric: str, ratio: float, spread: float, verdict: str) -> None:
    assert judge(metric, ratio, spread) == verdict


def test_paired_rounds_give_ratios_and_their_spread() -> None:
    found = compare(report(rounds(3)), report(rounds(3, ttft=0.2)))
    assert found.paired
    by_name = {row.metric: row for row in found.ratios}
    assert by_name["ttft_p50"].ratio == pytest.approx(2.0, abs=0.05)
    assert by_name["ttft_p50"].spread < 0.05
    assert by_name["ttft_p50"].verdict == "worse"
    assert by_name["tpot_p50"].verdict == "same"
    assert found.differences == []
    assert found.warnings == []


def test_unequal_rounds_are_compared_by_medians_and_stated_spread() -> None:
    found = compare(report(rounds(3)), report(rounds(1, tpot=0.011)))
    assert not found.paired
    row = next(row for row in found.ratios if row.metric == "tpot_p50")
    assert row.spread == pytest.approx((0.15**2 + 0.3**2) ** 0.5)
    assert row.verdict == "same"


def test_conditions_that_differ_are_named() -> None:
    other = msgspec.structs.replace(KNOWN, weights="int8", devices=(Device(name="Other"),), told_by={"a": "b"})
    load = msgspec.structs.replace(LOAD, rate=5.0)
    found = compare(report(), report([run(load)], load=load, conditions=other))
    assert [d.what for d in found.differences] == ["load.rate", "weights", "devices"]
    assert (found.differences[0].a, found.differences[0].b) == ("10.0", "5.0")
    assert found.warnings == ["conditions differ: load.rate, weights, devices"]


def test_invalid_reports_are_warned_of() -> None:
    bad = report([run(LOAD, failures=20)])
    assert compare(report(), bad).warnings == [
        "B is not valid: 20 of 200 requests failed (20 status), more than 1%",
    ]


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no figure in common"):
        compare(report(), msgspec.structs.replace(report(), metrics={"x": 1.0}, kind="startup"))


def test_the_same_again_reproduces() -> None:
    stated = report(rounds(3))
    found = verify(stated, report([run(msgspec.structs.replace(LOAD, seed=99))]))
    assert found.reproduces
    assert found.because == []
    assert found.differences == [], "the seed is meant to differ"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ttft": 0.13}, r"ttft_p50 is 1[23]\d.*, stated .* ± 15% \(worse: 1.\d\d ×\)"),
        ({"tpot": 0.007}, r"tpot_p50 is .*, stated .* \(better: 0.\d\d ×\)"),
    ],
)
def test_other_figures_do_not(changes: dict[str, float], words: str) -> None:
    found = verify(report(rounds(3)), report(rounds(1, **changes)))
    assert not found.reproduces
    assert any(re.fullmatch(words, why) for why in found.because)


def test_conditions_that_changed_are_told_and_forgotten_ones_are_not() -> None:
    other = msgspec.structs.replace(KNOWN, parallelism="TP 2 × 1 group", weights="")
    found = verify(report(rounds(3)), report(rounds(1), conditions=other))
    assert [d.what for d in found.differences] == ["parallelism"]


def test_a_dead_server_does_not_reproduce() -> None:
    found = verify(report(rounds(3)), report([run(LOAD, failures=199)]))
    assert not found.reproduces
    broken = msgspec.structs.replace(report(), metrics={"output_tok_s": 60.0}, spread={"output_tok_s": 0.5})
    assert "ttft_p50 could not be measured again" in verify(report(rounds(3)), broken).because


def test_a_report_without_spread_proves_nothing() -> None:
    bare = msgspec.structs.replace(report(), spread={})
    assert verify(bare, report()).because == ["the report states no figure with a spread"]


def test_only_loads_can_be_sent_again() -> None:
    with pytest.raises(ConfigError, match="`nori bench latency` again"):
        check_can_run(msgspec.structs.replace(report(), kind="latency", load=None))
    assert [load.seed for load in again_loads(LOAD, 3, 7)] == [7, 8, 9]
    assert again_loads(LOAD, 1, None)[0].seed != again_loads(LOAD, 1, None)[0].seed


# -- cost ------------------------------------------------------------------------------------------------------------

H200 = Device(name="NVIDIA H200", count=8)
PRICES = Prices(prices={"H200": Price(per_hour=3.6), "NVI": Price(per_hour=9.0)})


def test_cost_is_the_hour_over_its_tokens() -> None:
    found = cost(PRICES, (H200,), 8000.0, 16000.0, 10000.0)
    assert found is not None
    assert found.per_hour == pytest.approx(28.8)
    assert found.per_million_output == pytest.approx(1.0)
    assert found.per_million_total == pytest.approx(0.5)
    assert found.per_million_uncached == pytest.approx(0.8)
    assert found.priced == "8 × NVIDIA H200 at 3.6/h"
    assert cost(PRICES, (H200,), 0.0) is None


def test_the_longest_name_wins_and_a_machine_counts_once() -> None:
    prices = Prices(prices={"H200": Price(per_hour=1.0), "h200 nvl": Price(per_hour=2.0, unit="machine")})
    assert per_hour(prices, (Device(name="NVIDIA H200 NVL", count=8),)) == (2.0, "1 × machine at 2/h")


@pytest.mark.parametrize(
    ("devices", "words"), [((), "the devices are unknown"), ((Device(name="A1"),), "no price for 'A1'.* H200, NVI")]
)
def test_no_price_is_an_error(devices: tuple[Device, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        per_hour(PRICES, devices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prices: {H200: {per_hour: 0}}", "the price of 'H200' must be above 0"),
        ("prices: {H200: 3}", "no price file: Expected `object`"),
        ("price: {}", "no price file"),
        ("a: [", "no price file"),
    ],
)
def test_bad_price_files(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_prices(tmp_path / "p.yaml")


def test_price_files_are_yaml_or_json(tmp_path: Path) -> None:
    for text in (
        "prices: {H200: {per_hour: 3.6}}\nsource: s",
        '{"prices": {"H200": {"per_hour": 3.6}}, "source": "s"}',
    ):
        (tmp_path / "p").write_text(text)
        assert read_prices(tmp_path / "p") == Prices(prices={"H200": Price(per_hour=3.6)}, source="s")


# -- the verbs -------------------------------------------------------------------------------------------------------


def written(made: Report, folder: Path) -> str:
    write(made, folder)
    return str(folder)


def test_compare_prints_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(report(rounds(3)), tmp_path / "a"), written(report(rounds(3, ttft=0.2)), tmp_path / "b")
    assert main(["bench", "compare", a, b]) == 0
    told = capsys.readouterr()
    line = json.loads(told.out)
    assert next(r for r in line["comparison"]["ratios"] if r["metric"] == "ttft_p50")["verdict"] == "worse"
    assert "rounds paired" in told.err
    assert main(["bench", "compare", a, b, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_headline_has_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "headline", written(report(rounds(3)), tmp_path / "good")]) == 0
    assert json.loads(capsys.readouterr().out)["headline"].startswith("79.9 output tokens/s")
    bad = report(conditions=msgspec.structs.replace(KNOWN, kv_cache="", clocks=""))
    assert main(["bench", "headline", written(bad, tmp_path / "bad")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "no headline: unknown kv_cache" in told.err
    assert "unknown clocks" in told.err
    assert main(["bench", "headline", str(tmp_path / "none")]) == 2


def test_schema_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Nori Cluster benchmark report"

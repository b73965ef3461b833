"""Throughput, latency and startup on a tiny random model."""

import json
from pathlib import Path

import jsonschema
import pytest
from fakes.bench_runs import HOST
from fakes.checkpoints import make_tiny_llama

from nori_cluster.bench.first_token import Stopwatch
from nori_cluster.bench.inprocess import conditions, latency, throughput
from nori_cluster.bench.report import SCHEMA_FILE, Batch, NoHeadline, build_in_process, headline, read
from nori_cluster.cli.main import main
from nori_cluster.errors import ConfigError
from nori_cluster.llm import LLM

pytestmark = pytest.mark.unit
SMALL = Batch(size=2, input=8, output=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_blocks=64, threads=1)


def test_throughput_counts_every_token(llm: LLM) -> None:
    shown: list[tuple[str, int, int]] = []
    found = throughput(llm, SMALL, 3, lambda *progress: shown.append(progress))
    assert shown == [("warming up", 0, 1), ("rounds", 0, 3), ("rounds", 1, 3), ("rounds", 2, 3)]
    for metrics in found:
        assert metrics["total_tok_s"] == pytest.approx(3 * metrics["output_tok_s"])
        assert metrics["request_s"] == pytest.approx(metrics["output_tok_s"] / 4)


def test_latency_has_percentiles(llm: LLM) -> None:
    found = latency(llm, SMALL, repeats=4, rounds=2)
    assert len(found) == 2
    for metrics in found:
        assert 0 < metrics["latency_p50"] <= metrics["latency_p90"] <= metrics["latency_p99"]


def test_too_long_for_the_model(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="exceed the model's 512 tokens"):
        throughput(llm, Batch(size=1, input=500, output=13), 1)


def test_everything_is_known_in_process(llm: LLM) -> None:
    found = conditions(llm.spec, llm.config, HOST, "empty")
    made = build_in_process(
        kind="throughput", batch=SMALL, rounds=[{"output_tok_s": rate} for rate in (9.0, 10.0, 12.0)],
        conditions=found, started="now", host=HOST,
    )  # fmt: skip
    assert not any("unknown" in why for why in made.invalid_because)
    assert made.metrics == {"output_tok_s": 10.0}
    assert made.spread["output_tok_s"] == pytest.approx(0.6)
    assert (found.weights, found.numerics_id) == ("float32", llm.spec.numerics_id)
    assert len(found.revision) == 16
    with pytest.raises(NoHeadline, match="sends no requests"):
        headline(made)


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.task("a", 1) as advance:
            advance(1)
    assert list(watch.seconds) == ["a"]


@pytest.mark.parametrize(
    "words",
    [["throughput", "--prompts", "2"], ["latency", "--batch-size", "2", "--repeats", "2"]],
    ids=lambda words: words[0],
)
def test_the_verbs_write_reports(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text('prices: {"": {per_hour: 1.0, unit: machine}}')
    arguments = [*words, str(folder), "--input", "8", "--output", "4", "--rounds", "2", "--threads", "1"]
    assert main(["bench", *arguments, "--out", str(tmp_path / "out"), "--prices", str(prices)]) == 0
    told = capsys.readouterr()
    line = json.loads(told.out.splitlines()[-1])
    made = read(tmp_path / "out")
    assert line["metrics"] == made.metrics
    assert line["headline"] is None
    assert made.cost is not None
    assert "2 repetitions, fewer than 3" in made.invalid_because
    assert "no headline, because:" in told.err
    jsonschema.validate(json.loads((tmp_path / "out/report.json").read_text()), json.loads(SCHEMA_FILE.read_text()))
    assert "<table>" in (tmp_path / "out/report.html").read_text()

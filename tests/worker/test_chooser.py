"""Sampling controls against the reference library's logits processors, by the whole distribution that is drawn from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from nori_cluster.types import RowControls, RowSampling, SequenceStart, pack, unpack
from nori_cluster.worker.chooser import NOTHING_ALLOWED, Chooser
from nori_cluster.worker.slots import SlotTable
from nori_cluster.worker.structured import Structured

pytestmark = pytest.mark.unit
VOCAB = 200


@dataclass
class Row:
    """A sequence in the middle of its life. drafts stand behind its output."""

    prompt: list[int]
    output: list[int]
    logits: torch.Tensor
    settings: dict[str, Any]
    drafts: tuple[int, ...] = ()

    @property
    def sampling(self) -> RowSampling:
        plain = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 1,
            "candidate": 0,
            "logprobs": VOCAB,
        } | self.settings
        controls = {name: plain.pop(name) for name in RowControls.__struct_fields__ if name in plain}
        return RowSampling(**plain, controls=RowControls(**controls) if controls else None)


def logits_of(seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def run(rows: list[Row], mode: str = "processed_logprobs", allowed: torch.Tensor | None = None) -> list[Any]:
    """Per row: id, {token: logprob} of the position behind its drafts, failure or None."""
    table = SlotTable(len(rows), 64, 4, max_drafts=4)
    structured = Structured(Path("none"), VOCAB, ())
    chooser = Chooser(table, structured, VOCAB, torch.device("cpu"), allowed, mode)
    starts = [
        SequenceStart(slot, pack(row.prompt + row.output[:-1]), len(row.prompt), 0, row.sampling)
        for slot, row in enumerate(rows)
    ]
    for start in starts:
        table.start(start)
    chooser.enter(np.zeros(0, np.int32), starts)
    for slot, row in enumerate(rows):
        if row.output:  # its newest token was sampled here
            at = np.array([slot], np.int32)
            table.append_tokens(at, np.array(row.output[-1:], np.int32))
            chooser.keep(at, np.array(row.output[-1:], np.int32))
        table.tokens[slot, table.known[slot] : table.known[slot] + len(row.drafts)] = row.drafts
    places = np.array([len(row.drafts) for row in rows], np.int32)
    ids = chooser.choose(torch.stack([row.logits for row in rows]), np.arange(len(rows), dtype=np.int32), places)
    logprobs, failures = chooser.report(np.arange(len(rows)), np.arange(len(rows)))
    assert logprobs is not None
    ends = np.cumsum(unpack(logprobs.top_counts))
    tokens, values = unpack(logprobs.top_ids), np.frombuffer(logprobs.top_values, "<f4")
    parts = zip(np.split(tokens, ends[:-1]), np.split(values, ends[:-1]), strict=True)
    tables = [dict(zip(t.tolist(), v.tolist(), strict=True)) for t, v in parts]
    return list(zip(ids.tolist(), tables, (dict(failures).get(slot) for slot in range(len(rows))), strict=True))


def expected(row: Row) -> torch.Tensor:
    """Log-probabilities [vocab] spelled out with the reference library's processors, in our order."""
    settings = row.settings
    history = torch.tensor([row.prompt + row.output + list(row.drafts)])
    output = torch.tensor(row.output + list(row.drafts), dtype=torch.long)
    scores = row.logits[None].clone()
    if settings.get("allowed_ids"):
        hidden = torch.ones(VOCAB, dtype=torch.bool)
        hidden[list(settings["allowed_ids"])] = False
        scores = scores.masked_fill(hidden, float("-inf"))
    if settings.get("bad_words"):
        words = [list(word) for word in settings["bad_words"]]
        scores = reference.NoBadWordsLogitsProcessor(words, eos_token_id=None)(output[None], scores)
    for token, value in zip(settings.get("bias_ids", ()), settings.get("bias_values", ()), strict=True):
        scores[0, token] += value
    if settings.get("repetition_penalty", 1.0) != 1.0:
        scores = reference.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"])(history, scores)
    counts = torch.bincount(output, minlength=VOCAB)
    scores = (
        scores - settings.get("frequency_penalty", 0.0) * counts - settings.get("presence_penalty", 0.0) * (counts > 0)
    )
    if len(output) < settings.get("min_tokens", 0):
        scores[0, list(settings["late_ids"])] = float("-inf")
    if settings.get("temperature"):
        scores = reference.TemperatureLogitsWarper(settings["temperature"])(history, scores)
        if settings.get("min_p"):
            scores = reference.MinPLogitsWarper(settings["min_p"])(history, scores)
        if settings.get("top_k"):
            scores = reference.TopKLogitsWarper(settings["top_k"])(history, scores)
        if settings.get("top_p", 1.0) < 1.0:
            scores = reference.TopPLogitsWarper(settings["top_p"])(history, scores)
    return torch.log_softmax(scores[0].double(), dim=-1)


def check(row: Row, found: Any) -> None:
    token, table, failure = found
    want = expected(row)
    finite = torch.isfinite(want)
    assert failure is None
    assert set(table) == set(torch.nonzero(finite).flatten().tolist())
    for id_, value in table.items():
        assert value == pytest.approx(float(want[id_]), abs=2e-4)
    if not row.settings.get("temperature"):
        assert token == int(want.argmax())
    assert finite[token]


CONTROLS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6, "temperature": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8, "temperature": 1.0},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0.9},
    "min_p": {"min_p": 0.1, "temperature": 1.0},
    "min_p 1": {"min_p": 1.0, "temperature": 1.3},
    "filters": {"min_p": 0.01, "top_k": 20, "top_p": 0.8, "temperature": 1.4},
    "allowed": {"allowed_ids": (3, 77, 150, 199), "temperature": 1.0},
    "bad words": {"bad_words": ((5,), (9, 8, 7), (8, 11)), "temperature": 1.0},
    "bias": {"bias_ids": (4, 190), "bias_values": (7.0, -100.0)},
    "min_tokens": {"min_tokens": 9, "late_ids": (2, 31), "bias_ids": (2, 31), "bias_values": (100.0, 100.0)},
    "min_tokens reached": {"min_tokens": 3, "late_ids": (2,), "temperature": 0.8},
    "everything": {
        "repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.7, "min_p": 0.001, "top_k": 90,
        "top_p": 0.97, "temperature": 1.8, "bias_ids": (12,), "bias_values": (2.5,), "bad_words": ((9, 8, 40),),
        "min_tokens": 20, "late_ids": (2,), "allowed_ids": tuple(range(0, 200, 2)),
    },
}  # fmt: skip


@pytest.mark.parametrize("drafts", [(), (7,), (7, 8, 5)])
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_equal_the_reference(name: str, drafts: tuple[int, ...]) -> None:
    for seed in range(5):
        row = Row([5, 6, 7, 6], [9, 8, 9, 8], logits_of(seed), CONTROLS[name], drafts)
        check(row, run([row])[0])


def test_rows_cannot_affect_each_other() -> None:
    """A row beside wild ones is bit-equal to alone, whatever they ask for."""
    rows = [
        Row([5, 6, seed % 9], [9, 8, 9][: seed % 4], logits_of(seed, 0.5 + seed), settings | {"seed": seed})
        for seed, settings in enumerate([{}, *CONTROLS.values(), {"temperature": 1e-6}, {"temperature": 2.0}])
    ]
    together = run(rows)
    for row, found in zip(rows, together, strict=True):
        assert run([row])[0] == found


def test_raw_logprobs_know_no_control() -> None:
    row = Row([5], [9], logits_of(1), CONTROLS["everything"])
    _, table, _ = run([row], "raw_logprobs")[0]
    want = torch.log_softmax(row.logits.double(), -1)
    assert [table[id_] for id_ in range(VOCAB)] == pytest.approx(want.tolist(), abs=1e-5)


def test_a_row_with_nothing_to_say_fails_alone() -> None:
    stuck = Row([5], [], logits_of(1), {"allowed_ids": (7, 8), "bad_words": ((7,), (8,)), "temperature": 1.0})
    good = Row([5], [], logits_of(2), {})
    found = run([good, stuck, good])
    assert [failure for _, _, failure in found] == [None, NOTHING_ALLOWED, None]
    check(good, found[0])


def test_min_tokens_gives_way_where_nothing_else_is_allowed() -> None:
    """F52: a finished grammar (or a list of allowed ids) that leaves only the stop token ends cleanly."""
    row = Row([5], [6], logits_of(1), {"allowed_ids": (2,), "min_tokens": 9, "late_ids": (2, 3)})
    token, table, failure = run([row])[0]
    assert (token, list(table), failure) == (2, [2], None)


def test_f12_edge_values_stay_finite() -> None:
    """F12: the smallest repetition penalty, huge top_k, temperatures far out."""
    edges = [
        {"repetition_penalty": 0.001}, {"repetition_penalty": 100.0}, {"top_k": 10**7, "temperature": 1.0},
        {"temperature": 1e-30}, {"temperature": 1e30}, {"min_p": 1e-30, "temperature": 1.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.001, "temperature": 2.0},
    ]  # fmt: skip
    for settings in edges:
        (token, table, failure) = run([Row([5, 5], [6, 6, 6], logits_of(3), settings)])[0]
        assert failure is None and 0 <= token < VOCAB
        assert np.isfinite(list(table.values())).all()


def test_ids_without_a_token_stay_out_of_reach() -> None:
    allowed = torch.ones(VOCAB, dtype=torch.bool)
    allowed[150:] = False
    row = Row([5], [6], logits_of(4), {"bias_ids": (170,), "bias_values": (100.0,), "temperature": 1.0})
    token, table, _ = run([row], allowed=allowed)[0]
    assert token < 150 and max(table) < 150

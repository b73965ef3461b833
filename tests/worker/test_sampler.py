"""The sampler: distributions by chi-square, filters against an obvious reference, rows that cannot feel each other."""

from typing import Any

import numpy as np
import pytest
import torch

from nori_cluster.types import RowControls, RowSampling, StepLogprobs, unpack
from nori_cluster.worker.sampler import NUCLEUS, SamplingRows, sample
from nori_cluster.worker.slots import SlotTable

pytestmark = pytest.mark.unit


def row(**changes: Any) -> RowSampling:
    """A RowSampling; fields of RowControls may be named as well."""
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, "candidate": 0} | changes
    controls = {name: settings.pop(name) for name in RowControls.__struct_fields__ if name in settings}
    return RowSampling(**settings, controls=RowControls(**controls) if controls else None)


def rows_of(settings: list[RowSampling], index: list[int] | None = None) -> SamplingRows:
    table = SlotTable(len(settings), 8, 4)
    for slot, sampling in enumerate(settings):
        table.sampling.set(slot, sampling)
    slots = np.arange(len(settings), dtype=np.int32)
    return SamplingRows.gather(table, slots, np.array(index or [0] * len(settings), np.int32))


def draw(
    logits: torch.Tensor, settings: list[RowSampling], index: list[int] | None = None, allowed: Any = None
) -> tuple[list[int], StepLogprobs | None]:
    ids, logprobs = sample(logits, rows_of(settings, index), np.arange(len(settings)), allowed)
    return ids.tolist(), logprobs


def many(logits: torch.Tensor, count: int, **changes: Any) -> np.ndarray:
    """Counts per id of `count` draws of one distribution, each with another token index."""
    table = SlotTable(1, 8, 4)
    table.sampling.set(0, row(**changes))
    rows = SamplingRows.gather(table, np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    ids, _ = sample(logits.expand(count, -1).contiguous(), rows, np.arange(count))
    return np.bincount(ids, minlength=logits.shape[-1])


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """z-score of Pearson's statistic over cells that expect at least 5, the rest pooled."""
    expected = probabilities * counts.sum()
    assert (counts[probabilities == 0] == 0).all(), "an id of probability 0 was drawn"
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    hoped = np.append(expected[big], expected[~big].sum())
    seen, hoped = seen[hoped > 0], hoped[hoped > 0]
    freedom = len(hoped) - 1
    return float((((seen - hoped) ** 2 / hoped).sum() - freedom) / (2 * freedom) ** 0.5)


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The filtered distribution, spelled out."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        order = order[:top_k]
    weights = {i: float(np.exp((logits[i] - logits.max()) / temperature)) for i in order}
    total = sum(weights.values())
    nucleus, reached = [], 0.0
    for i in order:
        nucleus.append(i)
        reached += weights[i] / total
        if reached >= top_p:
            break
    result = np.zeros(len(logits))
    for i in nucleus:
        result[i] = weights[i]
    return result / result.sum()


def logits_of(vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (5.0, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.8), (0.7, 20, 0.9), (1.0, 0, 1e-6)],
)
def test_draws_follow_the_filtered_distribution(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = logits_of(300)
    counts = many(logits, 8_000, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities = kept(logits[0].double().numpy(), temperature, top_k, top_p)
    if (probabilities > 0).sum() == 1:
        assert counts[probabilities.argmax()] == 8_000
    else:
        assert abs(chi_square(counts, probabilities)) < 4.5


def test_candidates_and_indices_are_independent() -> None:
    """Pairs (draw at index i, draw at i + 1) and (candidate 0, candidate 1) fill the product distribution."""
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    product = np.outer([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]).ravel()

    def ids(candidate: int) -> np.ndarray:
        rows = rows_of([row(seed=11, candidate=candidate)] * 20_000, list(range(20_000)))
        return sample(logits.expand(20_000, -1).contiguous(), rows, np.arange(20_000))[0]

    first, second = ids(0), ids(1)
    assert abs(chi_square(np.bincount(first * 4 + second, minlength=16), product)) < 4.5
    assert abs(chi_square(np.bincount(first[::2] * 4 + first[1::2], minlength=16), product)) < 4.5


def test_a_seed_means_this() -> None:
    """Golden values: what a (seed, candidate, index) yields must not change between releases or batch sizes."""
    logits = (torch.arange(1000) * 0.7).sin()[None] * 3
    settings = [row(seed=s, candidate=c) for s, c in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 3))]
    found = [draw(logits.expand(4, -1).contiguous(), settings, [i] * 4)[0] for i in (0, 1, 100_000)]
    assert found == GOLDEN


GOLDEN = [[308, 66, 711, 718], [398, 334, 299, 441], [835, 817, 755, 459]]


@pytest.mark.parametrize("vocab", [131, 4096, 49_152])
def test_rows_are_bitwise_independent(vocab: int) -> None:
    """Any subset of rows, in any order, beside loud or broken ones, gives each row the same ids and logprobs."""
    generator = torch.Generator().manual_seed(0)
    count = 12
    logits = torch.randn(count, vocab, generator=generator) * torch.linspace(0.5, 8, count)[:, None]
    settings = [
        row(
            seed=s,
            temperature=[0.0, 0.3, 1.0, 2.5][s % 4],
            top_p=[1.0, 0.5, 0.95][s % 3],
            top_k=[0, 3, 50, 1, 0][s % 5],
            logprobs=s % 7 - 1,
            bias_ids=(1, 5) if s % 4 == 1 else (),
            bias_values=(3.0, -9.0) if s % 4 == 1 else (),
        )
        for s in range(count)
    ]
    index = list(range(100, 100 + count))
    ids, logprobs = draw(logits, settings, index)
    assert logprobs is not None
    table = logprob_table(logprobs)
    generator_np = np.random.default_rng(0)
    for _ in range(20):
        chosen = generator_np.permutation(count)[: generator_np.integers(1, count + 1)].tolist()
        loud = torch.stack([torch.full((vocab,), float("nan")), torch.full((vocab,), 1e30)])
        some = torch.cat([logits[chosen], loud])
        more = [settings[c] for c in chosen] + [row(), row()]
        got, got_logprobs = draw(some, more, [index[c] for c in chosen] + [0, 0])
        assert got[:-2] == [ids[c] for c in chosen]
        if got_logprobs is not None:
            for place, entry in logprob_table(got_logprobs).items():
                assert entry == table[chosen[place]]


def logprob_table(logprobs: StepLogprobs) -> dict[int, tuple[float, list[int], list[float]]]:
    counts = unpack(logprobs.top_counts)
    ends = np.cumsum(counts)
    ids, values = unpack(logprobs.top_ids), np.frombuffer(logprobs.top_values, "<f4")
    chosen = np.frombuffer(logprobs.chosen, "<f4")
    return {
        int(r): (
            float(chosen[i]),
            ids[ends[i] - counts[i] : ends[i]].tolist(),
            values[ends[i] - counts[i] : ends[i]].tolist(),
        )
        for i, r in enumerate(unpack(logprobs.rows))
    }


def test_greedy_is_the_first_largest() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [-4.0, -3.0, -3.5, -3.0]])
    assert draw(logits, [row(temperature=0.0), row(temperature=0.0)])[0] == [1, 1]
    assert draw(logits, [row(top_k=1, seed=s) for s in (3, 4)])[0] == [1, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = logits_of(500, seed=2)
    assert draw(logits, [row(temperature=temperature)])[0] == [int(logits.argmax())]


def test_bias_moves_sampling_but_not_logprobs() -> None:
    logits = logits_of(50, seed=1)
    biased = row(temperature=0.0, bias_ids=(7,), bias_values=(100.0,), logprobs=0)
    ids, logprobs = draw(logits, [biased])
    assert ids == [7]
    assert logprobs is not None
    expected = torch.log_softmax(logits.double(), -1)[0, 7]
    assert np.frombuffer(logprobs.chosen, "<f4")[0] == pytest.approx(float(expected), abs=1e-6)
    banned = row(temperature=0.0, bias_ids=(int(logits.argmax()),), bias_values=(-100.0,))
    assert draw(logits, [banned])[0] == [int(logits[0].topk(2).indices[1])]


def test_logprobs_are_raw_log_softmax() -> None:
    logits = logits_of(64, seed=5).repeat(3, 1)
    settings = [
        row(temperature=0.2, top_k=2, top_p=0.4, logprobs=5),
        row(temperature=3.0),
        row(temperature=0.0, logprobs=0),
    ]
    ids, logprobs = draw(logits, settings)
    assert logprobs is not None
    table = torch.log_softmax(logits[0].double(), -1)
    found = logprob_table(logprobs)
    assert sorted(found) == [0, 2]
    chosen, top_ids, top_values = found[0]
    assert chosen == pytest.approx(float(table[ids[0]]), abs=1e-6)
    assert top_ids == table.topk(5).indices.tolist()
    assert top_values == pytest.approx(table.topk(5).values.tolist(), abs=1e-6)
    assert found[2] == (pytest.approx(float(table.max()), abs=1e-6), [], [])


def test_flat_rows_need_the_full_sort() -> None:
    """A nucleus wider than what is looked at first: no id inside it is lost."""
    vocab = 3 * NUCLEUS
    logits = torch.linspace(0, 0.1, vocab)[None]
    counts = many(logits, 1500, top_p=0.9, seed=5)
    probabilities = kept(logits[0].double().numpy(), 1.0, 0, 0.9)
    assert counts[probabilities == 0].sum() == 0
    assert (counts[: vocab // 2] > 0).any()
    assert (probabilities > 0).sum() > NUCLEUS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_yield_ids_and_finite_logprobs(value: float, temperature: float) -> None:
    whole = torch.full((1, 70), value)
    part = logits_of(70)
    part[0, 3] = value
    for logits in (whole, part):
        ids, logprobs = draw(logits, [row(temperature=temperature, logprobs=3, top_p=0.9)])
        assert 0 <= ids[0] < 70
        assert logprobs is not None
        assert np.isfinite(np.frombuffer(logprobs.chosen, "<f4")).all()
        assert np.isfinite(np.frombuffer(logprobs.top_values, "<f4")).all()
    if value != value or value < 0:
        assert draw(part, [row(temperature=0.0)])[0] == [int(part.nan_to_num(-1e9, neginf=-1e9).argmax())]


def test_ids_without_a_token_are_never_drawn_or_listed() -> None:
    allowed = torch.ones(100, dtype=torch.bool)
    allowed[60:] = False
    logits = torch.zeros(1, 100)
    logits[0, 60:] = 50.0
    counts = []
    for seed in range(200):
        ids, logprobs = draw(logits, [row(seed=seed, logprobs=20, temperature=5.0)], allowed=allowed)
        assert logprobs is not None
        counts += ids + unpack(logprobs.top_ids).tolist()
    assert max(counts) < 60
    _, logprobs = draw(logits, [row(logprobs=20)], allowed=allowed)
    assert logprobs is not None
    assert np.exp(np.frombuffer(logprobs.chosen, "<f4"))[0] == pytest.approx(1 / 60, rel=1e-6)


def test_small_changes_of_logits_rarely_change_the_draw() -> None:
    """The promise of near ties only: noise of 1e-5 in every logit changes hardly any of 4,000 draws."""
    logits = logits_of(5000, seed=8, spread=1.5).expand(4000, -1)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-5
    rows = rows_of([row(seed=3)] * 4000, list(range(4000)))
    before, _ = sample(logits.contiguous(), rows, np.arange(4000))
    after, _ = sample(logits + noise, rows, np.arange(4000))
    assert (before != after).sum() <= 2

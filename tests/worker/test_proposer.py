"""Prompt lookup against an obvious loop, and the rule that keeps drafts."""

import numpy as np
import pytest
import torch

from nori_cluster.config import SpeculativeConfig
from nori_cluster.errors import ConfigError
from nori_cluster.types import NewBlocks, RowSampling, SequenceStart, pack
from nori_cluster.worker.batch import build_batch, row_lengths
from nori_cluster.worker.proposer import NgramProposer
from nori_cluster.worker.slots import SlotTable
from nori_cluster.worker.verify import verify

pytestmark = pytest.mark.unit
GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0)


def lookup(tokens: list[int], smallest: int, largest: int, most: int) -> list[int]:
    """The definition, spelled out."""
    for size in range(largest, smallest - 1, -1):
        if size >= len(tokens):
            continue
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[len(tokens) - size :]:
                return [tokens[end + 1 :][place % (len(tokens) - 1 - end)] for place in range(most)]
    return []


def table_of(rows: list[list[int]], drafts: int) -> SlotTable:
    table = SlotTable(len(rows), 64, 4, drafts)
    for slot, tokens in enumerate(rows):
        table.start(SequenceStart(slot, pack(tokens), len(tokens), 0, GREEDY))
    return table


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_what_followed_the_longest_latest_match(seed: int) -> None:
    rng = np.random.default_rng(seed)
    smallest = int(rng.integers(1, 4))
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=int(rng.integers(1, 6)),
        prompt_lookup_min=smallest,
        prompt_lookup_max=smallest + int(rng.integers(0, 3)),
    )
    rows = [rng.integers(0, 4, rng.integers(1, 40)).tolist() for _ in range(12)]
    table = table_of(rows, config.num_speculative_tokens)
    slots = rng.permutation(12).astype(np.int32)
    drafts, counts = NgramProposer(config).propose(table, slots, torch.zeros(12, 1))
    for slot, draft, count in zip(slots.tolist(), drafts.tolist(), counts.tolist(), strict=True):
        want = lookup(rows[slot], smallest, config.prompt_lookup_max, config.num_speculative_tokens)
        assert draft[:count] == want


def test_what_is_kept_is_what_the_sampler_drew() -> None:
    """Four rows: two drafts kept of three, none of two, a row without drafts, a prefill chunk that samples nothing."""
    table = table_of([[1, 2], [3, 4], [5], [6, 7, 8]], 3)
    table.computed[:2] = 1
    slots = np.array([0, 1, 2, 3], np.int32)
    table.append_blocks(slots, NewBlocks(pack([2, 2, 1, 1]), pack([1, 2, 3, 4, 5, 6])))
    table.drafts[0], table.num_drafts[0] = [10, 11, 12], 3
    table.drafts[1], table.num_drafts[1] = [20, 21, 0], 2
    lengths = row_lengths(table, slots, np.array([4, 4, 1, 2], np.int32))
    assert lengths.tolist() == [4, 3, 1, 2]
    batch = build_batch(table, slots, lengths, torch.device("cpu"))
    assert batch.token_ids.tolist() == [2, 10, 11, 12, 4, 20, 21, 5, 6, 7]
    assert batch.sample_rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert batch.sample_places.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.sample_tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    kept = verify(table, slots, batch, np.array([10, 11, 99, 12, 9, 21, 50, 51], np.int32))
    assert kept.rows.tolist() == [0, 1, 2]
    assert kept.counts.tolist() == [3, 1, 1]
    assert kept.drafts.tolist() == [3, 2, 0]
    assert kept.positions.tolist() == [0, 1, 2, 4, 7]


def test_a_bound_cuts_the_drafts() -> None:
    table = table_of([[1, 2]], 3)
    table.computed[0] = 1
    table.drafts[0], table.num_drafts[0] = [10, 11, 12], 3
    assert row_lengths(table, np.array([0], np.int32), np.array([2], np.int32)).tolist() == [2]
    assert table.tokens[0, :4].tolist() == [1, 2, 10, 0]


@pytest.mark.parametrize("change", [{"num_speculative_tokens": 0}, {"prompt_lookup_min": 5}, {"prompt_lookup_max": 0}])
def test_impossible_configs(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig(method="ngram", **change)

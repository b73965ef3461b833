"""SlotTable and build_batch against a plain per-row simulation."""

import numpy as np
import pytest
import torch

from nori_cluster.types import NewBlocks, RowControls, RowSampling, SequenceStart, pack
from nori_cluster.worker.batch import build_batch, row_lengths
from nori_cluster.worker.slots import SlotTable

pytestmark = pytest.mark.unit
GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0)
CPU = torch.device("cpu")


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start(slot: int, tokens: list[int], computed: int = 0, prompt_len: int | None = None) -> SequenceStart:
    return SequenceStart(slot, pack(tokens), len(tokens) if prompt_len is None else prompt_len, computed, GREEDY)


def test_one_step_by_hand() -> None:
    table = SlotTable(4, 64, 4)
    table.start(start(2, [10, 11, 12, 13, 14, 15]))
    table.start(start(0, [20, 21]))
    slots = array(2, 0)
    assert table.append_blocks(slots, NewBlocks(pack([2, 1]), pack([7, 3, 9]))).tolist() == [7, 3, 9]
    lengths = row_lengths(table, slots, array(5, 100))
    assert lengths.tolist() == [5, 2]
    batch = build_batch(table, slots, lengths, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 12, 36, 37]
    assert batch.query_starts.tolist() == [0, 5, 7]
    assert batch.context_lens.tolist() == [5, 2]
    assert batch.sample_rows.tolist() == [1]
    assert batch.sample_tokens.tolist() == [6]
    assert (batch.num_rows, batch.num_tokens) == (2, 7)


def test_prefix_hits_are_not_fresh() -> None:
    """Blocks that hold computed tokens must not be cleared; the one being filled must."""
    table = SlotTable(2, 64, 4)
    table.start(start(0, list(range(11)), computed=8))
    assert table.append_blocks(array(0), NewBlocks(pack([3]), pack([5, 6, 7]))).tolist() == [7]
    batch = build_batch(table, array(0), row_lengths(table, array(0), array(100)), CPU)
    assert batch.token_ids.tolist() == [8, 9, 10]
    assert batch.slot_mapping.tolist() == [28, 29, 30]


def test_resumed_tokens_count_as_output() -> None:
    table = SlotTable(1, 64, 4)
    table.start(start(0, [1, 2, 3, 4, 5], prompt_len=3))
    assert table.output_index(array(0)).tolist() == [2]


def test_a_reused_slot_remembers_nothing() -> None:
    table = SlotTable(1, 16, 4)
    biased = RowSampling(0.5, 1.0, 3, 9, 1, controls=RowControls(bias_ids=(4,), bias_values=(2.0,)))
    table.start(SequenceStart(0, pack([1, 2, 3]), 3, 0, biased))
    table.append_blocks(array(0), NewBlocks(pack([1]), pack([2])))
    table.drop(array(0))
    assert not table.sampling.edits
    table.start(start(0, [7]))
    assert (table.known[0], table.computed[0], table.num_blocks[0]) == (1, 0, 0)
    assert (table.sampling.temperature[0], table.sampling.top_k[0]) == (0.0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_a_per_row_simulation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, slots_in_all, longest = 4, 6, 60
    table = SlotTable(slots_in_all, longest, size)
    tokens: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    fresh = iter(rng.permutation(10_000).tolist())
    for _ in range(60):
        for slot in range(slots_in_all):
            if slot in tokens and (len(tokens[slot]) >= longest - 1 or rng.random() < 0.05):
                table.drop(array(slot))
                del tokens[slot]
            if slot not in tokens and rng.random() < 0.3:
                tokens[slot] = rng.integers(0, 99, rng.integers(1, 30)).tolist()
                computed[slot], blocks[slot] = 0, []
                table.start(start(slot, tokens[slot]))
        rows = rng.permutation(list(tokens)).astype(np.int32)[: rng.integers(1, slots_in_all + 1)]
        if not len(rows):
            continue
        bounds = rng.integers(1, 9, len(rows)).astype(np.int32)
        new = []
        for slot, bound in zip(rows.tolist(), bounds.tolist(), strict=True):
            until = min(computed[slot] + bound, len(tokens[slot]))
            new.append([next(fresh) for _ in range(-(-until // size) - len(blocks[slot]))])
            blocks[slot] += new[-1]
        table.append_blocks(
            rows,
            NewBlocks(pack([len(n) for n in new]), pack([block for blocks_of_row in new for block in blocks_of_row])),
        )
        lengths = row_lengths(table, rows, bounds)
        batch = build_batch(table, rows, lengths, CPU)
        ids, positions, mapping, sampling = [], [], [], []
        for row, (slot, bound) in enumerate(zip(rows.tolist(), bounds.tolist(), strict=True)):
            for position in range(computed[slot], min(computed[slot] + bound, len(tokens[slot]))):
                ids.append(tokens[slot][position])
                positions.append(position)
                mapping.append(blocks[slot][position // size] * size + position % size)
                computed[slot] = position + 1
            if computed[slot] == len(tokens[slot]):
                sampling.append(row)
        assert batch.token_ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == mapping
        assert batch.sample_rows.tolist() == sampling
        table.advance(rows, lengths)
        drawn = rng.integers(0, 99, len(sampling)).astype(np.int32)
        table.append_tokens(rows[sampling], drawn)
        for row, token in zip(sampling, drawn.tolist(), strict=True):
            tokens[int(rows[row])].append(token)

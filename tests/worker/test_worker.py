"""One worker by hand-made plans: upper bounds, resumption, slot and block reuse, rows that cannot hurt each other."""

from pathlib import Path

import pytest
import torch
from fakes.checkpoints import make_tiny_llama
from fakes.stepping import GREEDY, Driver, group_config, load_worker

from nori_cluster.types import NewBlocks, RowSampling, SequenceStart, StepPlan, pack, unpack
from nori_cluster.worker.inline import InlineExecutor
from nori_cluster.worker.worker import Worker

pytestmark = pytest.mark.contract
HOT = RowSampling(temperature=1.0, top_p=0.95, top_k=0, seed=1234, candidate=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("worker") / "tiny")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return load_worker(group_config(folder))


def continued(worker: Worker, prompt: list[int], tokens: list[int], count: int, sampling: RowSampling) -> list[int]:
    """`count` more tokens after `tokens` were generated before, as after a group failure."""
    driver = Driver(worker, seed=len(tokens))
    driver.start(5, prompt + tokens, sampling, prompt_len=len(prompt))
    return driver.generate([5], count)[5]


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_resumed_at_any_token_continues_the_same(worker: Worker, sampling: RowSampling) -> None:
    prompt = list(range(20, 37))
    driver = Driver(worker)
    driver.start(0, prompt, sampling)
    whole = driver.generate([0], 24)[0]
    for cut in (1, 2, 15, 16, 23):
        assert continued(worker, prompt, whole[:cut], 24 - cut, sampling) == whole[cut:]


def test_counts_are_upper_bounds(worker: Worker) -> None:
    """A plan may order more than there is: the row stops at its true length and samples."""
    prompt = list(range(30, 50))
    driver = Driver(worker)
    driver.start(0, prompt)
    expected = driver.generate([0], 3)[0]
    bounded = Driver(worker)
    bounded.start(0, prompt)
    assert bounded.ids({0: 64}) == expected[:1]
    assert bounded.ids({0: 5}) == expected[1:2]
    assert bounded.ids({0: 1}) == expected[2:]


def test_result_of_a_mixed_step(worker: Worker) -> None:
    driver = Driver(worker)
    driver.start(3, [5, 6, 7])
    driver.start(1, list(range(40)))
    result = driver.step({1: 20, 3: 3})
    assert result is not None
    assert unpack(result.counts).tolist() == [0, 1]
    assert len(unpack(result.ids)) == 1
    assert result.logprobs is None
    assert result.error == ""
    nothing = driver.step({1: 10})
    assert nothing is not None
    assert (unpack(nothing.counts).tolist(), nothing.ids) == ([0], b"")


def test_logprob_rows_are_plan_rows(worker: Worker) -> None:
    asking = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0, logprobs=2)
    driver = Driver(worker)
    driver.start(0, list(range(40)), asking)  # does not sample in the first step
    driver.start(1, [5, 6], GREEDY)
    driver.start(2, [5, 6], asking)
    result = driver.step({0: 8, 1: 2, 2: 2})
    assert result is not None
    assert result.logprobs is not None
    assert unpack(result.logprobs.rows).tolist() == [2]
    assert unpack(result.logprobs.top_counts).tolist() == [2]
    assert unpack(result.logprobs.top_ids)[0] == unpack(result.ids)[1]


def test_reused_slots_and_blocks_carry_nothing_over(folder: Path) -> None:
    """A sequence in a slot and blocks that a broken one left full of NaN gets what it gets in fresh ones."""
    worker = load_worker(group_config(folder, num_blocks=4))
    driver = Driver(worker)
    driver.start(0, list(range(3, 30)))
    expected = driver.generate([0], 20)[0]
    with torch.inference_mode():
        worker.cache.tensor.fill_(float("nan"))
    again = Driver(worker)
    again.drop(0)
    again.start(0, list(range(3, 30)))
    assert again.generate([0], 20)[0] == expected


def test_a_row_of_nan_leaves_its_neighbours_alone(folder: Path) -> None:
    """One id's embedding is NaN: rows that hold it go astray, rows beside them do not notice."""
    worker = load_worker(group_config(folder))
    prompts = [list(range(10, 30)), [7] * 5, list(range(50, 53))]
    alone = []
    for prompt in prompts[::2]:
        driver = Driver(worker)
        driver.start(0, prompt, HOT)
        alone.append(driver.generate([0], 10)[0])
    with torch.inference_mode():
        worker.model.embed.weight[7] = float("nan")
    driver = Driver(worker)
    for slot, prompt in enumerate(prompts):
        driver.start(slot, prompt, HOT)
    together = driver.generate(range(3), 10)
    assert [together[0], together[2]] == alone
    assert all(0 <= token < 384 for token in together[1])


def test_prefix_blocks_are_read_and_not_cleared(worker: Worker) -> None:
    """A start whose leading tokens are computed already finds their KV in the blocks of its first row."""
    prompt = list(range(100, 140))  # two full blocks and a half
    driver = Driver(worker)
    driver.start(0, prompt)
    expected = driver.generate([0], 5)[0]
    shared = worker.table.blocks[0, :2].tolist()
    start = SequenceStart(1, pack(prompt), len(prompt), 32, GREEDY)
    plan = StepPlan(99, b"", (start,), pack([1]), pack([8]), (NewBlocks(pack([3]), pack([*shared, 0])),))
    result = worker.execute(plan)
    assert result is not None
    assert unpack(result.ids).tolist() == expected[:1]


def test_inline_executor_hands_out_results_in_order(worker: Worker) -> None:
    executor = InlineExecutor(worker)
    driver = Driver(worker)
    driver.start(0, [5, 6, 7])
    executor.submit(driver.plan({0: 3}))
    executor.submit(driver.plan({0: 1}))
    assert [executor.collect().step for _ in range(2)] == [1, 2]
    executor.close()

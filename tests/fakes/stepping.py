"""Drives one Worker by hand-made StepPlans, without an engine: blocks are dealt out shuffled and never reused."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from nori_cluster.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    SchedulerConfig,
)
from nori_cluster.device.parallel import SoloGroup, TPGroup
from nori_cluster.types import NewBlocks, RowSampling, SequenceStart, StepPlan, StepResult, pack, unpack
from nori_cluster.worker.batch import build_batch
from nori_cluster.worker.worker import Worker

GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, candidate=0)


def group_config(
    folder: Path,
    *,
    dtype: str = "float32",
    max_num_seqs: int = 32,
    num_blocks: int = 256,
    tp: int = 1,
    max_model_len: int | None = None,
    threads: int = 1,
    batch_invariant: bool = False,
) -> GroupConfig:
    return GroupConfig(
        model=ModelConfig(name="tiny", path=str(folder), dtype=dtype, max_model_len=max_model_len),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        parallel=ParallelConfig(tensor_parallel_size=tp, device="cpu", threads=threads),
        numerics=NumericsConfig(batch_invariant=batch_invariant),
    )


def load_worker(config: GroupConfig, group: TPGroup | None = None) -> Worker:
    worker = Worker(config, group or SoloGroup())
    worker.load()
    return worker


class Driver:
    """start() queues sequences; step() plans {slot: tokens} in that order and returns the StepResult."""

    def __init__(self, worker: Worker, seed: int = 0) -> None:
        self.worker = worker
        self._free = np.random.default_rng(seed).permutation(worker.cache.num_blocks).tolist()
        self._starts: list[SequenceStart] = []
        self._drops: list[int] = []
        self._tokens: dict[int, int] = {}  # computed or ordered
        self._blocks: dict[int, int] = {}
        self._step = 0

    def start(
        self, slot: int, tokens: Sequence[int], sampling: RowSampling = GREEDY, prompt_len: int | None = None
    ) -> None:
        length = len(tokens) if prompt_len is None else prompt_len
        self._starts.append(SequenceStart(slot, pack(tokens), length, 0, sampling))
        self._tokens[slot] = self._blocks[slot] = 0

    def drop(self, slot: int) -> None:
        self._drops.append(slot)

    def plan(self, rows: Mapping[int, int]) -> StepPlan:
        size = self.worker.cache.block_size
        counts, ids = [], []
        for slot, count in rows.items():
            self._tokens[slot] += count
            needed = -(-self._tokens[slot] // size) - self._blocks[slot]
            ids += [self._free.pop() for _ in range(needed)]
            counts.append(needed)
            self._blocks[slot] += needed
        self._step += 1
        plan = StepPlan(
            step=self._step,
            drops=pack(self._drops),
            starts=tuple(self._starts),
            slots=pack(list(rows)),
            counts=pack(list(rows.values())),
            blocks=(NewBlocks(pack(counts), pack(ids)),),
        )
        self._starts, self._drops = [], []
        return plan

    def step(self, rows: Mapping[int, int]) -> StepResult | None:
        return self.worker.execute(self.plan(rows))

    def ids(self, rows: Mapping[int, int]) -> list[int]:
        """Ids of the rows that sampled; empty on ranks other than 0."""
        result = self.step(rows)
        return unpack(result.ids).tolist() if result is not None else []

    def generate(self, slots: Sequence[int], count: int) -> dict[int, list[int]]:
        """Prefill each started slot in one chunk, then decode together: `count` tokens per slot."""
        lengths = {s.slot: len(unpack(s.tokens)) for s in self._starts}
        steps = [self.ids({s: lengths[s] for s in slots})]
        steps += [self.ids(dict.fromkeys(slots, 1)) for _ in range(count - 1)]
        return {slot: [ids[place] for ids in steps if ids] for place, slot in enumerate(slots)}


def sequence_logits(worker: Worker, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> torch.Tensor:
    """float32 [len(tokens), vocab]: logits at every position, computed in `chunks` (default: one); rank 0 only."""
    found = rank_logits(worker, tokens, chunks)
    assert found is not None
    return found


@torch.inference_mode()
def rank_logits(worker: Worker, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> torch.Tensor | None:
    """sequence_logits on every rank; None on all but rank 0."""
    driver = Driver(worker)
    driver.start(0, tokens)
    found = []
    for count in chunks or [len(tokens)]:
        plan = driver.plan({0: count})
        table, slots = worker.table, unpack(plan.slots)
        for start in plan.starts:
            table.start(start)
        worker.cache.clear(table.append_blocks(slots, plan.blocks[0]))
        lengths = np.array([count], np.int32)
        hidden = worker.model(build_batch(table, slots, lengths, worker.device), worker.backend)
        table.advance(slots, lengths)
        logits = worker.model.logits(hidden)
        if logits is not None:
            found.append(logits)
    return torch.cat(found) if found else None

"""A scheduler over an in-process worker on a tiny checkpoint: submit, run to the end, look at what came out."""

from pathlib import Path
from typing import Any

import numpy as np

from nori_cluster.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    NumericsConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from nori_cluster.device.parallel import SoloGroup
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.outcome import split_rows
from nori_cluster.engine.plan import FinishNews, StepDeltas
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.types import StepLogprobs, unpack
from nori_cluster.worker.inline import InlineExecutor
from nori_cluster.worker.worker import Worker

Scores = list[tuple[float, dict[int, float]]]  # per token: its logprob and the likeliest ones


class Engine:
    """`run` gives outputs by key; cached, finishes, logprobs and prompt_logprobs hold what else was told."""

    def __init__(
        self,
        folder: Path,
        *,
        depth: int = 1,
        blocks: int = 64,
        numerics: NumericsConfig = NumericsConfig(),
        speculative: SpeculativeConfig | None = None,
        threads: int = 1,
        **scheduler: Any,
    ) -> None:
        limits = SchedulerConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 256} | scheduler))
        config = GroupConfig(
            model=ModelConfig(name="tiny", path=str(folder), dtype="float32"),
            cache=CacheConfig(num_blocks=blocks),
            scheduler=limits,
            parallel=ParallelConfig(device="cpu", threads=threads),
            numerics=numerics,
            speculative=speculative,
        )
        worker = Worker(config, SoloGroup())
        spec = worker.load()
        executor = InlineExecutor(worker)
        executor.depth = depth
        self.scheduler = Scheduler(worker.config.scheduler, spec)
        self.core = EngineCore(self.scheduler, executor)
        self.cached: dict[int, int] = {}
        self.finishes: dict[int, FinishNews] = {}
        self.logprobs: dict[int, Scores] = {}
        self.prompt_logprobs: dict[int, Scores] = {}

    def run(self, *requests: SequenceRequest, abort_first: int | None = None) -> dict[int, list[int]]:
        for request in requests:
            self.core.submit(request, 0.0)
        outputs: dict[int, list[int]] = {request.key: [] for request in requests}
        self.logprobs |= {request.key: [] for request in requests}
        while self.core.has_work:
            deltas = self.core.step(0.0)
            self.scheduler.check()
            if abort_first is not None:
                self.core.abort(abort_first)
                abort_first = None
            if deltas is not None:
                self._take(deltas, outputs)
        return outputs

    def _take(self, deltas: StepDeltas, outputs: dict[int, list[int]]) -> None:
        for start in deltas.starts:
            self.cached[start.key] = start.cached_tokens
            if start.prompt_logprobs is not None:
                self.prompt_logprobs[start.key] = scores(start.prompt_logprobs)
        by_row = dict(split_rows(deltas.logprobs)) if deltas.logprobs is not None else {}
        pieces = np.split(deltas.ids, np.cumsum(deltas.counts)[:-1]) if len(deltas.counts) else []
        for key, row, ids in zip(deltas.keys.tolist(), deltas.rows.tolist(), pieces, strict=True):
            outputs[key] += ids.tolist()
            if row in by_row:
                self.logprobs[key] += scores(by_row[row])[: len(ids)]
        self.finishes |= {finish.key: finish for finish in deltas.finishes}


def scores(packed: StepLogprobs) -> Scores:
    """Entries in order."""
    ends = np.cumsum(unpack(packed.top_counts))[:-1]
    ids, values = np.split(unpack(packed.top_ids), ends), np.split(np.frombuffer(packed.top_values, "<f4"), ends)
    chosen = np.frombuffer(packed.chosen, "<f4").tolist()
    tops = [dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(ids, values, strict=True)]
    return list(zip(chosen, tops, strict=True))

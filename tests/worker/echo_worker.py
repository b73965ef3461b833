"""What the worker processes of test_channel.py run (a module of its own: spawned processes import it by name)."""

import contextlib
import os
import signal
import time

import pytest

from nori_cluster.config import ModelConfig
from nori_cluster.errors import CheckpointError, EngineFailure
from nori_cluster.types import GroupSpec, StepPlan, StepResult, pack
from nori_cluster.worker.channel import WorkerChannel


class Echo:
    """Answers with the size of what it got; step 13 fails on rank 1, step 14 kills rank 1.

    Step 15 never ends on any rank, step 16 not on rank 0: as in a collective that waits for the other. Folders: "odd"
    is refused by rank 1, "broken" fails there, "deadly" kills it, "endless" takes for ever.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loaded = ""

    def execute(self, plan: StepPlan) -> StepResult | None:
        if self.rank == 1 and plan.step == 13:
            raise ValueError("thirteen")
        if self.rank == 1 and plan.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        while plan.step == 15 or (plan.step == 16 and self.rank == 0):
            time.sleep(0.1)
        return (
            StepResult(step=plan.step, counts=pack([len(plan.counts)]), ids=bytes(len(plan.counts)))
            if self.rank == 0
            else None
        )

    def check_reload(self, model: ModelConfig) -> None:
        if self.rank == 1 and model.path == "odd":
            raise CheckpointError("odd: hidden_size is 3")

    def reload(self, model: ModelConfig) -> GroupSpec:
        assert model.path != "odd", "loaded what another rank had refused"
        if self.rank == 1 and model.path == "broken":
            raise OSError("cannot be read")
        if self.rank == 1 and model.path == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        while model.path == "endless":
            time.sleep(0.1)
        before, self.loaded = self.loaded, model.path
        return GroupSpec(
            model=model.name, vocab_size=1, max_model_len=1, num_blocks=1, block_size=1, eos_token_ids=(), dtype="",
            numerics_id=before, weights_id=model.path,
        )  # fmt: skip


def echo(address: str, token: str, rank: int) -> None:
    channel = WorkerChannel(address, token, rank)
    with contextlib.suppress(ValueError, OSError):
        channel.serve(Echo(rank))


def try_wrong_token(address: str) -> None:
    with pytest.raises((EngineFailure, ValueError)):
        WorkerChannel(address, "wrong", 0)

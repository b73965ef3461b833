"""What the worker processes of test_channel.py run (a module of its own: spawned processes import it by name)."""

import contextlib
import os
import signal

import pytest

from nori_cluster.errors import EngineFailure
from nori_cluster.types import StepPlan, StepResult, pack
from nori_cluster.worker.channel import WorkerChannel


def echo(address: str, token: str, rank: int) -> None:
    """A worker that answers with the size of what it got; step 13 fails on rank 1, step 14 kills rank 1."""

    def execute(plan: StepPlan) -> StepResult | None:
        if rank == 1 and plan.step == 13:
            raise ValueError("thirteen")
        if rank == 1 and plan.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return (
            StepResult(step=plan.step, counts=pack([len(plan.counts)]), ids=bytes(len(plan.counts)))
            if rank == 0
            else None
        )

    channel = WorkerChannel(address, token, rank)
    with contextlib.suppress(ValueError):
        channel.serve(execute)


def try_wrong_token(address: str) -> None:
    with pytest.raises((EngineFailure, ValueError)):
        WorkerChannel(address, "wrong", 0)

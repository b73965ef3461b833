"""What the worker processes of test_channel.py run (a module of its own: spawned processes import it by name)."""

import contextlib
import os
import signal
import time

import pytest

from nori_cluster.errors import EngineFailure
from nori_cluster.types import StepPlan, StepResult, pack
from nori_cluster.worker.channel import WorkerChannel


def echo(address: str, token: str, rank: int) -> None:
    """A worker that answers with the size of what it got; step 13 fails on rank 1, step 14 kills rank 1.

    Step 15 never ends on any rank, step 16 not on rank 0: as in a collective that waits for the other.
    """

    def execute(plan: StepPlan) -> StepResult | None:
        if rank == 1 and plan.step == 13:
            raise ValueError("thirteen")
        if rank == 1 and plan.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        while plan.step == 15 or (plan.step == 16 and rank == 0):
            time.sleep(0.1)
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

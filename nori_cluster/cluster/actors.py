"""Ray's actors as we use them: where they are put, and what their errors mean."""

from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nori_cluster.errors import EngineFailure, NoriError

DIED = "the process died"  # how `expected` begins where only Ray saw the end


def pinned_to_this_node() -> dict[str, Any]:
    """Actor options: no CPU reserved, this node or none."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


def expected(error: RayError, what: str = "the process") -> NoriError:
    """The NoriError inside a Ray one; anything else becomes an EngineFailure about `what` that names its type."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return cause if isinstance(cause, NoriError) else EngineFailure(f"{type(cause).__name__}: {cause}")
    if isinstance(error, ActorDiedError):
        return EngineFailure(f"{what} died{_cause(str(error))}")
    if isinstance(error, GetTimeoutError):
        return EngineFailure(f"{what} does not answer")
    return EngineFailure(f"{what} failed: {type(error).__name__}: {error}")


def _cause(text: str) -> str:
    """What Ray says of a death, short: its list of common causes says nothing about this one."""
    last = text.strip().splitlines()[-1].strip()
    detail = last.partition("Worker exit detail: ")[2] or last
    return f" ({detail.partition('Some common causes')[0].strip().rstrip('.')})"

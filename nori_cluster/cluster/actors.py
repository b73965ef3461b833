"""Ray's actors as we use them: where they are put, and what their errors mean."""

import contextlib
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nori_cluster.errors import EngineFailure, NoriError

ROUTER = "router-"  # how the names of routers' actors begin
DIED = "the process died"  # how `expected` begins where only Ray saw the end


def pinned_to_this_node() -> dict[str, Any]:
    """Actor options: no CPU reserved, this node or none."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


def named_actor(name: str) -> Any:
    """The handle of a detached actor of our namespace. EngineFailure when there is none."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise EngineFailure(f"there is no process {name!r}") from error


def end_strays(keep: Collection[str]) -> list[str]:
    """End what no controller watches: routers and groups (detached actors "GROUP#INCARNATION/…", placement groups
    "GROUP#INCARNATION") but those in `keep`. Returns their names."""
    ended = set()
    for name in ray.util.list_named_actors():
        incarnation = name.partition("/")[0]
        if ("#" in incarnation or name.startswith(ROUTER)) and incarnation not in keep:
            with contextlib.suppress(ValueError):  # gone meanwhile
                ray.kill(ray.get_actor(name), no_restart=True)
            ended.add(incarnation)
    for entry in placement_group_table().values():
        name = entry["name"]
        if "#" in name and name not in keep and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(name))
            ended.add(name)
    return sorted(ended)


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

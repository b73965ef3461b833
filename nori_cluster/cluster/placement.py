"""Is there room for a group? A pure answer in numbers, for whoever asked for it. Ray itself would only wait."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from nori_cluster.config import ClusterConfig
from nori_cluster.errors import ConfigError, EngineFailure

LOG_BYTES = 2 << 20  # that the first logs of a group need; processes without them never come up, and nobody says why
GROUPS_A_HOST = 16  # data-plane ports of one host

Resources = Mapping[str, float]


class Unplaceable(EngineFailure):
    """No node has room for all processes of a group now. Not the group's fault: it is tried again."""


def check_replicas(config: ClusterConfig, count: int) -> None:
    """ConfigError for a number of groups that this host's ports cannot hold: group i has the data-plane port plus i."""
    if count < 1:
        raise ConfigError(f"a model needs at least 1 group, not {count}", param="group_count")
    first = config.ports.dataplane
    if count > GROUPS_A_HOST:
        ports = f" (ports {first} to {first + GROUPS_A_HOST - 1})" if first else ""
        raise ConfigError(f"a host holds at most {GROUPS_A_HOST} groups{ports}, not {count}", param="group_count")
    last = first + count - 1
    if first and last > 65535:
        raise ConfigError(
            f"{count} groups need data-plane ports {first} to {last}, the last is 65535", param="group_count"
        )
    others = structs.asdict(config.ports)
    del others["dataplane"]
    for name, port in others.items():
        if first and first <= port <= last:
            raise ConfigError(
                f"{count} groups need data-plane ports {first} to {last}, and {port} is that of {name}",
                param="group_count",
            )


def logical_cpus(tensor_parallel_size: int) -> int:
    """What Ray must be told so that every group that has a port has a place: one for each process, 2 to spare."""
    return GROUPS_A_HOST * (1 + tensor_parallel_size) + 2


def shortfall(bundles: Sequence[Resources], free: Mapping[str, Resources]) -> str | None:
    """None when one node has room for all bundles together, else what is missing. free: node → what is left there."""
    needed: dict[str, float] = {}
    for bundle in bundles:
        for kind, amount in bundle.items():
            needed[kind] = needed.get(kind, 0.0) + amount

    def missing(node: str) -> float:
        return sum(max(0.0, amount - free[node].get(kind, 0.0)) / amount for kind, amount in needed.items())

    if not free:
        return f"needs {_shown(needed)} on one node, and there is no node"
    best = min(sorted(free), key=missing)
    if missing(best) == 0.0:
        return None
    return (
        f"needs {_shown(needed)} on one node, the largest free is {_shown({k: free[best].get(k, 0.0) for k in needed})}"
    )


def disk_shortfall(folder: Path) -> str | None:
    """None when the processes of a group can write their logs in this folder, else what is missing; the same text for
    as long as it is."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # no word about room: whoever starts there finds out what is wrong, and says so
        return None
    return None if free >= LOG_BYTES else f"needs {LOG_BYTES >> 20} MiB in {folder} for its logs, and the disk is full"


def _shown(resources: Resources) -> str:
    return "{" + ", ".join(f"{kind}: {amount:g}" for kind, amount in sorted(resources.items())) + "}"

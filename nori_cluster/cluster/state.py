"""What a controller must know to go on where another one was lost: wanted, drained, running. One small file.

Written whole at every change of a group, so that a reader sees the old state or the new one, never a part. It has to
outlive a process, not the machine: nothing is synced to disk, and a loss of the Ray head ends everything it tells of.
"""

from pathlib import Path

import msgspec

from nori_cluster.cluster.reconcile import GroupRecord
from nori_cluster.config import ModelConfig
from nori_cluster.errors import EngineFailure
from nori_cluster.rpc.admin_types import EventInfo
from nori_cluster.types import GroupSpec

REMEMBERED_EVENTS = 100


class RunningGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that serves: what its processes cannot be asked for. pids: of the ranks. created: unix seconds."""

    name: str
    incarnation: int
    address: str
    engine_pid: int
    pids: tuple[int, ...]
    created: float
    spec: GroupSpec | None


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """replicas: wanted groups. model: what new groups serve; models: what each one does. drained: by an operator, until
    resumed; draining: those, and others for an operation that ends with its controller. router: name of its actor.
    takeovers: controllers that were replaced. records hold times of the monotonic clock: all of a host share it.
    """

    replicas: int
    model: ModelConfig
    models: dict[str, ModelConfig]
    draining: tuple[str, ...]
    drained: tuple[str, ...]
    router: str
    router_port: int
    router_restarts: int
    admin_port: int
    takeovers: int
    records: tuple[GroupRecord, ...]
    running: tuple[RunningGroup, ...]
    events: tuple[EventInfo, ...]


def save(path: Path, state: SavedState) -> None:
    """Replaces what was there."""
    draft = path.with_name(path.name + ".new")
    draft.write_bytes(msgspec.json.encode(state))
    draft.replace(path)


def load(path: Path) -> SavedState | None:
    """None when nothing was saved yet. EngineFailure for a file that nobody of us wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedState)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise EngineFailure(f"{path} cannot be read: {error}") from error

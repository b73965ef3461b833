"""Operations of the admin plane, waited for: what `drain`, `scale`, `rollout` and `reload-weights` have in common."""

import json
import time

import msgspec
import typer

from nori_cluster.errors import DeadlineExceeded, EngineFailure
from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import OperationInfo

SLICE = 5.0  # seconds of one wait on the server


def finish(client: AdminClient, operation: OperationInfo, seconds: float, what: str) -> OperationInfo:
    """The operation at its end. DeadlineExceeded after so many seconds (it goes on), EngineFailure when it failed."""
    deadline = time.monotonic() + seconds
    while not operation.done:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} is not done after {seconds:g} s and goes on; look again with `nori status`")
        operation = client.wait_operation(operation.name, min(SLICE, max(0.1, deadline - time.monotonic())))
    if operation.error_code:
        raise EngineFailure(f"{what} failed: {operation.error_message}")
    return operation


def only_model(client: AdminClient, model: str | None) -> str:
    """The given name, or that of the only model of the cluster."""
    names = [info.model for info in client.get_status().models]
    if model is not None:
        return model
    if len(names) == 1:
        return names[0]
    raise typer.BadParameter(f"name one of: {', '.join(names)}")


def to_json(operation: OperationInfo) -> str:
    return json.dumps(msgspec.structs.asdict(operation))

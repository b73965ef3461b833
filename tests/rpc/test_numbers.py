"""Enums that are cast, not mapped: their numbers must equal the protos'."""

import pytest

from nori_cluster.routing.base import GroupState, RefusalReason
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2
from nori_cluster.types import FinishReason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (FinishReason, generation_pb2.FinishReason, "FINISH_REASON_"),
        (GroupState, router_service_pb2.GroupState, "GROUP_STATE_"),
        (RefusalReason, router_service_pb2.RefusalReason, "REFUSAL_REASON_"),
    ],
)
def test_enums_equal_the_protos(ours, theirs, prefix: str) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
    assert wire == {member.name: member.value for member in ours}

"""The words of routing: what groups and gateways tell the router, what it answers, and what a policy sees.

Filled by rpc/convert.py from protobuf (numbers of the enums equal nori.router.v1); decided by routing/router.py.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec


class GroupState(IntEnum):
    """Life of a group; health is progress."""

    STARTING = 1
    LOADING = 2
    READY = 3
    BUSY = 4
    STALLED = 5
    DRAINING = 6
    DEAD = 7


PLACEABLE = frozenset({GroupState.READY, GroupState.BUSY})


class RefusalReason(IntEnum):
    TENANT_LIMIT = 1
    QUEUE_FULL = 2
    NO_GROUP = 3
    UNKNOWN_MODEL = 4
    DEADLINE_PASSED = 5
    TOO_LONG = 6


class GroupRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for an incarnation of a group, its weights and numerics_id apart. address: host:port of its data plane."""

    group_id: str
    incarnation: int
    model: str
    address: str
    max_context_tokens: int
    max_running_sequences: int
    max_batched_tokens: int
    kv_block_tokens: int = 0
    kv_blocks: int = 0
    hash_seed: int = 0
    numerics_id: str = ""
    weights_id: str = ""
    weight_version: str = ""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says of its load. Totals are since it started; prefix_cache_queries and _hits in tokens."""

    step: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    free_kv_blocks: int = 0
    tokens_per_second: float = 0.0
    generated_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_evictions: int = 0
    preemptions: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group as the router shows it to gateways and the controller. outstanding_tokens: reserved by all gateways."""

    registration: GroupRegistration
    state: GroupState
    report: GroupReport
    outstanding_tokens: int = 0

    @property
    def group_id(self) -> str:
        return self.registration.group_id

    @property
    def placeable(self) -> bool:
        return self.state in PLACEABLE


class GroupRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """Incarnations of a group that ended: lost, or ended on purpose to start anew."""

    group_id: str
    model: str
    lost: int = 0
    on_purpose: int = 0


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """Since the cluster started. controllers, routers: that took over from a lost one. groups: those that are wanted or
    being removed."""

    controllers: int = 0
    routers: int = 0
    groups: tuple[GroupRestarts, ...] = ()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway asks for a group. request: unique among the gateway's open ones. time_left: seconds, None = no end.

    lost_group_id and attempt are set when an earlier placement came to nothing. weights_id: of the tokens that the
    request has said already; no group with other weights may go on with them. Empty: any may.
    """

    request: int
    model: str
    prompt_tokens: int
    max_tokens: int
    candidates: int = 1
    tenant: str = ""
    session_id: str = ""
    priority: int = 0
    time_left: float | None = None
    lost_group_id: str = ""
    numerics_id: str = ""
    weights_id: str = ""
    attempt: int = 0


class Considered(msgspec.Struct, frozen=True):
    """One group that was considered; score is the policy's (lower is better)."""

    group_id: str
    score: float
    outstanding_tokens: int


class Placement(msgspec.Struct, frozen=True):
    """Answers Place. order_key: lower runs first. waited: seconds in the router's queue."""

    request: int
    group_id: str
    order_key: int
    waited: float = 0.0
    considered: tuple[Considered, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """Answers Place when nothing will take the request. retry_after: seconds, None = repeating cannot help."""

    request: int
    reason: RefusalReason
    message: str
    retry_after: float | None = None


class Finished(msgspec.Struct, frozen=True):
    """Releases the reservation of a placement. failed: the group refused it or broke while it held it."""

    request: int
    output_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    failed: bool = False


class OpenRequest(msgspec.Struct, frozen=True):
    """A placed request that still runs, as a gateway names it in Hello."""

    request: int
    group_id: str
    tenant: str = ""
    outstanding_tokens: int = 0
    prompt_tokens: int = 0
    candidates: int = 1


class Candidate(Protocol):
    """A placeable group with room, as a policy sees it (read only)."""

    @property
    def group_id(self) -> str: ...
    @property
    def load(self) -> int:
        """Outstanding tokens."""


class Placed(msgspec.Struct, frozen=True):
    """Event for Policy.observe: a place went to a group."""

    place: Place
    gateway_id: str
    group_id: str


class Left(msgspec.Struct, frozen=True):
    """Event for Policy.observe: a group is gone, with all it held in memory."""

    group_id: str


class Policy(Protocol):
    """Picks one of several groups; one instance per model. Must be deterministic in its events."""

    def choose(self, place: Place, gateway_id: str, groups: Sequence[Candidate]) -> Candidate:
        """groups: not empty, in the order of group_id; each may take the place."""

    def observe(self, event: Placed | Left) -> None: ...

"""protobuf ↔ our structs, for the router and data planes. Shapes only: no decision is taken here.

`x_to_pb` writes, `x_from_pb` reads. Durations are float seconds on our side.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from google.protobuf.duration_pb2 import Duration

from nori_cluster.errors import ClientError
from nori_cluster.frontend.backend import Finish, Started
from nori_cluster.routing.base import (
    Considered,
    Finished,
    GroupRegistration,
    GroupReport,
    GroupRestarts,
    GroupState,
    GroupView,
    OpenRequest,
    Place,
    Placement,
    Refusal,
    RefusalReason,
    Restarts,
)
from nori_cluster.rpc.convert_sampling import sampling_to_pb
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as dataplane
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as router
from nori_cluster.types import FinishReason, Request, TokenLogprob


def duration(seconds: float) -> Duration:
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def seconds(value: Duration) -> float:
    return value.seconds + value.nanos / 1e9


# -- router plane ---------------------------------------------------------------------------------------------------


def registration_to_pb(value: GroupRegistration) -> router.GroupRegistration:
    return router.GroupRegistration(
        group_id=value.group_id,
        group_incarnation=value.incarnation,
        model=value.model,
        address=value.address,
        max_context_tokens=value.max_context_tokens,
        max_running_sequences=value.max_running_sequences,
        max_batched_tokens=value.max_batched_tokens,
        kv_block_tokens=value.kv_block_tokens,
        kv_blocks=value.kv_blocks,
        hash_seed=value.hash_seed,
        numerics_id=value.numerics_id,
        weights_id=value.weights_id,
        weight_version=value.weight_version,
    )


def registration_from_pb(value: router.GroupRegistration) -> GroupRegistration:
    """Raises ClientError naming a field that may not be empty."""
    for name in ("group_id", "model", "address", "max_context_tokens", "max_running_sequences", "max_batched_tokens"):
        if not getattr(value, name):
            raise ClientError(f"a group must state its {name}", param=f"registration.{name}")
    return _registration(value)


def _registration(value: router.GroupRegistration | router.GroupView) -> GroupRegistration:
    return GroupRegistration(
        group_id=value.group_id,
        incarnation=value.group_incarnation,
        model=value.model,
        address=value.address,
        max_context_tokens=value.max_context_tokens,
        max_running_sequences=value.max_running_sequences,
        max_batched_tokens=value.max_batched_tokens,
        kv_block_tokens=value.kv_block_tokens,
        kv_blocks=value.kv_blocks,
        hash_seed=value.hash_seed,
        numerics_id=value.numerics_id,
        weights_id=value.weights_id,
        weight_version=value.weight_version,
    )


def report_to_pb(value: GroupReport) -> router.GroupReport:
    return router.GroupReport(
        step=value.step,
        running_sequences=value.running_sequences,
        waiting_sequences=value.waiting_sequences,
        waiting_tokens=value.waiting_tokens,
        free_kv_blocks=value.free_kv_blocks,
        tokens_per_second=value.tokens_per_second,
        generated_tokens=value.generated_tokens,
        prefix_cache_queries=value.prefix_cache_queries,
        prefix_cache_hits=value.prefix_cache_hits,
        prefix_cache_evictions=value.prefix_cache_evictions,
        preemptions=value.preemptions,
        proposed_draft_tokens=value.proposed_draft_tokens,
        accepted_draft_tokens=value.accepted_draft_tokens,
    )


def report_from_pb(value: router.GroupReport) -> GroupReport:
    return GroupReport(
        step=value.step,
        running_sequences=value.running_sequences,
        waiting_sequences=value.waiting_sequences,
        waiting_tokens=value.waiting_tokens,
        free_kv_blocks=value.free_kv_blocks,
        tokens_per_second=value.tokens_per_second,
        generated_tokens=value.generated_tokens,
        prefix_cache_queries=value.prefix_cache_queries,
        prefix_cache_hits=value.prefix_cache_hits,
        prefix_cache_evictions=value.prefix_cache_evictions,
        preemptions=value.preemptions,
        proposed_draft_tokens=value.proposed_draft_tokens,
        accepted_draft_tokens=value.accepted_draft_tokens,
    )


def state_from_pb(value: int) -> GroupState:
    """A state this version does not know takes no work."""
    return GroupState(value) if value in GroupState._value2member_map_ else GroupState.STALLED


def restarts_to_pb(value: Restarts) -> router.Restarts:
    groups = [
        router.GroupRestarts(group_id=g.group_id, model=g.model, lost=g.lost, on_purpose=g.on_purpose)
        for g in value.groups
    ]
    return router.Restarts(controllers=value.controllers, routers=value.routers, groups=groups)


def restarts_from_pb(message: router.Restarts) -> Restarts:
    groups = [
        GroupRestarts(group_id=g.group_id, model=g.model, lost=g.lost, on_purpose=g.on_purpose) for g in message.groups
    ]
    return Restarts(controllers=message.controllers, routers=message.routers, groups=tuple(groups))


def view_to_pb(value: GroupView) -> router.GroupView:
    facts = value.registration
    return router.GroupView(
        group_id=facts.group_id,
        group_incarnation=facts.incarnation,
        model=facts.model,
        address=facts.address,
        state=cast("router.GroupState", int(value.state)),
        outstanding_tokens=value.outstanding_tokens,
        kv_block_tokens=facts.kv_block_tokens,
        kv_blocks=facts.kv_blocks,
        hash_seed=facts.hash_seed,
        numerics_id=facts.numerics_id,
        weights_id=facts.weights_id,
        weight_version=facts.weight_version,
        max_context_tokens=facts.max_context_tokens,
        max_running_sequences=facts.max_running_sequences,
        max_batched_tokens=facts.max_batched_tokens,
        report=report_to_pb(value.report),
    )


def view_from_pb(value: router.GroupView) -> GroupView:
    return GroupView(
        registration=_registration(value),
        state=state_from_pb(value.state),
        report=report_from_pb(value.report),
        outstanding_tokens=value.outstanding_tokens,
    )


def place_to_pb(value: Place) -> router.Place:
    out = router.Place(
        request=value.request,
        model=value.model,
        tenant=value.tenant,
        session_id=value.session_id,
        priority=value.priority,
        prompt_tokens=value.prompt_tokens,
        max_tokens=value.max_tokens,
        candidates=value.candidates,
    )
    if value.time_left is not None:
        out.time_left.CopyFrom(duration(value.time_left))
    if value.attempt or value.lost_group_id:
        out.continuation.lost_group_id = value.lost_group_id
        out.continuation.numerics_id = value.numerics_id
        out.continuation.weights_id = value.weights_id
        out.continuation.attempt = value.attempt
    return out


def place_from_pb(value: router.Place) -> Place:
    return Place(
        request=value.request,
        model=value.model,
        tenant=value.tenant,
        session_id=value.session_id,
        priority=value.priority,
        prompt_tokens=value.prompt_tokens,
        max_tokens=value.max_tokens,
        candidates=max(1, value.candidates),
        time_left=seconds(value.time_left) if value.HasField("time_left") else None,
        lost_group_id=value.continuation.lost_group_id,
        numerics_id=value.continuation.numerics_id,
        weights_id=value.continuation.weights_id,
        attempt=value.continuation.attempt,
    )


def placement_to_pb(value: Placement) -> router.Placement:
    considered = [
        router.Candidate(group_id=c.group_id, score=c.score, outstanding_tokens=c.outstanding_tokens)
        for c in value.considered
    ]
    return router.Placement(
        request=value.request,
        group_id=value.group_id,
        order_key=value.order_key,
        waited=duration(value.waited),
        candidates=considered,
    )


def placement_from_pb(value: router.Placement) -> Placement:
    considered = tuple(Considered(c.group_id, c.score, c.outstanding_tokens) for c in value.candidates)
    return Placement(value.request, value.group_id, value.order_key, seconds(value.waited), considered)


def refusal_to_pb(value: Refusal) -> router.Refusal:
    reason = cast("router.RefusalReason", int(value.reason))
    out = router.Refusal(request=value.request, reason=reason, message=value.message)
    if value.retry_after is not None:
        out.retry_after.CopyFrom(duration(value.retry_after))
    return out


def refusal_from_pb(value: router.Refusal) -> Refusal:
    """A reason this version does not know reads as NO_GROUP: ours, and worth a retry."""
    known = value.reason in RefusalReason._value2member_map_
    reason = RefusalReason(value.reason) if known else RefusalReason.NO_GROUP
    retry_after = seconds(value.retry_after) if value.HasField("retry_after") else None
    return Refusal(value.request, reason, value.message, retry_after)


def finished_to_pb(value: Finished) -> router.Finished:
    return router.Finished(
        request=value.request,
        computed_prompt_tokens=value.computed_prompt_tokens,
        cached_prompt_tokens=value.cached_prompt_tokens,
        output_tokens=value.output_tokens,
        failed=value.failed,
    )


def finished_from_pb(value: router.Finished) -> Finished:
    return Finished(
        value.request, value.output_tokens, value.computed_prompt_tokens, value.cached_prompt_tokens, value.failed
    )


def open_request_to_pb(value: OpenRequest) -> router.OpenRequest:
    return router.OpenRequest(
        request=value.request,
        group_id=value.group_id,
        tenant=value.tenant,
        outstanding_tokens=value.outstanding_tokens,
        prompt_tokens=value.prompt_tokens,
        candidates=value.candidates,
    )


def open_request_from_pb(value: router.OpenRequest) -> OpenRequest:
    return OpenRequest(
        value.request,
        value.group_id,
        value.tenant,
        value.outstanding_tokens,
        value.prompt_tokens,
        max(1, value.candidates),
    )


# -- data plane -----------------------------------------------------------------------------------------------------


def sequences_to_pb(
    request: Request,
    *,
    max_tokens: int,
    order_key: int,
    time_left: float | None,
    outputs: Sequence[Sequence[int]] = (),
    weights_id: str = "",
) -> list[dataplane.SequenceRequest]:
    """One sequence per candidate, without handles (whoever owns the stream gives them). max_tokens: resolved.

    outputs: what each candidate has said already; it goes on from there. Only candidate 0 asks for prompt logprobs, and
    not again once it has spoken. weights_id: of what was said; a group with others refuses.
    """
    params = request.sampling
    first = dataplane.SequenceRequest(
        trace_id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_pb(params, request.seed, max_tokens),
        priority=request.priority,
        cache_salt=request.cache_salt.encode(),
        order_key=order_key,
        task=dataplane.TASK_GENERATE,
        top_logprobs=params.logprobs,
        time_left=None if time_left is None else duration(time_left),
        bad_words=[generation_pb2.TokenSequence(ids=ids) for ids in params.bad_word_ids],
        weights_id=weights_id,
    )
    out = [first]
    for candidate in range(1, params.n):
        sequence = dataplane.SequenceRequest()
        sequence.CopyFrom(first)
        sequence.candidate = candidate
        out.append(sequence)
    for sequence, said in zip(out, outputs, strict=False):
        sequence.prompt_token_ids.extend(said)
        sequence.resumed_tokens = len(said)
    if params.prompt_logprobs is not None and not first.resumed_tokens:
        first.prompt_logprobs = params.prompt_logprobs
    return out


def started_from_pb(value: dataplane.SequenceStart) -> Started:
    prompt = logprobs_from_pb(value.prompt_logprobs) if value.HasField("prompt_logprobs") else None
    return Started(value.cached_tokens, seconds(value.queue_time), prompt)


def finish_from_pb(value: dataplane.SequenceFinish) -> Finish:
    """A reason this version does not know reads as STOP."""
    known = value.reason in FinishReason._value2member_map_
    matched = value.matched_token_id if value.HasField("matched_token_id") else None
    reason = FinishReason(value.reason) if known else FinishReason.STOP
    return Finish(reason, matched, value.accepted_draft_tokens, value.proposed_draft_tokens)


def logprobs_to_pb(values: Iterable[TokenLogprob]) -> generation_pb2.TokenLogprobs:
    out = generation_pb2.TokenLogprobs()
    for value in values:
        out.logprobs.append(value.logprob)
        out.top.add(token_ids=value.top_ids, logprobs=value.top_logprobs)
    return out


def logprobs_from_pb(value: generation_pb2.TokenLogprobs) -> list[TokenLogprob]:
    tops = value.top
    if len(tops) != len(value.logprobs):
        return [TokenLogprob(logprob) for logprob in value.logprobs]
    return [
        TokenLogprob(logprob, tuple(top.token_ids), tuple(top.logprobs))
        for logprob, top in zip(value.logprobs, tops, strict=True)
    ]

"""The router's mind: events of gateways and groups in, placements and refusals out. Pure: time is an argument.

Used by rpc/router_server.py, and by a gateway that lost the router, over its last table (rpc/router_client.py).
"""

import heapq
from collections.abc import Callable

from nori_cluster.routing.base import (
    Considered,
    Finished,
    GroupRegistration,
    GroupReport,
    GroupState,
    GroupView,
    Left,
    OpenRequest,
    Place,
    Placed,
    Placement,
    Policy,
    Refusal,
    RefusalReason,
)
from nori_cluster.routing.drain import DrainRate, spread
from nori_cluster.routing.expected_output import ExpectedOutput
from nori_cluster.routing.queue import RequestKey, Waiting, WaitingQueue
from nori_cluster.routing.table import GroupEntry, Reservation, RoutingTable

Decision = tuple[str, Placement | Refusal]  # the gateway it is for
RETRY_NO_GROUP = 2.0  # seconds
PRIORITY_AGING = 10.0  # seconds of waiting that outweigh one level of priority
MAX_CONSIDERED = 4  # groups named in a placement, for the request's record


class Router:
    """Owns the table, the queue and one policy per model. Call `take` after each event for what was decided.

    order_key: microseconds of arrival, on the router's clock plus order_base (so that a later life's keys are larger),
    plus priority_aging seconds per level of priority: a request that waited that much longer than one of the next
    better priority goes first. settle_until: until then (router clock) a place that finds no group waits instead of
    being refused: after a start the groups are still registering.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        *,
        max_waiting: int = 4096,
        max_waiting_tokens: int | None = None,
        priority_aging: float = PRIORITY_AGING,
        order_base: int = 0,
        settle_until: float = 0.0,
    ) -> None:
        self.table = RoutingTable()
        self.queue = WaitingQueue(max_waiting, max_waiting_tokens)
        self.expected = ExpectedOutput()
        self.drain = DrainRate()
        self._new_policy = policy
        self._policies: dict[str, Policy] = {}
        self._unreachable: dict[str, frozenset[str]] = {}
        self._order_base = order_base
        self._aging = priority_aging
        self._places = 0
        self._refused_full = 0
        self._last_arrival = 0  # microseconds; grows with every place
        self._settle_until = settle_until
        self._decisions: list[Decision] = []

    def take(self) -> list[Decision]:
        """What was decided since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    # -- gateways ---------------------------------------------------------------------------------------------------

    def hello(self, gateway_id: str, open_requests: list[OpenRequest], now: float) -> None:
        """A gateway (re)connects: what it names is all it holds; it sends again what still waits."""
        self._clear_gateway(gateway_id)
        for item in open_requests:
            entry = self.table.groups.get(item.group_id)
            self.table.reserve(
                Reservation(
                    key=(gateway_id, item.request),
                    group_id=item.group_id,
                    model=entry.registration.model if entry is not None else "",
                    tenant=item.tenant,
                    candidates=max(1, item.candidates),
                    prompt_tokens=item.prompt_tokens,
                    tokens=item.outstanding_tokens,
                )
            )
        self._pump_all(now)

    def forget_gateway(self, gateway_id: str, now: float) -> None:
        """A gateway is gone for good: nothing of it waits or counts any more."""
        self._clear_gateway(gateway_id)
        self._unreachable.pop(gateway_id, None)
        self._pump_all(now)

    def suspend_gateway(self, gateway_id: str, now: float) -> None:
        """A gateway's stream broke: what it waited for is dropped (it will ask again), what runs still counts."""
        for key in self.queue.of_gateway(gateway_id):
            self.queue.remove(key)
        self._pump_all(now)

    def set_unreachable(self, gateway_id: str, group_ids: frozenset[str], now: float) -> None:
        """The groups this gateway cannot reach now: its places do not go there."""
        self._unreachable[gateway_id] = group_ids
        self._pump_all(now)

    def place(self, gateway_id: str, place: Place, now: float) -> None:
        key = (gateway_id, place.request)
        assert key not in self.queue and key not in self.table.reservations, "request id in use"
        self._places += 1
        if place.time_left is not None and place.time_left <= 0:
            self._refuse(key, RefusalReason.DEADLINE_PASSED, "the deadline had passed on arrival")
            return
        deadline = None if place.time_left is None else now + place.time_left
        self._last_arrival = max(round(now * 1e6), self._last_arrival + 1)
        order_key = self._order_base + self._last_arrival + round(place.priority * self._aging * 1e6)
        self.queue.push(Waiting(key, place, max(order_key, 0), self._places, now, deadline))
        self._pump(place.model, now)
        if key in self.queue and self.queue.overfull:
            self.queue.remove(key)
            message = f"{len(self.queue)} requests with {self.queue.tokens} prompt tokens wait already"
            self._refused_full += 1
            retry_after = spread(self.drain.wait(now, len(self.queue)), self._refused_full)
            self._refuse(key, RefusalReason.QUEUE_FULL, message, retry_after)

    def holds(self, gateway_id: str, request: int) -> bool:
        """Whether the request waits or has a reservation here."""
        key = (gateway_id, request)
        return key in self.queue or key in self.table.reservations

    def cancel(self, gateway_id: str, request: int, now: float) -> None:
        """The gateway no longer wants it, whether it waits or was placed meanwhile."""
        waiting = self.queue.remove((gateway_id, request))
        if waiting is not None:
            self.drain.departed(now)
            self._pump(waiting.place.model, now)
        else:
            self._release((gateway_id, request), now)

    def finish(self, gateway_id: str, finished: Finished, now: float) -> None:
        key = (gateway_id, finished.request)
        reservation = self.table.reservations.get(key)
        if reservation is None:
            return
        if finished.failed:
            entry = self.table.groups.get(reservation.group_id)
            if entry is not None:
                entry.held_off = True
        elif finished.output_tokens and reservation.model:
            mean = finished.output_tokens / reservation.candidates
            self.expected.observe(reservation.model, reservation.tenant, mean)
        self._release(key, now)

    # -- groups -----------------------------------------------------------------------------------------------------

    def register(self, registration: GroupRegistration, state: GroupState, report: GroupReport, now: float) -> None:
        """Also when a known group holds other weights: what it had cached is gone then, its reservations stay."""
        old = self.table.groups.get(registration.group_id)
        other_weights = old is not None and old.registration.weights_id != registration.weights_id
        if self.table.register(registration, state, report) or other_weights:
            self._observe_left(registration.group_id)
        self._pump_all(now)

    def report(self, group_id: str, incarnation: int, state: GroupState, report: GroupReport, now: float) -> bool:
        """False when the report is of an incarnation that is not in the table."""
        known = self.table.report(group_id, incarnation, state, report)
        if known:
            self._pump_all(now)
        return known

    def silence(self, group_id: str, incarnation: int, now: float) -> None:
        """The group is overdue with its report: it counts as stalled until the next one."""
        if self.table.silence(group_id, incarnation):
            self._pump_all(now)

    def lose(self, group_id: str, incarnation: int, now: float) -> bool:
        """The group is dead at once; places that waited for it alone are refused."""
        lost = self.table.lose(group_id, incarnation)
        if lost:
            self._pump_all(now)
        return lost

    def forget(self, group_id: str) -> None:
        """Takes a dead group out of the table."""
        self.table.forget(group_id)
        self._observe_left(group_id)

    def set_draining(self, group_id: str, draining: bool, now: float) -> bool:
        found = self.table.set_draining(group_id, draining)
        self._pump_all(now)
        return found

    def set_foreign_load(self, group_id: str, tokens: int) -> None:
        """Load of a registered group that was placed by others, not through this router."""
        self.table.groups[group_id].foreign_tokens = tokens

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Refuse what waited past its deadline; look again at the rest (the time to settle may be over)."""
        for waiting in self.queue.expired(now):
            self.drain.departed(now)
            self._refuse_late(waiting)
        self._pump_all(now)

    def retry_after(self, now: float) -> float:
        """Seconds after which a request that is refused now because the queue is full should come back."""
        return self.drain.wait(now, len(self.queue))

    def views(self) -> list[GroupView]:
        return self.table.views()

    def check(self) -> None:
        """Table and queue are sound; nothing waits that could go."""
        self.table.check()
        self.queue.check()
        assert not any(key in self.table.reservations for key in self._waiting_keys()), "placed and waiting at once"
        for model in self.queue.models():
            oldest = next(self.queue.of_model(model))
            groups = self._eligible(oldest, self.table.placeable(model))
            assert not any(self._room(group, oldest.place) for group in groups), "a place waits beside a free group"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _waiting_keys(self) -> list[RequestKey]:
        return [waiting.key for model in self.queue.models() for waiting in self.queue.of_model(model)]

    def _clear_gateway(self, gateway_id: str) -> None:
        for key in self.queue.of_gateway(gateway_id):
            self.queue.remove(key)
        for key in self.table.of_gateway(gateway_id):
            self.table.release(key)

    def _release(self, key: RequestKey, now: float) -> None:
        reservation = self.table.release(key)
        if reservation is not None:
            entry = self.table.groups.get(reservation.group_id)
            if entry is not None:
                self._pump(entry.registration.model, now)

    def _observe_left(self, group_id: str) -> None:
        for policy in self._policies.values():
            policy.observe(Left(group_id))

    def _pump_all(self, now: float) -> None:
        for model in self.queue.models():
            self._place_waiting(model, now)
        self._note_queue(now)

    def _pump(self, model: str, now: float) -> None:
        self._place_waiting(model, now)
        self._note_queue(now)

    def _note_queue(self, now: float) -> None:
        """After whatever changed the queue: the drain rate is one of the time in which something waits."""
        if len(self.queue):
            self.drain.begin(now)
        else:
            self.drain.end(now)

    def _place_waiting(self, model: str, now: float) -> None:
        """Place what can go, in order. Who comes later may not overtake on a group that an earlier one waits for."""
        open_groups = self.table.placeable(model)
        for waiting in list(self.queue.of_model(model)):
            if waiting.deadline is not None and waiting.deadline <= now:
                self._leave(waiting, now)
                self._refuse_late(waiting)
                continue
            refusal = self._refusal(waiting, now)
            if refusal is not None:
                self._leave(waiting, now)
                self._refuse(waiting.key, *refusal)
                continue
            eligible = self._eligible(waiting, open_groups)
            with_room = [group for group in eligible if self._room(group, waiting.place)]
            if with_room:
                self._leave(waiting, now)
                self._assign(waiting, with_room, now)
                continue
            open_groups = [group for group in open_groups if group not in eligible]
            if not open_groups and self.table.placeable(model):
                return

    def _leave(self, waiting: Waiting, now: float) -> None:
        self.queue.remove(waiting.key)
        if waiting.arrived < now:  # what found a group at once says nothing of the queue's pace
            self.drain.departed(now)

    def _refusal(self, waiting: Waiting, now: float) -> tuple[RefusalReason, str, float | None] | None:
        """Why it can never go as things are; None when it may wait."""
        place = waiting.place
        if self._eligible(waiting, self.table.placeable(place.model)):
            return None
        context = self.table.models.get(place.model)
        if context is not None and place.prompt_tokens >= context:
            message = (
                f"This model's maximum context length is {context} tokens; "
                f"{place.prompt_tokens} prompt tokens leave no room for output."
            )
            return RefusalReason.TOO_LONG, message, None
        if now < self._settle_until:
            return None
        if context is None:
            return RefusalReason.UNKNOWN_MODEL, f"no worker group serves model {place.model!r}", None
        reachable = [g for g in self.table.placeable(place.model) if self._reaches(waiting.key[0], g.group_id)]
        if reachable and not any(_holds(group, place) for group in reachable):
            message = f"no ready worker group of model {place.model!r} holds the weights that began this answer"
            return RefusalReason.NO_GROUP, f"{message} ({place.weights_id})", RETRY_NO_GROUP
        if reachable:  # and still not eligible: its KV cache is too small
            return RefusalReason.TOO_LONG, f"{place.prompt_tokens} prompt tokens exceed the KV cache of any group", None
        return RefusalReason.NO_GROUP, f"no worker group of model {place.model!r} is ready", RETRY_NO_GROUP

    def _reaches(self, gateway_id: str, group_id: str) -> bool:
        return group_id not in self._unreachable.get(gateway_id, ())

    def _eligible(self, waiting: Waiting, groups: list[GroupEntry]) -> list[GroupEntry]:
        """Those of `groups` that may take it once they have room."""
        gateway_id, tokens = waiting.key[0], waiting.place.prompt_tokens
        return [
            g for g in groups if g.fits(tokens) and self._reaches(gateway_id, g.group_id) and _holds(g, waiting.place)
        ]

    @staticmethod
    def _room(group: GroupEntry, place: Place) -> bool:
        return group.has_room(place.candidates, place.prompt_tokens)

    def _assign(self, waiting: Waiting, groups: list[GroupEntry], now: float) -> None:
        place, gateway_id = waiting.place, waiting.key[0]
        if place.lost_group_id and len(groups) > 1:
            groups = [group for group in groups if group.group_id != place.lost_group_id]
        if place.numerics_id:  # a continuation is exact where the numerics are equal
            groups = [g for g in groups if g.registration.numerics_id == place.numerics_id] or groups
        policy = self._policies.get(place.model)
        if policy is None:
            policy = self._policies[place.model] = self._new_policy()
        chosen = policy.choose(place, gateway_id, groups)
        output = self.expected.of(place.model, place.tenant, place.max_tokens)
        best = heapq.nsmallest(MAX_CONSIDERED, groups, key=lambda group: group.load)
        considered = tuple(Considered(g.group_id, float(g.load), g.load) for g in best)
        self.table.reserve(
            Reservation(
                key=waiting.key,
                group_id=chosen.group_id,
                model=place.model,
                tenant=place.tenant,
                candidates=place.candidates,
                prompt_tokens=place.prompt_tokens,
                tokens=place.prompt_tokens + place.candidates * output,
            )
        )
        policy.observe(Placed(place, gateway_id, chosen.group_id))
        waited = now - waiting.arrived
        self._decisions.append(
            (gateway_id, Placement(place.request, chosen.group_id, waiting.order_key, waited, considered))
        )

    def _refuse_late(self, waiting: Waiting) -> None:
        self._refuse(waiting.key, RefusalReason.DEADLINE_PASSED, "the deadline passed while the request waited")

    def _refuse(self, key: RequestKey, reason: RefusalReason, message: str, retry_after: float | None = None) -> None:
        gateway_id, request = key
        self._decisions.append((gateway_id, Refusal(request, reason, message, retry_after)))


def _holds(group: GroupEntry, place: Place) -> bool:
    """What was said with some weights goes on with those only."""
    return not place.weights_id or group.registration.weights_id == place.weights_id

"""The routing table: groups by id with state, load and the reservations they hold. Pure; owned by routing/router.py.

A reservation counts from its Place until Finished, or until its group is lost. `epoch` grows with every change of
membership or state.
"""

import msgspec

from nori_cluster.routing.base import PLACEABLE, GroupRegistration, GroupReport, GroupState, GroupView
from nori_cluster.routing.queue import RequestKey

WAITING_STEPS = 2  # step budgets of waiting work a group holds; the rest waits in the router
WAITING_SEQUENCES = 512  # and so many sequences, well below the bound of an engine's queue


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: prompt + expected output of all candidates. prompt_tokens: of one candidate."""

    key: RequestKey
    group_id: str
    model: str
    tenant: str
    candidates: int
    prompt_tokens: int
    tokens: int

    @property
    def prefill_tokens(self) -> int:
        return self.candidates * self.prompt_tokens


class GroupEntry:
    """One group. Reservations up to max_running_sequences count as running, the rest as waiting, oldest first.

    A dead group keeps its reservations: it may be back (a broken Register stream), else its gateways say Finished.
    """

    def __init__(self, registration: GroupRegistration, state: GroupState, report: GroupReport) -> None:
        self.registration = registration
        self.reported_state = state
        self.report = report
        self.draining = False
        self.held_off = False  # it refused or broke a request: nothing goes there before its next report
        self.silent = False  # overdue with its report
        self.foreign_tokens = 0  # load this router did not place (a gateway placing on its own)
        self.running: dict[RequestKey, Reservation] = {}
        self.waiting: dict[RequestKey, Reservation] = {}
        self.running_sequences = 0
        self.waiting_sequences = 0
        self.waiting_tokens = 0
        self.reserved_tokens = 0
        self.prefill_since_report = 0

    @property
    def group_id(self) -> str:
        return self.registration.group_id

    @property
    def load(self) -> int:
        return self.reserved_tokens + self.foreign_tokens

    @property
    def state(self) -> GroupState:
        if self.silent and self.reported_state in PLACEABLE:
            return GroupState.STALLED
        if self.draining and self.reported_state in PLACEABLE:
            return GroupState.DRAINING
        return self.reported_state

    @property
    def placeable(self) -> bool:
        return self.reported_state in PLACEABLE and not self.draining and not self.silent

    def fits(self, prompt_tokens: int) -> bool:
        """May this group ever run it? (The engine's own rule: one token of output must have room.)"""
        facts = self.registration
        kv_tokens = facts.kv_blocks * facts.kv_block_tokens
        return prompt_tokens < facts.max_context_tokens and (not kv_tokens or prompt_tokens <= kv_tokens)

    def has_room(self, candidates: int, prompt_tokens: int) -> bool:
        """Two step budgets of waiting work beside max_running_sequences running; a longer prompt waits there alone."""
        if self.held_off:
            return False
        limit = WAITING_STEPS * self.registration.max_batched_tokens
        prefill = candidates * prompt_tokens
        backlog = self.report.waiting_tokens + self.prefill_since_report
        if self.report.waiting_sequences and backlog + prefill > limit:
            return False  # it may be short of KV blocks, not of slots: believe the group
        if not self.waiting:
            return True
        return self.waiting_tokens + prefill <= limit and self.waiting_sequences + candidates <= WAITING_SEQUENCES

    def reserve(self, reservation: Reservation) -> None:
        total = self.running_sequences + reservation.candidates
        if not self.waiting and (not self.running or total <= self.registration.max_running_sequences):
            self.running[reservation.key] = reservation
            self.running_sequences += reservation.candidates
        else:
            self.waiting[reservation.key] = reservation
            self.waiting_sequences += reservation.candidates
            self.waiting_tokens += reservation.prefill_tokens
        self.reserved_tokens += reservation.tokens
        self.prefill_since_report += reservation.prefill_tokens

    def release(self, key: RequestKey) -> None:
        reservation = self.running.pop(key, None)
        if reservation is not None:
            self.running_sequences -= reservation.candidates
        else:
            reservation = self.waiting.pop(key)
            self.waiting_sequences -= reservation.candidates
            self.waiting_tokens -= reservation.prefill_tokens
        self.reserved_tokens -= reservation.tokens
        self._promote()

    def _promote(self) -> None:
        limit = self.registration.max_running_sequences
        while self.waiting:
            oldest = next(iter(self.waiting.values()))
            if self.running and self.running_sequences + oldest.candidates > limit:
                return
            del self.waiting[oldest.key]
            self.waiting_sequences -= oldest.candidates
            self.waiting_tokens -= oldest.prefill_tokens
            self.running[oldest.key] = oldest
            self.running_sequences += oldest.candidates

    def view(self) -> GroupView:
        return GroupView(
            registration=self.registration, state=self.state, report=self.report, outstanding_tokens=self.load
        )

    def check(self) -> None:
        """Counts equal what is listed; waiting only behind a full run; the bound of waiting work holds."""
        held = [*self.running.values(), *self.waiting.values()]
        assert all(r.group_id == self.group_id for r in held), "a reservation lies in the wrong group"
        assert self.running_sequences == sum(r.candidates for r in self.running.values()), "running sequences leaked"
        assert self.waiting_sequences == sum(r.candidates for r in self.waiting.values()), "waiting sequences leaked"
        assert self.waiting_tokens == sum(r.prefill_tokens for r in self.waiting.values()), "waiting tokens leaked"
        assert self.reserved_tokens == sum(r.tokens for r in held), "outstanding tokens leaked"
        assert self.running or not self.waiting, "work waits in an idle group"


class RoutingTable:
    def __init__(self) -> None:
        self.groups: dict[str, GroupEntry] = {}
        self.models: dict[str, int] = {}  # every model ever registered → its largest context, tokens
        self.reservations: dict[RequestKey, Reservation] = {}
        self.epoch = 1
        self._placeable: dict[str, list[GroupEntry]] = {}  # by model, as of _placeable_epoch
        self._placeable_epoch = 0

    def register(self, registration: GroupRegistration, state: GroupState, report: GroupReport) -> bool:
        """A group appears, reconnects (equal incarnation: it keeps its reservations) or is reborn without them.

        True when an earlier incarnation was replaced.
        """
        old = self.groups.get(registration.group_id)
        reborn = old is not None and old.registration.incarnation != registration.incarnation
        if reborn:
            self._drop_reservations(registration.group_id)
        entry = GroupEntry(registration, state, report)
        if old is not None and not reborn:
            entry.draining = old.draining
        self.groups[registration.group_id] = entry
        for reservation in self.reservations.values():
            if reservation.group_id == registration.group_id:
                entry.reserve(reservation)
        entry.prefill_since_report = 0
        known = self.models.get(registration.model, 0)
        self.models[registration.model] = max(known, registration.max_context_tokens)
        self.epoch += 1
        return reborn

    def report(self, group_id: str, incarnation: int, state: GroupState, report: GroupReport) -> bool:
        """False when the report is of an incarnation that is not in the table."""
        entry = self.groups.get(group_id)
        if entry is None or entry.registration.incarnation != incarnation:
            return False
        if entry.reported_state != state or entry.silent:
            entry.reported_state, entry.silent = state, False
            self.epoch += 1
        entry.report = report
        entry.held_off = False
        entry.prefill_since_report = 0
        return True

    def silence(self, group_id: str, incarnation: int) -> bool:
        """False when that changes nothing."""
        entry = self.groups.get(group_id)
        if entry is None or entry.registration.incarnation != incarnation or entry.silent:
            return False
        entry.silent = True
        self.epoch += 1
        return True

    def lose(self, group_id: str, incarnation: int) -> bool:
        """The group is dead at once. False when this incarnation is not in the table (any more)."""
        entry = self.groups.get(group_id)
        if entry is None or entry.registration.incarnation != incarnation:
            return False
        entry.reported_state = GroupState.DEAD
        self.epoch += 1
        return True

    def forget(self, group_id: str) -> None:
        """Takes a dead group out of the table, with its reservations."""
        entry = self.groups.get(group_id)
        if entry is not None and entry.reported_state is GroupState.DEAD:
            self._drop_reservations(group_id)
            del self.groups[group_id]
            self.epoch += 1

    def set_draining(self, group_id: str, draining: bool) -> bool:
        entry = self.groups.get(group_id)
        if entry is None:
            return False
        if entry.draining != draining:
            entry.draining = draining
            self.epoch += 1
        return True

    def placeable(self, model: str) -> list[GroupEntry]:
        """Groups of the model that may take work now, full ones too, in the order of their ids."""
        if self._placeable_epoch != self.epoch:
            self._placeable, self._placeable_epoch = {}, self.epoch
        found = self._placeable.get(model)
        if found is None:
            found = [g for _, g in sorted(self.groups.items()) if g.registration.model == model and g.placeable]
            self._placeable[model] = found
        return found

    def reserve(self, reservation: Reservation) -> None:
        """Also for a group that has not (yet) registered: it is counted once it does."""
        assert reservation.key not in self.reservations
        self.reservations[reservation.key] = reservation
        entry = self.groups.get(reservation.group_id)
        if entry is not None:
            entry.reserve(reservation)

    def release(self, key: RequestKey) -> Reservation | None:
        """None when nothing is reserved under the key: its group was lost meanwhile."""
        reservation = self.reservations.pop(key, None)
        if reservation is not None:
            entry = self.groups.get(reservation.group_id)
            if entry is not None:
                entry.release(key)
        return reservation

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        return [key for key in self.reservations if key[0] == gateway_id]

    def views(self) -> list[GroupView]:
        return [entry.view() for _, entry in sorted(self.groups.items())]

    def check(self) -> None:
        """Every reservation is held by exactly the group it names, if that is known; counts of each group are right."""
        for model in self.models:
            fresh = [g for _, g in sorted(self.groups.items()) if g.registration.model == model and g.placeable]
            assert self.placeable(model) == fresh, "a change of state did not raise the epoch"
        held: list[RequestKey] = []
        for group_id, entry in self.groups.items():
            assert entry.group_id == group_id
            entry.check()
            held += [*entry.running, *entry.waiting]
        assert len(held) == len(set(held)), "a reservation is held twice"
        for key, reservation in self.reservations.items():
            owner = self.groups.get(reservation.group_id)
            if owner is not None:
                assert key in owner.running or key in owner.waiting, "a reservation is not counted in its group"
        assert set(held) <= self.reservations.keys(), "a group holds a reservation that was released"

    def _drop_reservations(self, group_id: str) -> None:
        for reservation in [r for r in self.reservations.values() if r.group_id == group_id]:
            self.release(reservation.key)

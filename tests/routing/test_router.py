"""Placement rules one by one, then a seeded random walk with check() after every event, and bugs it must catch."""

import random
from collections.abc import Callable

import msgspec
import pytest

from nori_cluster.config import SchedulerConfig
from nori_cluster.routing import POLICIES
from nori_cluster.routing.base import (
    PLACEABLE,
    Finished,
    GroupRegistration,
    GroupReport,
    GroupState,
    OpenRequest,
    Place,
    Placement,
    Refusal,
    RefusalReason,
)
from nori_cluster.routing.queue import WaitingQueue
from nori_cluster.routing.router import Router
from nori_cluster.routing.table import WAITING_SEQUENCES, WAITING_STEPS, GroupEntry, Reservation, RoutingTable

pytestmark = pytest.mark.unit
READY, IDLE = GroupState.READY, GroupReport()


def group(name: str, *, incarnation: int = 1, model: str = "m", context: int = 1000, slots: int = 2, budget: int = 100):
    return GroupRegistration(
        group_id=name,
        incarnation=incarnation,
        model=model,
        address=f"{name}:1",
        max_context_tokens=context,
        max_running_sequences=slots,
        max_batched_tokens=budget,
        kv_block_tokens=16,
        kv_blocks=1000,
    )


def router_with(*names: str, policy: str = "least_loaded", **options: int) -> Router:
    router = Router(POLICIES[policy], max_waiting=3)
    for name in names:
        router.register(group(name, **options), READY, IDLE, 0.0)
    return router


def ask(request: int, *, model: str = "m", prompt: int = 100, output: int = 10, **rest: object) -> Place:
    return Place(request=request, model=model, prompt_tokens=prompt, max_tokens=output, **rest)  # type: ignore[arg-type]


def decide(router: Router, place: Place, gateway: str = "gw", now: float = 0.0) -> Placement | Refusal | None:
    router.place(gateway, place, now)
    router.check()
    decisions = router.take()
    assert len(decisions) <= 1
    return decisions[0][1] if decisions else None


def test_least_loaded_counts_reservations_until_finished() -> None:
    router = router_with("a", "b", slots=8)
    first, second = decide(router, ask(1)), decide(router, ask(2))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert {first.group_id, second.group_id} == {"a", "b"}
    assert second.order_key > first.order_key
    router.finish("gw", Finished(1), 0.0)
    third = decide(router, ask(3))
    assert isinstance(third, Placement)
    assert third.group_id == first.group_id


def test_ties_go_to_a_stable_group_per_gateway_and_spread_over_gateways() -> None:
    chosen = {}
    for gateway in (f"gw{i}" for i in range(24)):
        picks = set()
        for _ in range(3):
            router = router_with("a", "b", "c")
            decision = decide(router, ask(1), gateway)
            assert isinstance(decision, Placement)
            picks.add(decision.group_id)
        assert len(picks) == 1
        chosen[gateway] = picks.pop()
    assert set(chosen.values()) == {"a", "b", "c"}


def test_under_load_a_gateway_keeps_to_a_subset_and_the_balance_holds() -> None:
    router = router_with(*"abcdefgh", slots=1000)
    rng = random.Random(3)
    placed: dict[int, str] = {}
    counts: dict[str, set[str]] = {f"gw{i}": set() for i in range(4)}
    for request in range(4000):
        gateway = f"gw{request % 4}"
        decision = decide_fast(router, ask(request, output=100), gateway)
        placed[request] = decision.group_id
        if request > 2000:
            counts[gateway].add(decision.group_id)
        if len(placed) > 800:
            done = rng.choice(list(placed))
            router.finish(f"gw{done % 4}", Finished(done), 0.0)
            del placed[done]
    loads = [view.outstanding_tokens for view in router.views()]
    assert max(loads) <= 1.25 * min(loads)


def decide_fast(router: Router, place: Place, gateway: str) -> Placement:
    router.place(gateway, place, 0.0)
    ((_, decision),) = router.take()
    assert isinstance(decision, Placement)
    return decision


def test_round_robin_takes_turns() -> None:
    router = router_with("a", "b", "c", policy="round_robin", slots=8)
    picks = [decide(router, ask(i)) for i in range(4)]
    assert [p.group_id for p in picks if isinstance(p, Placement)] == ["a", "b", "c", "a"]


def test_a_continuation_avoids_the_lost_group_and_prefers_equal_numerics() -> None:
    router = Router(POLICIES["least_loaded"], max_waiting=3)
    for name, numerics in (("a", "x"), ("b", "y"), ("c", "x")):
        facts = msgspec.structs.replace(group(name, slots=8), numerics_id=numerics)
        router.register(facts, READY, IDLE, 0.0)
    for number in range(3):
        decision = decide(router, ask(number, lost_group_id="a", numerics_id="x", attempt=1))
        assert isinstance(decision, Placement)
        assert decision.group_id == "c"
    decision = decide(router, ask(9, lost_group_id="a", numerics_id="z", attempt=1))
    assert isinstance(decision, Placement)
    assert decision.group_id == "b", "nobody is equal: the least loaded"


def test_what_was_said_goes_on_with_its_weights_only() -> None:
    """However loaded their group is; where none is ready the no says so; a reload keeps the reservations."""
    router = Router(POLICIES["least_loaded"], max_waiting=3)
    for name, weights in (("a", "w1"), ("b", "w2"), ("c", "w2")):
        router.register(msgspec.structs.replace(group(name, slots=8), weights_id=weights), READY, IDLE, 0.0)
    for number in range(4):
        decision = decide(router, ask(number, lost_group_id="b", weights_id="w1", attempt=1))
        assert isinstance(decision, Placement)
        assert decision.group_id == "a"
    router.register(msgspec.structs.replace(group("a", slots=8), weights_id="w2"), READY, IDLE, 1.0)
    assert len(router.table.groups["a"].running) == 4
    router.check()
    decision = decide(router, ask(8, lost_group_id="b", weights_id="w1", attempt=1))
    assert isinstance(decision, Refusal)
    assert decision.reason is RefusalReason.NO_GROUP
    assert "holds the weights that began this answer (w1)" in decision.message
    anywhere = decide(router, ask(9))
    assert isinstance(anywhere, Placement)
    assert anywhere.group_id in ("b", "c")


def test_expected_output_learns_and_is_bounded_by_max_tokens() -> None:
    router = router_with("a", slots=100)
    decide(router, ask(1, output=5))
    assert router.views()[0].outstanding_tokens == 105
    router.finish("gw", Finished(1, output_tokens=5), 0.0)
    decide(router, ask(2, output=1000))
    assert router.views()[0].outstanding_tokens == 105


def test_full_groups_make_a_place_wait_first_in_first_out() -> None:
    router = router_with("a")  # 2 slots, 2 x 100 tokens of waiting work
    assert all(isinstance(decide(router, ask(i)), Placement) for i in range(4))
    assert decide(router, ask(4), now=1.0) is None
    assert decide(router, ask(5), now=2.0) is None
    assert decide(router, ask(6, prompt=1), now=2.0) is None, "a small one must not overtake"
    router.finish("gw", Finished(0), 3.5)
    ((_, decision),) = router.take()
    assert isinstance(decision, Placement)
    assert (decision.request, decision.waited) == (4, 2.5)
    router.check()


def test_a_prompt_longer_than_the_bound_waits_alone_in_the_group() -> None:
    router = router_with("a")
    for i in range(2):
        decide(router, ask(i))
    assert isinstance(decide(router, ask(2, prompt=900)), Placement)
    assert decide(router, ask(3, prompt=1)) is None


def test_many_tiny_prompts_wait_here_and_not_in_the_group() -> None:
    router = Router(POLICIES["least_loaded"])
    router.register(group("a", slots=64, budget=10_000), READY, IDLE, 0.0)
    placed = [request for request in range(32) if decide(router, ask(request, prompt=1, candidates=128)) is not None]
    sequences = 128 * len(placed)
    assert 64 < sequences <= 128 + WAITING_SEQUENCES < SchedulerConfig().max_waiting_requests


def test_the_queue_is_bounded_and_a_full_one_does_not_stop_other_models() -> None:
    router = router_with("a", slots=1, budget=1)
    router.register(group("z", model="other"), READY, IDLE, 0.0)
    for i in range(2):
        assert isinstance(decide(router, ask(i)), Placement)
    assert [decide(router, ask(i)) for i in range(2, 5)] == [None] * 3
    refusal = decide(router, ask(5))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.QUEUE_FULL
    assert refusal.retry_after
    assert isinstance(decide(router, ask(6, model="other")), Placement)


def test_cancel_while_waiting_and_after_the_placement_crossed_it() -> None:
    router = router_with("a", slots=1, budget=1)
    for i in range(4):
        decide(router, ask(i))
    router.cancel("gw", 2, 0.0)
    router.cancel("gw", 0, 0.0)  # was placed: the reservation goes
    assert [d.request for _, d in router.take()] == [3]
    router.check()


def test_f56_a_deadline_that_passes_in_the_queue_refuses_and_never_places() -> None:
    router = router_with("a", slots=1, budget=1)
    for i in range(2):
        decide(router, ask(i))
    assert decide(router, ask(2, time_left=0.05)) is None
    router.tick(0.04)
    assert router.take() == []
    router.tick(0.06)
    ((_, refusal),) = router.take()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.DEADLINE_PASSED
    assert decide(router, ask(3, time_left=0.05), now=1.0) is None
    router.finish("gw", Finished(0), 2.0)  # before any tick: still not placed
    assert [type(d) for _, d in router.take()] == [Refusal]
    late = decide(router, ask(4, time_left=0.0), now=3.0)
    assert isinstance(late, Refusal)


@pytest.mark.parametrize("state", [s for s in GroupState if s not in PLACEABLE])
def test_f41_a_group_that_is_not_ready_gets_nothing(state: GroupState) -> None:
    router = router_with()
    router.register(group("a"), state, IDLE, 0.0)
    refusal = decide(router, ask(1))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.NO_GROUP
    assert refusal.retry_after
    router.report("a", 1, READY, IDLE, 0.0)
    assert isinstance(decide(router, ask(2)), Placement)


def test_reasons_of_refusal() -> None:
    router = router_with("a")
    for place, reason in (
        (ask(1, model="x"), RefusalReason.UNKNOWN_MODEL),
        (ask(2, prompt=1000), RefusalReason.TOO_LONG),
    ):
        refusal = decide(router, place)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.retry_after) == (reason, None)


def test_losing_the_last_ready_group_refuses_what_waits() -> None:
    router = router_with("a", slots=1, budget=1)
    for i in range(3):
        decide(router, ask(i))
    assert router.lose("a", 1, 0.0)
    ((_, refusal),) = router.take()
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.NO_GROUP
    assert not router.report("a", 2, READY, IDLE, 0.0), "a report of another incarnation revives nothing"


def test_drain_stops_placement_and_can_be_undone() -> None:
    router = router_with("a", "b", slots=8)
    router.set_draining("a", True, 0.0)
    assert {d.group_id for d in (decide(router, ask(i)) for i in range(4)) if isinstance(d, Placement)} == {"b"}
    assert [view.state for view in router.views()] == [GroupState.DRAINING, READY]
    router.report("a", 1, GroupState.BUSY, IDLE, 0.0)
    assert router.views()[0].state is GroupState.DRAINING
    router.set_draining("a", False, 0.0)
    assert isinstance(last := decide(router, ask(9)), Placement)
    assert last.group_id == "a"


def test_f41_a_failed_placement_holds_the_group_off_until_its_next_report() -> None:
    router = router_with("a", "b", slots=8)
    first = decide(router, ask(1))
    assert isinstance(first, Placement)
    router.finish("gw", Finished(1, failed=True), 0.0)
    other = {"a": "b", "b": "a"}[first.group_id]
    assert {d.group_id for d in (decide(router, ask(i)) for i in range(2, 6)) if isinstance(d, Placement)} == {other}
    router.report(first.group_id, 1, READY, IDLE, 0.0)
    again = decide(router, ask(7))
    assert isinstance(again, Placement)
    assert again.group_id == first.group_id


def test_f41_a_group_a_gateway_cannot_reach_is_not_chosen_for_it_alone() -> None:
    router = router_with("a", "b", slots=8)
    router.set_unreachable("gw", frozenset({"a"}), 0.0)
    assert {d.group_id for d in (decide(router, ask(i)) for i in range(4)) if isinstance(d, Placement)} == {"b"}
    picks = {d.group_id for d in (decide(router, ask(i), "gw2") for i in range(6)) if isinstance(d, Placement)}
    assert picks == {"a", "b"}
    router.set_unreachable("gw", frozenset({"a", "b"}), 0.0)
    assert isinstance(decide(router, ask(9)), Refusal)


def test_a_backlog_the_group_reports_makes_it_full_though_slots_are_free() -> None:
    router = router_with("a", slots=8)
    router.report("a", 1, GroupState.BUSY, GroupReport(waiting_sequences=2, waiting_tokens=150), 0.0)
    assert decide(router, ask(1)) is None
    router.report("a", 1, GroupState.BUSY, IDLE, 0.0)
    assert [d.request for _, d in router.take()] == [1]


def test_restart_counts_what_gateways_hold_and_waits_for_groups_to_settle() -> None:
    router = Router(POLICIES["least_loaded"], order_base=10_000, settle_until=3.0)
    router.hello("gw", [OpenRequest(5, "a", outstanding_tokens=500, prompt_tokens=400)], 0.0)
    assert decide(router, ask(6)) is None, "no group has registered yet"
    router.register(group("a"), READY, IDLE, 1.0)
    router.register(group("b"), READY, IDLE, 1.0)
    ((_, placement),) = router.take()
    assert isinstance(placement, Placement)
    assert placement.order_key > 10_000
    assert {v.group_id: v.outstanding_tokens for v in router.views()}["a"] >= 500
    decision = decide(router, ask(7))
    assert isinstance(decision, Placement)
    assert decision.group_id == "b"
    router.finish("gw", Finished(5), 2.0)
    router.finish("gw", Finished(6), 2.0)
    router.finish("gw", Finished(7), 2.0)
    assert not router.table.reservations
    assert decide(router, ask(8, model="x"), now=2.9) is None
    router.tick(3.1)
    assert isinstance(router.take()[0][1], Refusal)


def test_equal_incarnation_keeps_reservations_and_a_new_one_drops_them() -> None:
    router = router_with("a", slots=8)
    decide(router, ask(1))
    router.lose("a", 1, 0.0)
    router.register(group("a"), READY, IDLE, 0.0)
    assert router.views()[0].outstanding_tokens == 110
    router.register(group("a", incarnation=2), READY, IDLE, 0.0)
    router.check()
    assert router.views()[0].outstanding_tokens == 0
    router.finish("gw", Finished(1), 0.0)  # late, of the dead incarnation
    router.check()


# -- random walk ----------------------------------------------------------------------------------------------------


class Walk:
    """Random events; knows on its own what was asked and answered, and which groups may be chosen."""

    def __init__(self, seed: int, router: Router) -> None:
        self.rng = random.Random(seed)
        self.router = router
        self.now = 0.0
        self.requests = 0
        self.open: dict[tuple[str, int], Place] = {}  # asked, not answered
        self.deadlines: dict[tuple[str, int], float] = {}
        self.placed: dict[tuple[str, int], str] = {}
        self.alive: dict[str, tuple[int, GroupState]] = {}
        self.draining: set[str] = set()
        self.silent: set[str] = set()
        self.unreachable: dict[str, frozenset[str]] = {}
        self.asks = 0
        self.asked: dict[tuple[str, int], int] = {}  # in which order

    def run(self, steps: int) -> None:
        events: list[Callable[[], None]] = [
            self.place, self.place, self.place, self.finish, self.finish, self.cancel, self.register,
            self.report, self.silence, self.lose, self.drain, self.reach, self.pass_time, self.hello,
        ]  # fmt: skip
        for name in "abc":
            self.register(name)
        for _ in range(steps):
            self.rng.choice(events)()
            self.read()
            self.router.check()
            self.compare()

    def place(self) -> None:
        gateway, prompt = self.rng.choice(["g1", "g2"]), self.rng.choice([1, 20, 80, 150, 400, 1200])
        self.requests += 1
        time_left = self.rng.choice([None, None, 0.5, 3.0])
        place = ask(self.requests, prompt=prompt, candidates=self.rng.choice([1, 1, 1, 2, 5]), time_left=time_left)
        self.open[gateway, place.request] = place
        if time_left is not None:
            self.deadlines[gateway, place.request] = self.now + time_left
        self.ask(gateway, place)

    def ask(self, gateway: str, place: Place) -> None:
        self.asks += 1
        self.asked[gateway, place.request] = self.asks
        self.router.place(gateway, place, self.now)

    def finish(self) -> None:
        if self.placed:
            key = self.rng.choice(sorted(self.placed))
            del self.placed[key]
            self.router.finish(key[0], Finished(key[1], output_tokens=3, failed=self.rng.random() < 0.1), self.now)

    def cancel(self) -> None:
        keys = sorted({**self.open, **self.placed})
        if keys:
            key = self.rng.choice(keys)
            self.open.pop(key, None)
            self.placed.pop(key, None)
            self.router.cancel(*key, self.now)

    def register(self, name: str = "") -> None:
        name = name or self.rng.choice("abcd")
        incarnation, _ = self.alive.get(name, (0, READY))
        incarnation += self.rng.choice([0, 1]) if incarnation else 1
        if incarnation != self.alive.get(name, (0, READY))[0]:
            self.placed = {key: where for key, where in self.placed.items() if where != name}
            self.draining.discard(name)
        self.alive[name] = (incarnation, READY)
        self.silent.discard(name)
        self.router.register(group(name, incarnation=incarnation), READY, IDLE, self.now)

    def report(self) -> None:
        name = self.rng.choice(sorted(self.alive))
        incarnation, state = self.alive[name]
        if state is GroupState.DEAD:
            return
        state = self.rng.choice([READY, READY, GroupState.BUSY, GroupState.STALLED])
        self.alive[name] = (incarnation, state)
        self.silent.discard(name)
        waiting = self.rng.choice([0, 0, 0, 2])
        report = GroupReport(waiting_sequences=waiting, waiting_tokens=60 * waiting)
        assert self.router.report(name, incarnation, state, report, self.now)
        assert not self.router.report(name, incarnation + 7, READY, report, self.now)

    def silence(self) -> None:
        name = self.rng.choice(sorted(self.alive))
        if self.rng.random() < 0.3:
            self.router.silence(name, self.alive[name][0] + 7, self.now)  # of another life: changes nothing
            self.router.silence(name, self.alive[name][0], self.now)
            self.silent.add(name)

    def lose(self) -> None:
        name = self.rng.choice(sorted(self.alive))
        incarnation, state = self.alive[name]
        if state is not GroupState.DEAD and self.rng.random() < 0.5:
            self.alive[name] = (incarnation, GroupState.DEAD)
            self.router.lose(name, incarnation, self.now)

    def drain(self) -> None:
        name = self.rng.choice(sorted(self.alive))
        on = self.rng.random() < 0.4
        (self.draining.add if on else self.draining.discard)(name)
        self.router.set_draining(name, on, self.now)

    def reach(self) -> None:
        gateway = self.rng.choice(["g1", "g2"])
        self.unreachable[gateway] = frozenset(self.rng.sample("abcd", self.rng.choice([0, 0, 1])))
        self.router.set_unreachable(gateway, self.unreachable[gateway], self.now)

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.1, 1.0])
        self.router.tick(self.now)

    def hello(self) -> None:
        if self.rng.random() < 0.2:
            gateway = self.rng.choice(["g1", "g2"])
            held = [OpenRequest(k[1], g, "", 50, 20) for k, g in sorted(self.placed.items()) if k[0] == gateway]
            self.router.hello(gateway, held, self.now)
            again = [place for key, place in sorted(self.open.items()) if key[0] == gateway]
            for place in again:
                self.ask(gateway, place)

    def read(self) -> None:
        placed = []
        for gateway, decision in self.router.take():
            key = (gateway, decision.request)
            place = self.open.pop(key, None)
            assert place is not None, "answered twice, or after a cancel"
            if isinstance(decision, Refusal):
                continue
            name = decision.group_id
            assert self.alive[name][1] in PLACEABLE, "placed on a group that is not ready"
            assert name not in self.draining, "placed on a draining group"
            assert name not in self.silent, "placed on a group that is overdue with its report"
            assert name not in self.unreachable.get(gateway, ()), "placed where the gateway cannot go"
            assert place.prompt_tokens < 1000, "placed where it can never fit"
            assert self.deadlines.get(key, self.now + 1) > self.now, "placed after its deadline"
            self.placed[key] = name
            placed.append((key, name))
        for key, name in placed:
            for other in self.open:
                may_go_there = name not in self.unreachable.get(other[0], ()) and self.open[other].prompt_tokens < 1000
                assert not (may_go_there and self.asked[other] < self.asked[key]), "an older one was overtaken"

    def compare(self) -> None:
        assert {k: r.group_id for k, r in self.router.table.reservations.items()} == self.placed, "reservations drifted"
        waiting = {w.key for model in self.router.queue.models() for w in self.router.queue.of_model(model)}
        assert waiting == set(self.open), "an unanswered place does not wait"


def fresh(policy: str = "least_loaded") -> Router:
    return Router(POLICIES[policy], max_waiting=6)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(30))
def test_random_walk(policy: str, seed: int) -> None:
    Walk(seed, fresh(policy)).run(250)


def leak_on_finish(patch: pytest.MonkeyPatch) -> None:
    release = GroupEntry.release

    def bad(self: GroupEntry, key: tuple[str, int]) -> None:
        before = self.running_sequences
        release(self, key)
        self.running_sequences = before

    patch.setattr(GroupEntry, "release", bad)


def draining_is_chosen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupEntry, "placeable", property(lambda self: self.reported_state in PLACEABLE and not self.silent))


def silent_is_chosen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        GroupEntry, "placeable", property(lambda self: self.reported_state in PLACEABLE and not self.draining)
    )


def dead_is_chosen(patch: pytest.MonkeyPatch) -> None:
    alive = PLACEABLE | {GroupState.DEAD}
    patch.setattr(
        GroupEntry,
        "placeable",
        property(lambda self: self.reported_state in alive and not self.draining and not self.silent),
    )


def cancel_forgets_a_placed_one(patch: pytest.MonkeyPatch) -> None:
    def bad(self: Router, gateway_id: str, request: int, now: float) -> None:
        self.queue.remove((gateway_id, request))
        self._pump_all(now)

    patch.setattr(Router, "cancel", bad)


def lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    def bad(self: Router, key: tuple[str, int], now: float) -> None:
        self.table.release(key)

    patch.setattr(Router, "_release", bad)


def reborn_group_keeps_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutingTable, "_drop_reservations", lambda self, group_id: None)


def expired_stays_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "expired", lambda self, now: [])
    patch.setattr(Router, "_refuse_late", lambda self, waiting: None)


def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    of_model = WaitingQueue.of_model
    patch.setattr(WaitingQueue, "of_model", lambda self, model: reversed(list(of_model(self, model))))
    patch.setattr(WaitingQueue, "check", lambda self: None)


def reserved_in_two_groups(patch: pytest.MonkeyPatch) -> None:
    reserve = RoutingTable.reserve

    def bad(self: RoutingTable, reservation: Reservation) -> None:
        reserve(self, reservation)
        for other in self.groups.values():
            if other.group_id != reservation.group_id:
                other.reserve(reservation)

    patch.setattr(RoutingTable, "reserve", bad)


@pytest.mark.parametrize(
    "bug",
    [
        leak_on_finish, draining_is_chosen, silent_is_chosen, dead_is_chosen, cancel_forgets_a_placed_one, lost_wake_up,
        reborn_group_keeps_reservations, expired_stays_in_the_queue, last_in_first_out, reserved_in_two_groups,
    ],
)  # fmt: skip
def test_planted_bugs_make_the_walk_fail(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        with pytest.raises((AssertionError, KeyError)):
            for seed in range(30):
                Walk(seed, fresh()).run(250)


def test_the_walk_itself_keeps_groups_within_their_bound() -> None:
    """No more than two step budgets wait in a group, except one long prompt alone."""
    for seed in range(10):
        router = Router(POLICIES["least_loaded"], max_waiting=50)
        router.register(group("a"), READY, IDLE, 0.0)
        rng = random.Random(seed)
        placed: list[int] = []
        for request in range(300):
            router.place("gw", ask(request, prompt=rng.choice([1, 50, 150, 500])), 0.0)
            placed += [d.request for _, d in router.take() if isinstance(d, Placement)]
            entry = router.table.groups["a"]
            assert len(entry.waiting) <= 1 or entry.waiting_tokens <= WAITING_STEPS * 100
            assert entry.running_sequences <= 2
            if placed and rng.random() < 0.6:
                router.finish("gw", Finished(placed.pop(rng.randrange(len(placed)))), 0.0)
                placed += [d.request for _, d in router.take() if isinstance(d, Placement)]


def test_age_outweighs_priority_after_the_aging_time() -> None:
    """A better priority goes first; a worse one that waited longer than its levels cost goes before it."""
    router = Router(POLICIES["least_loaded"], priority_aging=10.0)
    router.register(group("a", slots=1, budget=1), READY, IDLE, 0.0)
    assert isinstance(decide(router, ask(1)), Placement)
    while isinstance(decide(router, ask(90 + len(router.table.reservations), prompt=1)), Placement):
        pass  # fill the group's waiting room
    for key in router.queue.of_gateway("gw"):
        router.cancel("gw", key[1], 0.0)
    for request, priority, now in ((2, 0, 1.0), (3, 1, 2.0), (4, -1, 3.0), (5, 1, 3.5), (6, 0, 12.5)):
        assert decide(router, ask(request, priority=priority), now=now) is None
    keys = [waiting.key[1] for waiting in router.queue.of_model("m")]
    assert keys == [4, 2, 3, 6, 5]  # 3 came 10.5 s before 6: more than its level costs; 5 only 9 s before


def test_the_queue_is_bounded_in_tokens_too_and_says_that_it_is_full() -> None:
    router = Router(POLICIES["least_loaded"], max_waiting=100, max_waiting_tokens=250)
    router.register(group("a", slots=1, budget=1), READY, IDLE, 0.0)
    request = 1
    while isinstance(decide(router, ask(request)), Placement):
        request += 1
    assert not router.queue.full
    assert decide(router, ask(500)) is None
    refusal = decide(router, ask(501))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.QUEUE_FULL
    assert decide(router, ask(502, prompt=50)) is None
    assert router.queue.tokens == 250
    assert router.queue.full
    router.cancel("gw", 500, 1.0)
    assert not router.queue.full

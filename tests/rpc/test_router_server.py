"""Router server and registrar at the protocol's corners: bad first messages, takeover, threads, other loops."""

import asyncio
import pickle
import threading
from typing import Any

import grpc
import pytest
from fakes.cluster import ROUTER_TIMES, until
from fakes.group import FakeGroup

from nori_cluster.routing.base import GroupState
from nori_cluster.rpc import convert
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as pb
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.router_server import RouterServer

pytestmark = pytest.mark.contract


class Started:
    """async with Started() as (router, stub)"""

    async def __aenter__(self) -> tuple[RouterServer, Any]:
        self.router = RouterServer(times=ROUTER_TIMES)
        self.port = await self.router.start("127.0.0.1", 0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return self.router, pb_grpc.RouterServiceStub(self.channel)

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.router.stop()


def hello(gateway: str = "gw", **rest: Any) -> pb.CoordinateRequest:
    return pb.CoordinateRequest(hello=pb.Hello(gateway_id=gateway), **rest)


def place(request: int, **rest: Any) -> pb.Place:
    return pb.Place(request=request, model="m", prompt_tokens=10, max_tokens=5, candidates=1, **rest)


def registered(group: FakeGroup, state: GroupState = GroupState.READY) -> pb.RegisterRequest:
    return pb.RegisterRequest(registration=convert.registration_to_pb(group.registration()), state=int(state))  # type: ignore[arg-type]


def fake(name: str = "g1", incarnation: int = 1) -> FakeGroup:
    group = FakeGroup(name)
    group.address, group.incarnation = "127.0.0.1:1", incarnation
    return group


async def table_of(call: Any) -> pb.Table:
    """The next table."""
    while True:
        message = await asyncio.wait_for(call.read(), 2.0)
        if message.HasField("table"):
            return message.table


@pytest.mark.parametrize("first", [pb.CoordinateRequest(), pb.CoordinateRequest(hello=pb.Hello())])
async def test_hello_must_come_first(first: pb.CoordinateRequest) -> None:
    async with Started() as (_, stub):
        call = stub.Coordinate()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError, match="Hello"):
            await call.read()


async def test_a_request_id_in_use_ends_the_stream() -> None:
    async with Started() as (_, stub):
        register = stub.Register()
        await register.write(registered(fake()))
        await register.read()
        call = stub.Coordinate()
        await call.write(hello(places=[place(1)]))
        await table_of(call)
        await call.write(pb.CoordinateRequest(places=[place(1)]))
        with pytest.raises(grpc.aio.AioRpcError, match="request 1 is open already"):
            await table_of(call)


@pytest.mark.parametrize("missing", ["group_id", "model", "address", "max_context_tokens", "max_running_sequences"])
async def test_a_registration_must_be_complete(missing: str) -> None:
    async with Started() as (router, stub):
        request = registered(fake())
        request.registration.ClearField(missing)  # type: ignore[arg-type]
        call = stub.Register()
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError, match=missing):
            await call.read()
        assert not router.snapshot().groups


async def test_answers_merge_and_a_place_and_its_cancel_in_one_message_leave_nothing() -> None:
    async with Started() as (router, stub):
        register = stub.Register()
        await register.write(registered(fake()))
        assert (await register.read()).epoch
        call = stub.Coordinate()
        await call.write(hello(places=[place(i) for i in range(20)], cancels=[3, 4]))
        message = await call.read()
        assert message.HasField("table")
        assert message.table.gateways == 1
        placed = [p.request for p in message.placements]
        assert set(placed) >= set(range(20)) - {3, 4}
        keys = [p.order_key for p in message.placements]
        assert keys == sorted(keys)
        snapshot = router.snapshot()
        assert snapshot.groups[0].reserved_requests == 18
        assert snapshot.gateways[0].open_requests == 18
        assert pickle.loads(pickle.dumps(snapshot)) == snapshot
        call.cancel()
        await until(lambda: not router.snapshot().gateways[0].connected)
        await until(lambda: router.snapshot().groups[0].reserved_requests == 0)  # after gateway_grace


async def test_states_are_told_at_once_and_loads_at_most_every_so_often() -> None:
    async with Started() as (_, stub):
        call = stub.Coordinate()
        await call.write(hello())
        assert not (await table_of(call)).groups
        register = stub.Register()
        await register.write(registered(fake(), GroupState.LOADING))
        assert (await table_of(call)).groups[0].state == pb.GROUP_STATE_LOADING
        epochs = []
        for _ in range(30):
            await register.write(pb.RegisterRequest(state=pb.GROUP_STATE_LOADING, report={"step": len(epochs)}))
            await asyncio.sleep(0.01)
        await register.write(pb.RegisterRequest(state=pb.GROUP_STATE_READY))
        while True:
            table = await table_of(call)
            epochs.append(table.epoch)
            if table.groups[0].state == pb.GROUP_STATE_READY:
                break
        assert len(epochs) <= 6, "0.3 s of reports make about three tables of loads"
        register.cancel()
        assert (await table_of(call)).groups[0].state == pb.GROUP_STATE_DEAD


async def test_a_newer_registration_of_the_same_group_displaces_the_older_one() -> None:
    async with Started() as (router, _):
        first, second = fake(incarnation=1), fake(incarnation=2)
        port = router.port
        first.register(f"127.0.0.1:{port}")
        await until(lambda: first.registrar is not None and first.registrar.registered)
        second.register(f"127.0.0.1:{port}")
        await until(lambda: first.registrar is not None and first.registrar.displaced)
        await asyncio.sleep(0.3)
        (group,) = router.snapshot().groups
        assert group.view.registration.incarnation == 2
        assert group.view.state is GroupState.READY
        for one in (first, second):
            assert one.registrar is not None
            await one.registrar.close()


async def test_the_registrar_reconnects_and_reports_changes_at_once_from_any_thread() -> None:
    async with Started() as (router, _):
        group = fake()
        group.register(f"127.0.0.1:{router.port}")
        registrar = group.registrar
        assert registrar is not None
        await until(lambda: registrar.registered)
        registrar._interval = 30.0
        await asyncio.sleep(0.15)
        group.state = GroupState.STALLED
        thread = threading.Thread(target=registrar.changed)
        thread.start()
        await until(lambda: router.snapshot().groups[0].view.state is GroupState.STALLED, 0.4)
        thread.join()
        await until(lambda: router.snapshot().groups[0].view.state is GroupState.DEAD, 1.0)  # silent for too long
        await until(lambda: router.snapshot().groups[0].view.state is GroupState.STALLED, 2.0)  # and back
        await registrar.close()
        await until(lambda: router.snapshot().groups[0].view.state is GroupState.DEAD, 1.0)


def test_a_router_runs_on_a_loop_of_another_thread() -> None:
    """As in a Ray async actor."""
    ports: list[int] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        router = RouterServer(times=ROUTER_TIMES)
        ports.append(await router.start("127.0.0.1", 0))
        ready.set()
        await asyncio.to_thread(done.wait)
        await router.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(5)
    with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        replies = pb_grpc.RouterServiceStub(channel).Register(iter([registered(fake())]))
        assert next(iter(replies)).epoch
    done.set()
    thread.join(5)
    assert not thread.is_alive()

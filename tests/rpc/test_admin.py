"""The admin plane over a real socket: the typed client against a fake backend."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import pytest

from nori_cluster.errors import ClientError, ConfigError, NotFound, Overloaded, Unimplemented, UnsupportedParameter
from nori_cluster.routing.base import GroupState
from nori_cluster.rpc import admin, status
from nori_cluster.rpc.admin_types import (
    ClusterStatus,
    EventInfo,
    GatewayInfo,
    GroupInfo,
    LoadInfo,
    ModelInfo,
    OperationInfo,
    WorkerInfo,
)
from nori_cluster.rpc.generated.nori.admin.v1 import admin_service_pb2 as pb
from nori_cluster.rpc.generated.nori.admin.v1 import admin_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.contract
T = TypeVar("T")
LOAD = LoadInfo(running_sequences=2, waiting_sequences=1, generated_tokens=99, total_kv_blocks=8, free_kv_blocks=6)


class FakeAdmin:
    def __init__(self) -> None:
        worker = WorkerInfo(rank=0, host="h", device="cpu", pid=7, heartbeat=123.5)
        self.groups = [
            GroupInfo(
                name=f"g{i}",
                model="m",
                state=GroupState.READY,
                address="h:1",
                engine_pid=5,
                step=9,
                workers=(worker,),
                load=LOAD,
                last_failure="rank 1 died",
                created=1.25,
                facts={"weights": "float32", "flags": "{}"},
            )
            for i in (2, 0, 1)
        ]
        self.operations: dict[str, OperationInfo] = {}
        self.drained: list[tuple[str, float | None]] = []
        self.resumed: list[str] = []
        self.events = [
            EventInfo(sequence=4, time=1.5, kind="lost", group="g0", incarnation=2, message="rank 1 is gone"),
            EventInfo(sequence=5, time=2.5, kind="starting", group="g0", incarnation=3),
        ]

    async def get_status(self) -> ClusterStatus:
        model = ModelInfo(model="m", desired_groups=3, ready_groups=2, load=LOAD)
        return ClusterStatus(models=(model,), gateways=(GatewayInfo(gateway_id="gw", open_requests=4),), version="1")

    async def list_groups(self) -> Sequence[GroupInfo]:
        return self.groups

    async def drain(self, group: str, grace: float | None) -> OperationInfo:
        if group not in {g.name for g in self.groups}:
            raise NotFound(f"no worker group {group!r}", param="name")
        self.drained.append((group, grace))
        name = f"op{len(self.operations)}"
        self.operations[name] = OperationInfo(name=name, method="DrainWorkerGroup", created=1.5)
        asyncio.get_running_loop().call_later(0.2, self.finish, name)
        return self.operations[name]

    def finish(self, name: str) -> None:
        self.operations[name] = OperationInfo(
            name=name, method="DrainWorkerGroup", done=True, progress_percent=100, created=1.5, ended=2.5
        )

    async def get_operation(self, name: str) -> OperationInfo | None:
        return self.operations.get(name)

    async def resume(self, group: str) -> GroupInfo:
        found = [info for info in self.groups if info.name == group]
        if not found:
            raise NotFound(f"no worker group {group!r}", param="name")
        self.resumed.append(group)
        return found[0]

    def past_events(self, after: int) -> Sequence[EventInfo]:
        return [event for event in self.events if event.sequence > after]

    async def follow_events(self, after: int) -> AsyncIterator[EventInfo]:
        for event in self.past_events(after):
            yield event
        await asyncio.sleep(0.1)
        yield EventInfo(sequence=9, time=3.0, kind="ready", group="g0", incarnation=3)
        await asyncio.sleep(3600)


class Plane:
    def __init__(self, backend: FakeAdmin, port: int) -> None:
        self.backend = backend
        self.port = port

    async def call(self, function: Callable[[admin.AdminClient], T]) -> T:
        """The client blocks, so it runs in a thread."""

        def run() -> T:
            with admin.AdminClient(f"127.0.0.1:{self.port}") as client:
                return function(client)

        return await asyncio.to_thread(run)


@asynccontextmanager
async def plane() -> AsyncIterator[Plane]:
    backend = FakeAdmin()
    server = await admin.serve(backend, "127.0.0.1", 0)
    yield Plane(backend, server.port)
    await server.stop()


async def test_what_goes_in_comes_out() -> None:
    async with plane() as p:
        assert await p.call(lambda c: c.get_status()) == await p.backend.get_status()
        assert await p.call(lambda c: c.get_group("g2")) == p.backend.groups[0]
        assert (await p.call(lambda c: c.get_group("g2"))).load.kv_cache_usage == 0.25


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100])
async def test_groups_come_page_by_page_in_order(size: int) -> None:
    async with plane() as p:
        assert [g.name for g in await p.call(lambda c: list(c.list_groups(size)))] == ["g0", "g1", "g2"]


async def test_a_page_ends_where_it_says() -> None:
    async with plane() as p, grpc.aio.insecure_channel(f"127.0.0.1:{p.port}") as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        first = await stub.ListWorkerGroups(pb.ListWorkerGroupsRequest(page_size=2))
        assert [g.name for g in first.worker_groups] == ["workerGroups/g0", "workerGroups/g1"]
        del p.backend.groups[:]
        token = first.next_page_token
        assert not (await stub.ListWorkerGroups(pb.ListWorkerGroupsRequest(page_token=token))).worker_groups
        for bad in ({"page_size": -1}, {"page_token": "!"}, {"filter": "x"}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListWorkerGroups(pb.ListWorkerGroupsRequest(**bad))  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_drain_is_an_operation_one_can_wait_for() -> None:
    async with plane() as p:
        operation = await p.call(lambda c: c.drain("g1", 2.5, request_id="abc"))
        assert not operation.done
        again = await p.call(lambda c: c.drain("g1", 2.5, request_id="abc"))
        assert again.name == operation.name
        assert p.backend.drained == [("g1", 2.5)]
        assert not (await p.call(lambda c: c.wait_operation(operation.name, 0.01))).done
        ended = await p.call(lambda c: c.wait_operation(operation.name, 5.0))
        assert (ended.done, ended.progress_percent, ended.ended) == (True, 100, 2.5)
        assert await p.call(lambda c: c.get_operation(operation.name)) == ended
        assert not (await p.call(lambda c: c.drain("g2"))).done
        assert p.backend.drained[-1] == ("g2", None)
        with pytest.raises(ClientError, match="another request"):
            await p.call(lambda c: c.drain("g2", request_id="abc"))


async def test_errors_arrive_as_what_they_were() -> None:
    async with plane() as p:
        for call in (
            lambda c: c.get_group("x"),
            lambda c: c.drain("x"),
            lambda c: c.get_operation("x"),
            lambda c: c.wait_operation("x", 1.0),
        ):
            with pytest.raises(NotFound):
                await p.call(call)
        with pytest.raises(ConfigError, match="in use"):
            await admin.serve(p.backend, "127.0.0.1", p.port)
    with pytest.raises(Overloaded):
        await p.call(lambda c: c.get_status())


async def test_resume_and_events() -> None:
    async with plane() as there:
        assert (await there.call(lambda client: client.resume("g1"))).name == "g1"
        assert there.backend.resumed == ["g1"]
        with pytest.raises(NotFound):
            await there.call(lambda client: client.resume("nobody"))
        assert await there.call(lambda client: list(client.events())) == there.backend.events
        assert [e.sequence for e in await there.call(lambda client: list(client.events(after=4)))] == [5]

        def three(client: admin.AdminClient) -> list[int]:
            stream = client.events(follow=True)
            return [next(stream).sequence for _ in range(3)]

        assert await there.call(three) == [4, 5, 9]


async def test_planned_calls_say_so() -> None:
    async with plane() as p, grpc.aio.insecure_channel(f"127.0.0.1:{p.port}") as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        unary = ("LoadAdapter", "UnloadAdapter", "ListAdapters")
        for name in (*unary, "GetRoutingPolicy", "UpdateRoutingPolicy", "CancelOperation"):
            with pytest.raises(grpc.aio.AioRpcError, match=f"{name} is planned") as caught:
                await getattr(stub, name)(getattr(pb, f"{name}Request")())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="workerGroups/"):
            await stub.GetWorkerGroup(pb.GetWorkerGroupRequest(name="g1"))
        with pytest.raises(grpc.aio.AioRpcError, match="must not be negative"):
            request = pb.DrainWorkerGroupRequest(name="workerGroups/g1")
            request.grace_period.FromSeconds(-5)
            await stub.DrainWorkerGroup(request)
        assert not p.backend.drained


@pytest.mark.parametrize(
    "error",
    [
        NotFound("n", param="name"),
        Overloaded("o", retry_after=1.5),
        UnsupportedParameter("u", param="a.b"),
        Unimplemented("x"),
        ConfigError("c"),
    ],
)
def test_status_round_trip(error: Exception) -> None:
    assert isinstance(error, status.NoriError)
    packed = status.details_of(error).SerializeToString()
    back = status.error_of(grpc.StatusCode[error.grpc_code], error.message, [(status.DETAILS_KEY, packed)])
    assert (type(back), back.message, back.retry_after) == (type(error), error.message, error.retry_after)
    assert back.param == error.param
    guess = status.error_of(grpc.StatusCode[error.grpc_code], "m", [(status.DETAILS_KEY, b"\xff\xff")])
    assert guess.grpc_code == error.grpc_code or isinstance(guess, ClientError)

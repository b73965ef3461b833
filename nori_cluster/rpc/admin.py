"""The admin plane: AdminServicer over an AdminBackend, its server, and the typed blocking client of the CLI."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection

from nori_cluster.config import InFlightPolicy
from nori_cluster.errors import ClientError, ConfigError, NoriError, NotFound, Unimplemented, UnsupportedParameter
from nori_cluster.rpc import convert, status
from nori_cluster.rpc import convert_admin as shapes
from nori_cluster.rpc.admin_types import AdminBackend, ClusterStatus, EventInfo, GroupInfo, OperationInfo
from nori_cluster.rpc.generated.nori.admin.v1 import admin_service_pb2 as pb
from nori_cluster.rpc.generated.nori.admin.v1 import admin_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import Context
from nori_cluster.rpc.options import client_options, server_options
from nori_cluster.rpc.paging import page

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
POLL_SECONDS = 0.1
WAIT_SECONDS = 60.0  # of WaitOperation without a timeout
CALL_SECONDS = 10.0  # of a client's call
REMEMBERED_REQUESTS = 1024
LONGEST_GRACE = 1e9  # seconds; a Duration holds more, nobody waits so long
R = TypeVar("R")
Method: TypeAlias = Callable[["AdminServicer", Any, Context], Awaitable[R]]


def _answered(method: Method[R]) -> Method[R]:
    """Turn a NoriError into a status."""

    @functools.wraps(method)
    async def wrapped(self: "AdminServicer", request: Any, context: Context) -> R:
        try:
            return await method(self, request, context)
        except NoriError as error:
            await status.abort(context, error)

    return wrapped


def _planned(name: str) -> Method[Any]:
    async def refuse(self: "AdminServicer", request: Any, context: Context) -> None:
        await status.abort(context, Unimplemented(f"{name} is planned, but not supported yet"))

    return refuse


def _grace(request: Any) -> float | None:
    """Seconds of a request's grace_period; None where it has none. ClientError for a negative one."""
    if not request.HasField("grace_period"):
        return None
    grace = convert.seconds(request.grace_period)
    if grace < 0:
        raise ClientError("grace_period must not be negative", param="grace_period")
    return grace


def _grace_to_pb(grace: float | None) -> Duration | None:
    """ConfigError for one that is negative, endless or beyond LONGEST_GRACE."""
    if grace is None:
        return None
    if not 0.0 <= grace <= LONGEST_GRACE:
        raise ConfigError(f"the grace must lie between 0 and {LONGEST_GRACE:.0f} seconds, not {grace:g}")
    return convert.duration(grace)


def _uint32(value: int, param: str) -> int:
    """ConfigError for a number that the wire does not hold."""
    if not 0 <= value < 1 << 32:
        raise ConfigError(f"{param} must lie between 0 and {(1 << 32) - 1}, not {value}", param=param)
    return value


class AdminServicer(pb_grpc.AdminServiceServicer):
    """A call with a request_id seen before returns the operation that the first one started (AIP-155)."""

    def __init__(self, backend: AdminBackend) -> None:
        self._backend = backend
        self._started: OrderedDict[str, tuple[Message, str]] = OrderedDict()  # request_id → request, operation

    @_answered
    async def GetClusterStatus(
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        return shapes.status_to_pb(await self._backend.get_status())

    @_answered
    async def ListWorkerGroups(
        self, request: pb.ListWorkerGroupsRequest, context: Context
    ) -> pb.ListWorkerGroupsResponse:
        if request.filter:
            raise UnsupportedParameter("filter is planned, but not supported yet", param="filter")
        groups = {group.name: group for group in await self._backend.list_groups()}
        names, token = page(sorted(groups), request.page_size, request.page_token)
        return pb.ListWorkerGroupsResponse(
            worker_groups=[shapes.group_to_pb(groups[name]) for name in names], next_page_token=token
        )

    @_answered
    async def GetWorkerGroup(self, request: pb.GetWorkerGroupRequest, context: Context) -> pb.GetWorkerGroupResponse:
        name = shapes.bare(request.name, shapes.GROUPS)
        for group in await self._backend.list_groups():
            if group.name == name:
                return pb.GetWorkerGroupResponse(worker_group=shapes.group_to_pb(group))
        raise NotFound(f"no worker group {name!r}", param="name")

    @_answered
    async def DrainWorkerGroup(
        self, request: pb.DrainWorkerGroupRequest, context: Context
    ) -> pb.DrainWorkerGroupResponse:
        name = shapes.bare(request.name, shapes.GROUPS)
        if request.etag:
            raise UnsupportedParameter("etag is planned, but not supported yet", param="etag")
        grace = _grace(request)
        operation = await self._once(request, lambda: self._backend.drain(name, grace))
        return pb.DrainWorkerGroupResponse(operation=shapes.operation_to_pb(operation))

    @_answered
    async def ScaleModel(self, request: pb.ScaleModelRequest, context: Context) -> pb.ScaleModelResponse:
        operation = await self._once(
            request, lambda: self._backend.scale(request.model, request.group_count, request.validate_only)
        )
        return pb.ScaleModelResponse(operation=shapes.operation_to_pb(operation))

    @_answered
    async def RestartModel(self, request: pb.RestartModelRequest, context: Context) -> pb.RestartModelResponse:
        grace = _grace(request)
        operation = await self._once(
            request, lambda: self._backend.restart(request.model, request.max_unavailable or 1, grace)
        )
        return pb.RestartModelResponse(operation=shapes.operation_to_pb(operation))

    @_answered
    async def ReloadWeights(self, request: pb.ReloadWeightsRequest, context: Context) -> pb.ReloadWeightsResponse:
        policy = shapes.POLICIES.get(int(request.in_flight_policy))
        if policy is None:
            raise ClientError(f"unknown in_flight_policy {request.in_flight_policy}", param="in_flight_policy")
        grace = _grace(request)
        operation = await self._once(
            request,
            lambda: self._backend.reload(
                request.model, request.uri, request.weight_version, policy, request.max_unavailable or 1, grace
            ),
        )
        return pb.ReloadWeightsResponse(operation=shapes.operation_to_pb(operation))

    async def _once(self, request: Any, start: Callable[[], Awaitable[OperationInfo]]) -> OperationInfo:
        """What `start` gives, or what the same request with the same request_id started before."""
        earlier = self._started.get(request.request_id)
        if earlier is not None:
            if earlier[0] != request:
                raise ClientError("request_id was used for another request", param="request_id")
            known = await self._backend.get_operation(earlier[1])
            if known is not None:
                return known
        operation = await start()
        if request.request_id:
            kept = type(request)()
            kept.CopyFrom(request)
            self._started[request.request_id] = kept, operation.name
            if len(self._started) > REMEMBERED_REQUESTS:
                self._started.popitem(last=False)
        return operation

    @_answered
    async def GetOperation(self, request: pb.GetOperationRequest, context: Context) -> pb.GetOperationResponse:
        return pb.GetOperationResponse(operation=shapes.operation_to_pb(await self._operation(request.name)))

    @_answered
    async def WaitOperation(self, request: pb.WaitOperationRequest, context: Context) -> pb.WaitOperationResponse:
        """The operation as it stands when it is done or the timeout passes."""
        timeout = convert.seconds(request.timeout) if request.HasField("timeout") else WAIT_SECONDS
        end = asyncio.get_running_loop().time() + timeout
        while True:
            operation = await self._operation(request.name)
            if operation.done or asyncio.get_running_loop().time() >= end:
                return pb.WaitOperationResponse(operation=shapes.operation_to_pb(operation))
            await asyncio.sleep(POLL_SECONDS)

    async def _operation(self, resource: str) -> OperationInfo:
        name = shapes.bare(resource, shapes.OPERATIONS)
        operation = await self._backend.get_operation(name)
        if operation is None:
            raise NotFound(f"no operation {name!r}", param="name")
        return operation

    @_answered
    async def ResumeWorkerGroup(
        self, request: pb.ResumeWorkerGroupRequest, context: Context
    ) -> pb.ResumeWorkerGroupResponse:
        group = await self._backend.resume(shapes.bare(request.name, shapes.GROUPS))
        return pb.ResumeWorkerGroupResponse(worker_group=shapes.group_to_pb(group))

    async def StreamClusterEvents(
        self, request: pb.StreamClusterEventsRequest, context: Context
    ) -> AsyncIterator[pb.StreamClusterEventsResponse]:
        if request.past_only:
            for event in self._backend.past_events(request.after_sequence):
                yield shapes.event_to_pb(event)
            return
        async for event in self._backend.follow_events(request.after_sequence):
            yield shapes.event_to_pb(event)

    LoadAdapter = _planned("LoadAdapter")
    UnloadAdapter = _planned("UnloadAdapter")
    ListAdapters = _planned("ListAdapters")
    GetRoutingPolicy = _planned("GetRoutingPolicy")
    UpdateRoutingPolicy = _planned("UpdateRoutingPolicy")
    CancelOperation = _planned("CancelOperation")


class AdminServer:
    """A running server. port: the bound one."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self.port = port
        self._server = server

    async def stop(self, grace: float = 0.0) -> None:
        await self._server.stop(grace)


async def serve(backend: AdminBackend, host: str, port: int) -> AdminServer:
    """Bind and serve; port 0 lets the system choose. Raises ConfigError when the port is taken."""
    server = grpc.aio.server(options=server_options())
    pb_grpc.add_AdminServiceServicer_to_server(AdminServicer(backend), server)
    reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        await server.stop(None)
        raise ConfigError(f"cannot listen on {host}:{port} for the admin service: address already in use") from error
    await server.start()
    return AdminServer(server, int(bound))


class AdminClient:
    """Blocking calls, structs out; failures are the NoriErrors the server raised. A context manager."""

    def __init__(self, address: str, *, timeout: float = CALL_SECONDS) -> None:
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=client_options())
        self._stub = pb_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def get_status(self) -> ClusterStatus:
        return shapes.status_from_pb(self._call(self._stub.GetClusterStatus, pb.GetClusterStatusRequest()))

    def list_groups(self, page_size: int = 0) -> Iterator[GroupInfo]:
        """All groups in the order of their names, page by page."""
        request = pb.ListWorkerGroupsRequest(page_size=page_size)
        while True:
            reply = self._call(self._stub.ListWorkerGroups, request)
            yield from (shapes.group_from_pb(group) for group in reply.worker_groups)
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    def get_group(self, name: str) -> GroupInfo:
        request = pb.GetWorkerGroupRequest(name=shapes.GROUPS + name)
        return shapes.group_from_pb(self._call(self._stub.GetWorkerGroup, request).worker_group)

    def drain(self, group: str, grace: float | None = None, request_id: str = "") -> OperationInfo:
        """Starts a drain. grace: seconds for what runs."""
        request = pb.DrainWorkerGroupRequest(
            name=shapes.GROUPS + group,
            grace_period=_grace_to_pb(grace),
            request_id=request_id,
        )
        return shapes.operation_from_pb(self._call(self._stub.DrainWorkerGroup, request).operation)

    def scale(self, model: str, count: int, validate_only: bool = False, request_id: str = "") -> OperationInfo:
        """Starts it. validate_only: only says whether it could be asked for."""
        request = pb.ScaleModelRequest(
            model=model,
            group_count=_uint32(count, "group_count"),
            validate_only=validate_only,
            request_id=request_id,
        )
        return shapes.operation_from_pb(self._call(self._stub.ScaleModel, request).operation)

    def restart(
        self, model: str, max_unavailable: int = 1, grace: float | None = None, request_id: str = ""
    ) -> OperationInfo:
        """Starts a restart of every group of the model, one after another. grace: seconds for what runs."""
        request = pb.RestartModelRequest(
            model=model,
            max_unavailable=_uint32(max_unavailable, "max_unavailable"),
            grace_period=_grace_to_pb(grace),
            request_id=request_id,
        )
        return shapes.operation_from_pb(self._call(self._stub.RestartModel, request).operation)

    def reload(
        self,
        model: str,
        folder: str,
        *,
        version: str = "",
        policy: InFlightPolicy = "wait",
        max_unavailable: int = 1,
        grace: float | None = None,
        request_id: str = "",
    ) -> OperationInfo:
        """Starts to replace the weights of every group by those of a folder. grace: seconds for what runs."""
        request = pb.ReloadWeightsRequest(
            model=model,
            uri=folder,
            weight_version=version,
            in_flight_policy=f"IN_FLIGHT_POLICY_{policy.upper()}",
            max_unavailable=_uint32(max_unavailable, "max_unavailable"),
            grace_period=_grace_to_pb(grace),
            request_id=request_id,
        )
        return shapes.operation_from_pb(self._call(self._stub.ReloadWeights, request).operation)

    def resume(self, group: str) -> GroupInfo:
        """Undo a drain, or start a group again that was given up."""
        request = pb.ResumeWorkerGroupRequest(name=shapes.GROUPS + group)
        return shapes.group_from_pb(self._call(self._stub.ResumeWorkerGroup, request).worker_group)

    def events(self, after: int = 0, follow: bool = False) -> Iterator[EventInfo]:
        """What happened to groups, oldest first; follow: does not end, new events come as they happen."""
        request = pb.StreamClusterEventsRequest(after_sequence=after, past_only=not follow)
        try:
            for reply in self._stub.StreamClusterEvents(request, timeout=None if follow else self._timeout):
                yield shapes.event_from_pb(reply)
        except grpc.RpcError as error:
            raise status.error_of(error.code(), error.details() or "", error.trailing_metadata()) from error

    def get_operation(self, name: str) -> OperationInfo:
        request = pb.GetOperationRequest(name=shapes.OPERATIONS + name)
        return shapes.operation_from_pb(self._call(self._stub.GetOperation, request).operation)

    def wait_operation(self, name: str, timeout: float) -> OperationInfo:
        """As it stands when it is done, or after `timeout` seconds."""
        request = pb.WaitOperationRequest(name=shapes.OPERATIONS + name, timeout=convert.duration(timeout))
        reply = self._call(self._stub.WaitOperation, request, timeout + self._timeout)
        return shapes.operation_from_pb(reply.operation)

    def _call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout or self._timeout)
        except grpc.RpcError as error:
            raise status.error_of(error.code(), error.details() or "", error.trailing_metadata()) from error

"""F54: pings of a client that waits for long do not get it cut off. Options are checked by behaviour, not by name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2 as pb
from nori_cluster.rpc.generated.nori.router.v1 import router_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.options import MIN_PING_INTERVAL_SECONDS, Options, client_options, server_options
from nori_cluster.rpc.router_client import KEEPALIVE

pytestmark = pytest.mark.contract

SILENCE = 5.2  # seconds of a silent call: five pings; F54's 40 s with pings every 10 s, made shorter
PINGING: Options = [  # gRPC never pings more often than once a second, whatever is asked of it
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Slow(pb_grpc.RouterServiceServicer):
    async def Register(self, requests: Any, context: Any) -> None:
        await asyncio.sleep(SILENCE)
        await context.write(pb.RegisterResponse(epoch=1))


class Echo(pb_grpc.RouterServiceServicer):
    """Answers with the length of the model's name."""

    async def Register(self, requests: Any, context: Any) -> None:
        request = await context.read()
        await context.write(pb.RegisterResponse(epoch=len(request.registration.model)))


@asynccontextmanager
async def serving(options: Options, servicer: pb_grpc.RouterServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server(options=options)
    pb_grpc.add_RouterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(address: str, options: Options, idle: float = 0.0, model: str = "") -> int:
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        await asyncio.sleep(idle)
        call: Any = pb_grpc.RouterServiceStub(channel).Register()
        await call.write(pb.RegisterRequest(registration={"model": model}))
        return int((await call.read()).epoch)


async def test_f54_a_pinging_client_outlasts_a_long_silence_and_a_long_idle_time() -> None:
    tolerant = server_options(min_ping_interval=0.5)
    async with serving(tolerant, Slow()) as slow, serving(tolerant, Echo()) as echo:
        answers = await asyncio.gather(ask(slow, PINGING), ask(echo, PINGING, idle=SILENCE, model="abc"))
        assert answers == [1, 3]


async def test_f54_the_option_is_what_makes_the_difference() -> None:
    """The same client is cut off by a server that only has the default of five minutes, so gRPC knows the name; and
    a client that pings too often for our limit does not touch a calm one."""
    async with serving([], Slow()) as default, serving(server_options(min_ping_interval=10.0), Slow()) as strict:
        calls = (ask(default, PINGING), ask(strict, PINGING), ask(strict, client_options()))
        cut, flood, calm = await asyncio.gather(*calls, return_exceptions=True)
        for error in (cut, flood):
            assert isinstance(error, grpc.aio.AioRpcError)
            assert "too many pings" in str(error.details()).lower()
        assert calm == 1


def test_f54_clients_that_ping_every_ten_seconds_and_our_own_are_within_the_servers_limit() -> None:
    own = dict(client_options())["grpc.keepalive_time_ms"] / 1000
    assert min(10.0, own, KEEPALIVE) > MIN_PING_INTERVAL_SECONDS


async def test_messages_far_above_grpcs_own_4_mib_pass() -> None:
    async with serving(server_options(), Echo()) as address:
        assert await ask(address, client_options(), model="x" * (32 << 20)) == 32 << 20

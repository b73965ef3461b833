"""The public gRPC API over real sockets and FakeBackend: answers, errors with details, cancels, health, reflection."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import grpc
import pytest
from fakes.backend import FakeBackend, Script
from fakes.text import ABC, EOS, HELLO, WORLD, ids_of, served_model
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from nori_cluster.errors import (
    ClientError,
    ContextLengthExceeded,
    Draining,
    EngineFailure,
    GatewayFull,
    ModelNotFound,
    NoriError,
    Overloaded,
    UnsupportedParameter,
)
from nori_cluster.frontend.gate import GateLimits
from nori_cluster.frontend.service import Service
from nori_cluster.rpc import public, status
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as common
from nori_cluster.rpc.generated.nori.common.v1.sampling_pb2 import SamplingParams
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2_grpc as pb_grpc
from nori_cluster.types import Constraint

pytestmark = pytest.mark.contract


class Client:
    def __init__(self, channel: grpc.aio.Channel, service: Service, backend: FakeBackend, port: int) -> None:
        self.stub = pb_grpc.InferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.channel = channel
        self.service = service
        self.backend = backend
        self.port = port
        self.server: public.PublicServer

    async def error(self, call: Any) -> NoriError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
        error = caught.value
        return status.error_of(error.code(), error.details() or "", error.trailing_metadata())


@asynccontextmanager
async def serving(backend: FakeBackend | None = None, api_key: str | None = None) -> AsyncIterator[Client]:
    backend = backend or FakeBackend(Script(tokens=[HELLO, WORLD, EOS]))
    service = Service(backend, {"smol": served_model()})
    server = await public.serve(service, "127.0.0.1", 0, api_key=api_key)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        client = Client(channel, service, backend, server.port)
        client.server = server
        try:
            yield client
        finally:
            await server.stop()


def task(**fields: Any) -> pb.GenerationTask:
    return pb.GenerationTask(**{"model": "smol", "text": "hi", **fields})


async def test_generate_text() -> None:
    async with serving() as client:
        reply = await client.stub.Generate(pb.GenerateRequest(task=task(request_id="mine", output={"token_ids": True})))
        assert reply.request_id == "mine"
        assert reply.model == "smol"
        (candidate,) = reply.candidates
        assert candidate.text == "hello world"
        assert candidate.finish_reason == common.FINISH_REASON_STOP
        assert not candidate.HasField("matched_stop")
        assert list(candidate.token_ids) == [HELLO, WORLD, EOS]
        assert list(reply.prompt_token_ids) == ids_of("hi")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 3)


async def test_generate_from_tokens_conversation_and_with_candidates() -> None:
    async with serving() as client:
        tokens = pb.GenerationTask(model="models/smol", tokens={"ids": [70, 71]}, sampling={"candidate_count": 3})
        reply = await client.stub.Generate(pb.GenerateRequest(task=tokens))
        assert [c.index for c in reply.candidates] == [0, 1, 2]
        message = pb.Message(role=pb.ROLE_USER, parts=[pb.ContentPart(text="he"), pb.ContentPart(text="y")])
        chat = pb.GenerationTask(conversation={"messages": [message]})  # the only model needs no name
        assert (await client.stub.Generate(pb.GenerateRequest(task=chat))).candidates[0].text == "hello world"
        prompt = served_model().tokenizer.decode(client.backend.requests[-1].prompt_token_ids, skip_special=False)
        assert prompt == "<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n"


async def test_stream_order_and_stop_string() -> None:
    async with serving(FakeBackend(Script(tokens=[HELLO, ABC, WORLD, EOS]))) as client:
        request = pb.StreamGenerateRequest(task=task(sampling={"stop_strings": ["BC"]}))
        events = [event async for event in client.stub.StreamGenerate(request)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-2:] == ["finished", "completed"]
        assert set(kinds[1:-2]) == {"delta"}
        assert "".join(event.delta.text for event in events) == "helloA"
        assert events[-2].finished.matched_stop.text == "BC"
        assert events[0].started.prompt_tokens == 2
        assert events[-1].completed.usage.completion_tokens == 2
        assert events[-1].completed.HasField("time_to_first_token")
        assert len({event.request_id for event in events}) == 1


async def test_stop_token_id_and_logprobs() -> None:
    async with serving() as client:
        request = pb.GenerateRequest(task=task(sampling={"stop_token_ids": [WORLD]}, output={"top_logprobs": 1}))
        (candidate,) = (await client.stub.Generate(request)).candidates
        assert candidate.matched_stop.token_id == WORLD
        assert len(candidate.logprobs.logprobs) == 2
        assert len(candidate.logprobs.top) == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": SamplingParams(min_p=1.1)}, "task.sampling.min_p"),
        ({"sampling": SamplingParams(allowed_token_ids=[1 << 31])}, "task.sampling.allowed_token_ids"),
        ({"sampling": SamplingParams(bad_words=[""])}, "task.sampling.bad_words"),
        ({"sampling": SamplingParams(repetition_penalty=0)}, "task.sampling.repetition_penalty"),
        ({"sampling": SamplingParams(presence_penalty=3)}, "task.sampling.presence_penalty"),
        ({"sampling": SamplingParams(frequency_penalty=-3)}, "task.sampling.frequency_penalty"),
        ({"sampling": SamplingParams(min_tokens=5, max_tokens=4)}, "task.sampling.min_tokens"),
        ({"sampling": SamplingParams(logit_bias={1: 101})}, "task.sampling.logit_bias"),
        ({"sampling": SamplingParams(reasoning_token_budget=1)}, "task.sampling.reasoning_token_budget"),
        ({"sampling": SamplingParams(constraint={})}, "task.sampling.constraint"),
        ({"sampling": SamplingParams(extra={"x": 1})}, "task.sampling.extra"),
        ({"sampling": SamplingParams(temperature=-1)}, "task.sampling.temperature"),
        ({"sampling": SamplingParams(candidate_count=0)}, "task.sampling.candidate_count"),
        ({"sampling": SamplingParams(max_tokens=0)}, "task.sampling.max_tokens"),
        ({"sampling": SamplingParams(stop_strings=[""])}, "task.sampling.stop_strings"),
        ({"tool_config": {"functions": [{"name": "f"}]}}, "task.tool_config"),
        ({"output": {"prompt_logprobs": 21}}, "task.output.prompt_logprobs"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"priority": 5000}, "priority"),
        ({"request_id": "x" * 129}, "task.request_id"),
        ({"text": ""}, "task.prompt"),
        ({"conversation": {}}, "task.conversation.messages"),
        ({"conversation": {"messages": [{}]}}, "task.conversation.messages[0].role"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    async with serving() as client:
        if "conversation" in fields:
            fields = {**fields, "text": None}
        error = await client.error(client.stub.Generate(pb.GenerateRequest(task=task(**fields))))
        assert error.param == field
        assert error.http_status == 400


async def test_neutral_values_of_planned_fields_are_accepted() -> None:
    neutral = SamplingParams(min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, min_tokens=0)
    async with serving() as client:
        await client.stub.Generate(pb.GenerateRequest(task=task(sampling=neutral)))


async def test_controls_reach_the_backend() -> None:
    controls = {"min_p": 0.5, "repetition_penalty": 2.0, "presence_penalty": 1.0, "min_tokens": 2}
    async with serving() as client:
        wanted = SamplingParams(**controls, allowed_token_ids=[7, 8], bad_words=["ab"])
        await client.stub.Generate(pb.GenerateRequest(task=task(sampling=wanted)))
        sampling = client.backend.requests[0].sampling
        assert {name: getattr(sampling, name) for name in controls} == controls
        assert sampling.allowed_token_ids == (7, 8)
        assert sampling.bad_word_ids == (tuple(ids_of("ab")), tuple(ids_of(" ab")))


async def test_constraints_are_checked_and_sent() -> None:
    async with serving() as client:
        good = SamplingParams(constraint={"choices": {"values": ["hello", "b"]}})
        await client.stub.Generate(pb.GenerateRequest(task=task(sampling=good)))
        assert client.backend.requests[0].sampling.constraint == Constraint("choice", '["hello","b"]')
        for bad in (SamplingParams(constraint={"regex": "["}), SamplingParams(constraint={"json_schema": "{"})):
            error = await client.error(client.stub.Generate(pb.GenerateRequest(task=task(sampling=bad))))
            assert (error.param, error.http_status) == ("task.sampling.constraint", 400)
        assert len(client.backend.requests) == 1
        client.service.close()


async def test_prompt_logprobs_echo_and_drafts() -> None:
    async with serving(FakeBackend(Script(tokens=[HELLO, EOS], drafts=(2, 5)))) as client:
        asked = task(output={"prompt_logprobs": 1, "echo_prompt": True}, sampling={"candidate_count": 2})
        reply = await client.stub.Generate(pb.GenerateRequest(task=asked))
        assert [candidate.text for candidate in reply.candidates] == ["hihello"] * 2
        assert len(reply.prompt_logprobs.logprobs) == 1
        assert list(reply.prompt_logprobs.top[0].token_ids) == ids_of("i")
        assert (reply.usage.accepted_draft_tokens, reply.usage.proposed_draft_tokens) == (4, 10)
        error = await client.error(client.stub.StreamGenerate(pb.StreamGenerateRequest(task=asked)))
        assert error.param == "task.output.prompt_logprobs"
        echoed = task(output={"echo_prompt": True}, text=None, tokens={"ids": ids_of("yo")})
        events = [event async for event in client.stub.StreamGenerate(pb.StreamGenerateRequest(task=echoed))]
        assert "".join(event.delta.text for event in events) == "yohello"
        assert events[-1].completed.usage.proposed_draft_tokens == 5
        scored = task(output={"prompt_logprobs": 0}, sampling={"max_tokens": 0})
        reply = await client.stub.Generate(pb.GenerateRequest(task=scored))
        assert (reply.candidates[0].text, reply.usage.completion_tokens) == ("", 0)
        assert reply.candidates[0].finish_reason == common.FINISH_REASON_LENGTH


async def test_errors_carry_code_reason_field_and_retry_delay() -> None:
    async with serving() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Generate(pb.GenerateRequest(task=task(model="nope")))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        error = await client.error(client.stub.Generate(pb.GenerateRequest(task=task(model="nope"))))
        assert type(error) is ModelNotFound
        assert error.param == "task.model"
        long = pb.GenerateRequest(task=task(tokens={"ids": [5] * 100_000}, text=None))
        assert type(await client.error(client.stub.Generate(long))) is ContextLengthExceeded
        planned = pb.GenerateRequest(task=task(tool_config={"functions": [{"name": "f"}]}))
        assert type(await client.error(client.stub.Generate(planned))) is UnsupportedParameter
        client.service.drain()
        error = await client.error(client.stub.Generate(pb.GenerateRequest(task=task())))
        assert type(error) is Draining
        assert error.retry_after == 1.0  # another gateway may take it at once


async def test_refusals_and_failures_end_the_call_with_their_status() -> None:
    refusal = FakeBackend(Script(refusal=Overloaded("full", retry_after=3.5)))
    async with serving(refusal) as client:
        for call in (
            client.stub.Generate(pb.GenerateRequest(task=task())),
            client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task())),
        ):
            error = await client.error(call)
            assert (type(error), error.retry_after) == (Overloaded, 3.5)
    fault = FakeBackend(Script(tokens=[HELLO] * 9, fault=EngineFailure("group lost"), fault_after=3))
    async with serving(fault) as client:
        texts, call = [], client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                texts.append(event.delta.text)
        assert "".join(texts) == "hello" * 3
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_embed_and_score_are_unimplemented() -> None:
    async with serving() as client:
        for call in (client.stub.Embed(pb.EmbedRequest()), client.stub.Score(pb.ScoreRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match="planned") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- F56: cancels and deadlines -------------------------------------------------------------------------------------


def endless(step: float = 0.005, **rest: Any) -> FakeBackend:
    return FakeBackend(Script(tokens=repeat(HELLO), step=step, **rest))


async def gone(client: Client) -> None:
    async with asyncio.timeout(1.0):
        while client.backend.open or client.service.running:
            await asyncio.sleep(0.005)


async def test_f56_deadline_on_a_streaming_call() -> None:
    async with serving(endless()) as client:
        error_code = None
        try:
            async for _ in client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task()), timeout=0.2):
                pass
        except grpc.aio.AioRpcError as error:
            error_code = error.code()
        assert error_code is grpc.StatusCode.DEADLINE_EXCEEDED
        await gone(client)
        time_left = client.backend.requests[0].time_left
        assert time_left is not None
        assert 0 < time_left <= 0.25


async def test_f56_client_cancels_after_two_tokens_and_before_the_first() -> None:
    async with serving(endless()) as client:
        call = client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task()))
        for _ in range(3):
            await call.read()
        call.cancel()
        await gone(client)
    async with serving(endless(accept_after=5.0)) as client:
        calls = [
            client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task())),
            client.stub.Generate(pb.GenerateRequest(task=task())),
        ]
        readers = [asyncio.ensure_future(calls[0].read()), asyncio.ensure_future(calls[1])]
        while len(client.backend.requests) < 2:
            await asyncio.sleep(0.005)
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await gone(client)


async def test_f56_channel_closed_with_ten_open_streams() -> None:
    async with serving(endless()) as client:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{client.port}")
        stub = pb_grpc.InferenceServiceStub(channel)
        calls = [stub.StreamGenerate(pb.StreamGenerateRequest(task=task())) for _ in range(10)]
        for call in calls:
            await call.read()
        await channel.close()
        await gone(client)


async def test_f56_cancel_and_finish_at_the_same_moment(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeBackend(Script(tokens=[HELLO, EOS], step=0.001))) as client:
        for round_ in range(100):
            call = client.stub.StreamGenerate(pb.StreamGenerateRequest(task=task()))
            await asyncio.sleep(round_ % 10 * 0.0005)
            call.cancel()
        await gone(client)
        assert (await client.stub.Generate(pb.GenerateRequest(task=task()))).candidates[0].text == "hello"
    assert not [record for record in caplog.records if record.name.startswith("nori_cluster")]


# -- the rest -------------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize() -> None:
    async with serving() as client:
        reply = await client.stub.Tokenize(pb.TokenizeRequest(model="smol", text="hi", include_pieces=True))
        assert list(reply.token_ids) == ids_of("hi")
        assert list(reply.pieces) == ["h", "i"]
        assert reply.max_context_tokens > 0
        message = pb.Message(role=pb.ROLE_USER, parts=[pb.ContentPart(text="x")])
        chat = await client.stub.Tokenize(pb.TokenizeRequest(conversation={"messages": [message]}))
        text = await client.stub.Detokenize(
            pb.DetokenizeRequest(model="smol", token_ids=chat.token_ids, skip_special_tokens=False)
        )
        assert text.text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        skipped = await client.stub.Detokenize(pb.DetokenizeRequest(model="smol", token_ids=chat.token_ids))
        assert "<|im_start|>" not in skipped.text
        error = await client.error(client.stub.Detokenize(pb.DetokenizeRequest(token_ids=[100_000])))
        assert error.param == "token_ids"
        assert (await client.error(client.stub.Tokenize(pb.TokenizeRequest()))).param == "input"


async def test_models_are_listed_by_page() -> None:
    backend = FakeBackend(Script())
    service = Service(backend, {name: served_model(name) for name in ("a", "b", "c")})
    server = await public.serve(service, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        names, token = [], ""
        for size in (1, 2, 1):
            page = await stub.ListModels(pb.ListModelsRequest(page_size=size, page_token=token))
            names += [model.name for model in page.models]
            token = page.next_page_token
            if not token:
                break
        assert names == ["models/a", "models/b", "models/c"]
        for bad in (pb.ListModelsRequest(page_size=-1), pb.ListModelsRequest(page_token="é")):
            with pytest.raises(grpc.aio.AioRpcError, match="page_"):
                await stub.ListModels(bad)
        assert (await stub.GetModel(pb.GetModelRequest(name="models/b"))).model.display_name == "b"
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
            await stub.GetModel(pb.GetModelRequest(name="models/x"))
    await server.stop()


async def test_api_key_guards_every_call_but_health() -> None:
    async with serving(api_key="secret") as client:
        request = pb.GenerateRequest(task=task())
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stub.Generate(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await client.stub.Generate(request, metadata=(("authorization", "bearer secret"),))
        await client.health.Check(health_pb2.HealthCheckRequest())


async def test_health_follows_readiness_and_watch_sees_it() -> None:
    async with serving() as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service=public.SERVICE_NAME))
        serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == serving_
        assert (await client.health.Check(health_pb2.HealthCheckRequest())).status == serving_
        client.service.drain()
        async with asyncio.timeout(1.0):
            assert (await watch.read()).status == not_serving
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_each_model_has_a_health_of_its_own() -> None:
    """F45: one that no group serves does not hide that another is served."""
    backend = FakeBackend(Script(tokens=[HELLO, EOS]))
    service = Service(backend, {"smol": served_model(), "stuck": served_model("stuck")})
    server = await public.serve(service, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        states = {
            name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
            for name in ("", "models/smol", "models/stuck")
        }
        reply = await pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(task=task()))
        assert reply.candidates
        with pytest.raises(grpc.aio.AioRpcError, match="stuck") as caught:
            await pb_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(task=task(model="stuck")))
    await server.stop()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert states == {
        "": health_pb2.HealthCheckResponse.NOT_SERVING,
        "models/smol": health_pb2.HealthCheckResponse.SERVING,
        "models/stuck": health_pb2.HealthCheckResponse.NOT_SERVING,
    }


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "Tokenize"])
async def test_bytes_that_are_no_protobuf_are_refused_with_one_log_line(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving() as client:
        path = f"/{public.SERVICE_NAME}/{method}"
        caplog.clear()
        if method == "StreamGenerate":
            call: Any = client.channel.unary_stream(path)(b"\xff\xff garbage")
        else:
            call = client.channel.unary_unary(path)(b"\xff\xff garbage")
        error = await client.error(call)
        assert type(error) is ClientError
        (record,) = caplog.records
        assert record.exc_info is None
        assert path in record.getMessage()
        assert not client.backend.requests
        assert (await client.stub.Generate(pb.GenerateRequest(task=task()))).candidates


async def test_a_gateway_that_holds_its_bound_refuses_with_a_retry_delay() -> None:
    async with serving(FakeBackend(Script(tokens=[*[HELLO] * 20, EOS], step=0.01))) as client:
        client.service.gate.limits = GateLimits(calls=1)
        running = asyncio.ensure_future(client.stub.Generate(pb.GenerateRequest(task=task())))
        while not client.backend.requests:
            await asyncio.sleep(0.005)
        error = await client.error(client.stub.Generate(pb.GenerateRequest(task=task())))
        assert type(error) is GatewayFull
        assert error.retry_after is not None
        assert error.retry_after >= 1.0
        assert (await running).candidates
        assert client.service.metrics.refused == {"gateway_full": 1}
        assert (client.service.gate.calls, client.service.gate.held_bytes) == (0, 0)


async def test_reflection_describes_the_service() -> None:
    async with serving() as client:

        def read() -> tuple[Any, Any]:
            with grpc.insecure_channel(f"127.0.0.1:{client.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                service = DescriptorPool(database).FindServiceByName(public.SERVICE_NAME)
                return database.get_services(), [method.name for method in service.methods]

        services, methods = await asyncio.to_thread(read)
        assert public.SERVICE_NAME in services
        assert "StreamGenerate" in methods


async def test_stop_lets_running_calls_end_within_the_grace() -> None:
    async with serving(FakeBackend(Script(tokens=[HELLO] * 20, step=0.01))) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        call = asyncio.ensure_future(client.stub.Generate(pb.GenerateRequest(task=task(sampling={"max_tokens": 20}))))
        while not client.backend.requests:
            await asyncio.sleep(0.005)
        start = time.monotonic()
        stopping = asyncio.create_task(client.server.stop(grace=5.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await call).candidates[0].finish_reason == common.FINISH_REASON_LENGTH
        await stopping
        assert time.monotonic() - start < 2.0, "an open health watch must not hold up the stop"
        watch.cancel()

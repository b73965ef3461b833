"""The public gRPC API of a gateway: InferenceService over frontend.Service, health and reflection.

A cancelled call or a passed deadline closes its Generation; every NoriError becomes a status with google.rpc details.
"""

import asyncio
import functools
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nori_cluster.errors import ClientError, ConfigError, NoriError, Unauthenticated
from nori_cluster.frontend.generation import Generation
from nori_cluster.frontend.service import GenerationCall, ServedModel, Service
from nori_cluster.rpc import convert, status
from nori_cluster.rpc import convert_inference as shapes
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.grpc_types import Context
from nori_cluster.rpc.malformed import RefuseMalformed
from nori_cluster.rpc.options import server_options
from nori_cluster.rpc.paging import page
from nori_cluster.rpc.tasks import background

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
HEALTH_SECONDS = 0.1  # between looks at readiness
Health = health_pb2.HealthCheckResponse
R = TypeVar("R")
Method: TypeAlias = Callable[["InferenceServicer", Any, Context], Awaitable[R]]


def _answered(method: Method[R]) -> Method[R]:
    """Authorize, count, hold room for the request, and turn a NoriError into a status."""

    @functools.wraps(method)
    async def wrapped(self: "InferenceServicer", request: Any, context: Context) -> R:
        try:
            self.authorize(context)
            self.enter()
            try:
                with self.gate.hold(size := request.ByteSize()) as held:
                    held.add(size)
                    return await method(self, request, context)
            finally:
                self.leave()
        except NoriError as error:
            self.metrics.refuse(error)
            await status.abort(context, shapes.with_field(error))

    return wrapped


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """One per gateway. api_key: bearer token that every call must carry; None = open."""

    def __init__(self, service: Service, api_key: str | None = None) -> None:
        self._service = service
        self._key_digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self.gate, self.metrics = service.gate, service.metrics
        self._active = 0
        self.idle = asyncio.Event()
        self.idle.set()

    # -- generation -------------------------------------------------------------------------------------------------

    @_answered
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        task = request.task
        generation, name = await self._generate(task, context, streamed=False)
        try:
            candidates = await generation.result()
        finally:
            generation.close()
        echo = self._echo(task, generation)
        logprobs = generation.prompt_logprobs.get(0)
        return pb.GenerateResponse(
            request_id=name,
            model=generation.model,
            create_time=Timestamp(seconds=generation.created),
            candidates=[shapes.candidate_to_pb(delta, task.output.token_ids, echo) for delta in candidates],
            usage=shapes.usage_to_pb(generation.usage),
            prompt_token_ids=generation.prompts[0] if task.output.token_ids else (),
            prompt_logprobs=None if logprobs is None else convert.logprobs_to_pb(logprobs),
        )

    @_answered
    async def StreamGenerate(self, request: pb.StreamGenerateRequest, context: Context) -> None:
        task = request.task
        with_ids = task.output.token_ids
        generation, name = await self._generate(task, context, streamed=True)
        echo = self._echo(task, generation)
        try:
            await generation.admitted()
            started = pb.GenerationStarted(
                model=generation.model,
                create_time=Timestamp(seconds=generation.created),
                prompt_tokens=len(generation.prompts[0]),
                prompt_token_ids=generation.prompts[0] if with_ids else (),
            )
            await context.write(pb.StreamGenerateResponse(request_id=name, started=started))
            for index in range(generation.candidates if echo else 0):
                news = pb.CandidateDelta(index=index, text=echo)
                await context.write(pb.StreamGenerateResponse(request_id=name, delta=news))
            async for deltas in generation:
                for delta in deltas:
                    for event in shapes.delta_to_pb(name, delta, with_ids):
                        await context.write(event)
            completed = pb.GenerationCompleted(
                usage=shapes.usage_to_pb(generation.usage),
                queue_time=convert.duration(generation.queue_time or 0.0),
                time_to_first_token=convert.duration(generation.time_to_first_token or 0.0),
            )
            await context.write(pb.StreamGenerateResponse(request_id=name, completed=completed))
        finally:
            generation.close()

    async def _generate(self, task: pb.GenerationTask, context: Context, *, streamed: bool) -> tuple[Generation, str]:
        """Check, tokenize, submit. Returns the generation and the id to answer with."""
        name = shapes.request_id(task.request_id) or self._metadata_id(context) or secrets.token_hex(16)
        shapes.refuse_unserved(task)
        sampling = shapes.sampling_of(task, streamed)
        served = self._service.served(shapes.model_name(task.model))
        self._service.check_room(served)
        sampling = await self._service.prepare(served, sampling)
        call = GenerationCall(
            model=shapes.model_name(task.model),
            prompts=[await self._prompt(served, task)],
            sampling=sampling,
            request_id=name,
            priority=task.priority,
            cache_salt=task.cache_salt,
            time_left=context.time_remaining(),
            every_token=task.output.token_ids,
        )
        return self._service.generate(call), name

    def _echo(self, task: pb.GenerationTask, generation: Generation) -> str:
        """The prompt's text when it was asked for."""
        if not task.output.echo_prompt:
            return ""
        if task.WhichOneof("prompt") == "text":
            return task.text
        tokenizer = self._service.served(shapes.model_name(task.model)).tokenizer
        skip = not task.output.HasField("skip_special_tokens") or task.output.skip_special_tokens
        return tokenizer.decode(generation.prompts[0], skip_special=skip)

    async def _prompt(self, served: ServedModel, task: pb.GenerationTask) -> tuple[int, ...]:
        match task.WhichOneof("prompt"):
            case "text":
                return await self._service.encode(served, task.text)
            case "tokens":
                return tuple(task.tokens.ids)
            case "conversation":
                return await self._conversation(served, task.conversation, "task.conversation")
        raise ClientError("task.prompt must be one of text, tokens and conversation", param="task.prompt")

    async def _conversation(
        self,
        served: ServedModel,
        conversation: pb.Conversation,
        where: str,
        tools: list[dict[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        return await self._service.render(
            served,
            shapes.messages_from_pb(conversation, where),
            tools=tools,
            add_generation_prompt=not conversation.continue_final_message,
            continue_final_message=conversation.continue_final_message,
            kwargs=shapes.template_args(conversation),
        )

    # -- text -------------------------------------------------------------------------------------------------------

    @_answered
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        served = self._service.served(shapes.model_name(request.model))
        match request.WhichOneof("input"):
            case "text":
                if request.functions:
                    raise ClientError("functions go with a conversation", param="functions")
                add = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._service.encode(served, request.text, add_special=add)
            case "conversation":
                if request.add_special_tokens:
                    raise ClientError("the template adds the special tokens", param="add_special_tokens")
                tools = [shapes.tool_from_pb(function) for function in request.functions] or None
                ids = await self._conversation(served, request.conversation, "conversation", tools)
            case _:
                raise ClientError("input must be one of text and conversation", param="input")
        info = self._service.info(served)
        pieces = [served.tokenizer.token_text(id_) for id_ in ids] if request.include_pieces else []
        return pb.TokenizeResponse(
            token_ids=ids, pieces=pieces, max_context_tokens=info.max_model_len if info is not None else 0
        )

    @_answered
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        tokenizer = self._service.served(shapes.model_name(request.model)).tokenizer
        bad = next((id_ for id_ in request.token_ids if id_ >= tokenizer.vocab_size), None)
        if bad is not None:
            raise ClientError(f"token id {bad} is out of the vocabulary", param="token_ids")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=tokenizer.decode(list(request.token_ids), skip_special=skip))

    # -- models -----------------------------------------------------------------------------------------------------

    @_answered
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        names, token = page(sorted(self._service.models), request.page_size, request.page_token)
        models = [self._model(self._service.models[name]) for name in names]
        return pb.ListModelsResponse(models=models, next_page_token=token)

    @_answered
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        name = shapes.model_name(request.name)
        if name is None:
            raise ClientError("name is required", param="name")
        return pb.GetModelResponse(model=self._model(self._service.served(name)))

    def _model(self, served: ServedModel) -> pb.Model:
        info = self._service.info(served)
        return pb.Model(
            name=f"models/{served.name}",
            display_name=served.name,
            max_context_tokens=info.max_model_len if info is not None else 0,
            capabilities=[pb.CAPABILITY_GENERATE],
            create_time=Timestamp(seconds=served.created),
        )

    # -- planned ----------------------------------------------------------------------------------------------------

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Embed is planned, but not supported yet")
        raise AssertionError("abort raises")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Score is planned, but not supported yet")
        raise AssertionError("abort raises")

    # -- each call --------------------------------------------------------------------------------------------------

    def authorize(self, context: Context) -> None:
        """Raises Unauthenticated. The scheme is any case; keys are compared in constant time over a hash."""
        if self._key_digest is None:
            return
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                scheme, _, token = _text(value).partition(" ")
                digest = hashlib.sha256(token.strip().encode()).digest()
                if scheme.lower() == "bearer" and hmac.compare_digest(digest, self._key_digest):
                    return
        raise Unauthenticated("missing or wrong API key: send metadata `authorization: Bearer <key>`")

    @staticmethod
    def _metadata_id(context: Context) -> str | None:
        given = next((_text(v) for k, v in context.invocation_metadata() or () if k == "x-request-id"), "")
        return given[: shapes.MAX_REQUEST_ID] if given.isprintable() and given else None

    def enter(self) -> None:
        self._active += 1
        self.idle.clear()

    def leave(self) -> None:
        self._active -= 1
        if not self._active:
            self.idle.set()


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


class PublicServer:
    """A running server. port: the bound one."""

    def __init__(self, server: grpc.aio.Server, servicer: InferenceServicer, service: Service, port: int) -> None:
        self.port = port
        self._server = server
        self._servicer = servicer
        self._service = service
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._told: dict[str, bool] = {}
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._tell_health()
        await self._server.start()
        self._watch = background(self._follow_readiness(), "the health of public gRPC")

    async def stop(self, grace: float = 0.0) -> None:
        """NOT_SERVING first; no new calls; running ones have `grace` seconds, then they are cancelled."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace):
                await self._servicer.idle.wait()
        except TimeoutError:
            log.warning("public gRPC: calls still run after %g s", grace)
        await self._server.stop(0.0)  # health watches have no end of their own

    async def _follow_readiness(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._tell_health()

    async def _tell_health(self) -> None:
        """The whole server, and each model as the service `models/NAME`."""
        ready = self._service.ready()
        states = {"": ready, SERVICE_NAME: ready}
        states |= {f"models/{name}": self._service.model_ready(name) for name in self._service.models}
        for name, serves in states.items():
            if self._told.get(name) is not serves:
                self._told[name] = serves
                await self._health.set(name, Health.SERVING if serves else Health.NOT_SERVING)


async def serve(
    service: Service, host: str, port: int, *, api_key: str | None = None, with_reflection: bool = True
) -> PublicServer:
    """Bind and serve; port 0 lets the system choose. Raises ConfigError when the port is taken."""
    server = grpc.aio.server(interceptors=[RefuseMalformed()], options=server_options())
    servicer = InferenceServicer(service, api_key)
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    if with_reflection:
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        await server.stop(None)
        raise ConfigError(f"cannot listen on {host}:{port} for public gRPC: address already in use") from error
    public = PublicServer(server, servicer, service, int(bound))
    await public.start()
    return public

"""The HTTP endpoints: parse, tokenize, admit, then one JSON reply or a stream. Client gone: closed at once."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from nori_cluster.config import GatewayConfig
from nori_cluster.errors import Cancelled, ClientError, NoriError, NotReady
from nori_cluster.frontend.service import Generation, GenerationCall, ServedModel, Service
from nori_cluster.gateway import openapi, replies, sse
from nori_cluster.gateway.body import read_body
from nori_cluster.gateway.logprobs import Shown
from nori_cluster.gateway.requests import (
    COMPLETION_MAX_TOKENS,
    Draft,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from nori_cluster.version import __version__

log = logging.getLogger(__name__)

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
IGNORED_HEADER = "x-nori-ignored-fields"


class Stream(Response):
    """text/event-stream of one Generation, from admission on; closes it when the client goes away or anything fails."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: sse.StreamWriter, headers: dict[str, str]) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, writer = self._generation, self._writer
        async with closed_on_disconnect(generation, receive):
            await generation.admitted()  # a refusal still gets its own status
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for deltas in generation:
                    await send({"type": "http.response.body", "body": writer.events(deltas), "more_body": True})
                last = writer.end()
            except Cancelled:
                return
            except NoriError as error:
                log.warning("request %s failed in its stream: %s", scope["nori.request_id"], error)
                last = sse.error_events(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})


class Routes:
    """The endpoints of one gateway."""

    def __init__(self, service: Service, config: GatewayConfig) -> None:
        self._service = service
        self._config = config

    def router(self) -> APIRouter:
        router = APIRouter(redirect_slashes=False)
        add = router.add_api_route
        for path, endpoint in (("/v1/completions", self.completions), ("/v1/chat/completions", self.chat)):
            add(path, endpoint, methods=["POST"], **openapi.operation(path))
        for prefix in ("", "/v1"):
            add(f"{prefix}/tokenize", self.tokenize, methods=["POST"], **openapi.operation(f"{prefix}/tokenize"))
            add(f"{prefix}/detokenize", self.detokenize, methods=["POST"], **openapi.operation(f"{prefix}/detokenize"))
        add("/v1/models", self.models, methods=["GET"], **openapi.operation("/v1/models"))
        add("/v1/models/{model_id:path}", self.model, methods=["GET"], **openapi.operation("/v1/models/{id}"))
        for path in ("/health", "/livez"):
            add(path, self.health, methods=["GET"], **openapi.operation(path))
        for path in ("/ready", "/readyz"):
            add(path, self.ready, methods=["GET"], **openapi.operation(path))
        add("/version", self.version, methods=["GET"], **openapi.operation("/version"))
        return router

    async def completions(self, request: Request) -> Response:
        draft = parse_completion(await self._body(request), self._config)
        served = self._service.served(draft.model)
        self._service.check_room(served)
        prompts = await self._service.encode_all(served, draft.prompts, add_special=draft.add_special)
        generation = await self._generate(request, draft, served, prompts, COMPLETION_MAX_TOKENS, "prompt")
        echo = _echo(draft, served) if draft.echo else []
        headers = _ignored(draft)
        show = Shown.of(served.tokenizer, draft)
        async with closed_on_failure(generation):
            if draft.stream is not None:
                return Stream(generation, sse.CompletionWriter(generation, show, draft.stream, echo), headers)
            async with closed_on_disconnect(generation, request.receive):
                deltas = await generation.result()
            return _json(replies.completion_reply(generation, deltas, show, echo), headers)

    async def chat(self, request: Request) -> Response:
        draft = parse_chat(await self._body(request), self._config)
        served = self._service.served(draft.model)
        self._service.check_room(served)
        prompt = await self._service.render(
            served,
            draft.messages,
            add_generation_prompt=draft.add_generation_prompt,
            continue_final_message=draft.continue_final_message,
            kwargs=draft.template_kwargs,
        )
        generation = await self._generate(request, draft, served, [prompt], None, "messages")
        headers = _ignored(draft)
        show = Shown.of(served.tokenizer, draft)
        async with closed_on_failure(generation):
            if draft.stream is not None:
                return Stream(generation, sse.ChatWriter(generation, show, draft.stream), headers)
            async with closed_on_disconnect(generation, request.receive):
                deltas = await generation.result()
            return _json(replies.chat_reply(generation, deltas, show), headers)

    async def tokenize(self, request: Request) -> Response:
        wanted, messages, generation_prompt, continues = parse_tokenize(await self._body(request))
        served = self._service.served(wanted.model)
        if messages is None:
            add_special = wanted.add_special_tokens is not False
            ids = await self._service.encode(served, wanted.prompt or "", add_special=add_special)
        else:
            ids = await self._service.render(
                served,
                messages,
                add_generation_prompt=generation_prompt,
                continue_final_message=continues,
                kwargs=wanted.chat_template_kwargs or {},
            )
        info = self._service.info(served)
        tokenizer = served.tokenizer
        strings = [tokenizer.token_text(id_) for id_ in ids] if wanted.return_token_strs else None
        length = info.max_model_len if info else None
        return _json({"count": len(ids), "max_model_len": length, "tokens": list(ids), "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        wanted = parse_detokenize(await self._body(request))
        served = self._service.served(wanted.model)
        size = served.tokenizer.vocab_size
        if wanted.tokens and not (min(wanted.tokens) >= 0 and max(wanted.tokens) < size):
            raise ClientError(f"tokens must lie between 0 and {size - 1}", param="tokens")
        return _json({"prompt": served.tokenizer.decode(wanted.tokens, skip_special=False)})

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model(served) for served in self._service.models.values()]})

    async def model(self, model_id: str) -> Response:
        return _json(self._model(self._service.served(model_id)))

    async def health(self) -> Response:
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        reason = self._service.unready()
        if reason is not None:
            raise NotReady(f"not ready: {reason}", retry_after=2.0)
        return _json({"status": "ready"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    # Inside

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope["headers"], request.receive, self._config.max_body_bytes)

    async def _generate(
        self,
        request: Request,
        draft: Draft,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        default_max_tokens: int | None,
        prompt_param: str,
    ) -> Generation:
        if draft.ignored:
            log.debug("request %s: unknown fields %s", request.scope["nori.request_id"], draft.ignored[:10])
        sampling = await self._service.prepare(served, draft.sampling, draft.constraint_param)
        return self._service.generate(
            GenerationCall(
                model=served.name,
                prompts=prompts,
                sampling=sampling,
                request_id=request.scope["nori.request_id"],
                default_max_tokens=default_max_tokens,
                priority=draft.priority,
                cache_salt=draft.cache_salt,
                every_token=draft.return_token_ids,
                prompt_param=prompt_param,
                max_tokens_param=draft.max_tokens_param,
            )
        )

    def _model(self, served: ServedModel) -> dict[str, Any]:
        info = self._service.info(served)
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "nori",
            "root": served.name,
            "parent": None,
            "max_model_len": info.max_model_len if info else None,
        }


@contextlib.asynccontextmanager
async def closed_on_failure(generation: Generation) -> AsyncIterator[None]:
    """Close the Generation when the block raises (a cancelled handler too)."""
    try:
        yield
    except BaseException:
        generation.close()
        raise


@contextlib.asynccontextmanager
async def closed_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Close the Generation as soon as the client hangs up, and when the block is left in any way but its end."""
    watcher = asyncio.ensure_future(_close_when_gone(generation, receive))
    try:
        yield
    except BaseException:
        generation.close()
        raise
    finally:
        watcher.cancel()


async def _close_when_gone(generation: Generation, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


def _echo(draft: Draft, served: ServedModel) -> list[str]:
    skip = draft.sampling.skip_special_tokens
    return [
        prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt, skip_special=skip)
        for prompt in draft.prompts
    ]


def _ignored(draft: Draft) -> dict[str, str]:
    """The header that names unknown fields, at most ten, printable ASCII only."""
    if not draft.ignored:
        return {}
    names = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name[:64]) for name in draft.ignored[:10]]
    return {IGNORED_HEADER: ", ".join(names)}


def _json(body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

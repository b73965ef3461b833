"""Protocol-neutral serving: models, text → tokens, admission, submission. HTTP routes and the gRPC servicer call it."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nori_cluster.errors import ContextLengthExceeded, Draining, ModelNotFound, NoReadyGroup, NoriError, QueueFull
from nori_cluster.frontend.admission import (
    Limits,
    check_prompts,
    check_sampling,
    check_scheduling,
    resolve_max_tokens,
    resolve_sampling,
    resolve_seed,
)
from nori_cluster.frontend.backend import Backend, ModelInfo
from nori_cluster.frontend.bad_words import bad_word_ids, check_bad_words
from nori_cluster.frontend.candidate import Delta
from nori_cluster.frontend.constraints import ConstraintChecker
from nori_cluster.frontend.gate import Gate
from nori_cluster.frontend.generation import Generation, Usage
from nori_cluster.frontend.template import ChatTemplate
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.telemetry import GatewayMetrics
from nori_cluster.types import Request, SamplingParams

__all__ = ["Delta", "Generation", "GenerationCall", "Limits", "ServedModel", "Service", "Usage"]

INLINE_ENCODE_CHARS = 4096  # longer texts are encoded in a thread: 4,096 tokens would block the loop for about 28 ms
MESSAGE_CHARS = 64  # what rendering a message costs beside its texts, in characters
WORD_CHARS = 64  # what encoding a bad word costs beside its characters, twice
RETRY_AFTER = 2.0  # seconds a client is told to wait when nothing can serve it now
RETRY_DRAINING = 1.0  # the next gateway may take it at once


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model this frontend can tokenize for. created: unix seconds."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int
    parse_special_tokens: bool = False  # read <|…|> in plain text prompts as control tokens


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a protocol edge asks for, already tokenized.

    sampling.max_tokens None = default_max_tokens cut to the room left, or, when that is None too, all of the room.
    An explicit max_tokens that does not fit is refused. request_id: the client's or one made at the edge, for logs;
    it need not be unique. time_left: seconds until the deadline. *_param: how errors name these fields.
    """

    model: str | None
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    request_id: str
    default_max_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    time_left: float | None = None
    cache_salt: str = ""
    every_token: bool = False  # Deltas are also emitted for tokens that show no text yet
    prompt_param: str = "prompt"
    max_tokens_param: str = "max_tokens"


class Service:
    """Everything a protocol edge calls; knows no protocol. Lives on one event loop."""

    def __init__(
        self,
        backend: Backend,
        models: Mapping[str, ServedModel],
        limits: Limits = Limits(),
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self.backend = backend
        self.models = dict(models)
        self.limits = limits
        self.metrics = metrics or GatewayMetrics()
        for name in self.models:
            self.metrics.model(name)  # series exist from the start
        self.draining = False
        self.gate = Gate()
        self._checkers: dict[str, ConstraintChecker] = {}
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def served(self, name: str | None) -> ServedModel:
        """The model, or the only one when name is None. Raises ModelNotFound (param "model")."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise ModelNotFound("model is required: this server has more than one", param="model")
        served = self.models.get(name)
        if served is None:
            raise ModelNotFound(f"The model `{name[:200]}` does not exist.", param="model")
        return served

    def info(self, served: ServedModel) -> ModelInfo | None:
        """What the backend knows of it: max_model_len, ready groups. None before any group registered."""
        return self.backend.model(served.name)

    def ready(self) -> bool:
        """True when not draining and every model has a ready group."""
        return self.unready() is None

    def unready(self) -> str | None:
        """Why not, None when ready."""
        if self.draining:
            return "draining"
        missing = [name for name in self.models if not self.model_ready(name)]
        return f"no ready group of {', '.join(missing)}"[:500] if missing else None

    def model_ready(self, name: str) -> bool:
        """Whether a call for the model would find a group now."""
        info = self.backend.model(name)
        return not self.draining and info is not None and info.ready_groups > 0

    def check_room(self, served: ServedModel) -> None:
        """Before any heavy work: QueueFull, NoReadyGroup or Draining when the request would be refused after it."""
        self.check_open()
        info = self.info(served)
        if info is None:
            raise NoReadyGroup(f"no group serving {served.name!r} is ready yet", retry_after=RETRY_AFTER)
        if info.queue_full:
            raise QueueFull("too many requests wait already", retry_after=info.retry_after or RETRY_AFTER)

    def check_open(self) -> None:
        """Raises Draining when no new call is taken."""
        if self.draining:
            raise Draining("the server is shutting down", retry_after=RETRY_DRAINING)

    async def encode(self, served: ServedModel, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt; see encode_all."""
        return (await self.encode_all(served, [text], add_special=add_special))[0]

    async def encode_all(
        self, served: ServedModel, prompts: Sequence[str | tuple[int, ...]], *, add_special: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of plain prompts (ids pass unchanged); much text is encoded off the event loop. Raises ClientError,
        ContextLengthExceeded before any work on a text that can not fit."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(served, len(prompt), "prompt")

        def encode() -> list[tuple[int, ...]]:
            return [_encode(served, p, add_special) if isinstance(p, str) else p for p in prompts]

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE_ENCODE_CHARS:
            return encode()
        return await asyncio.to_thread(encode)

    def _check_length(self, served: ServedModel, characters: int, param: str) -> None:
        """Refuse a text of more characters than the longest tokens that fit could hold: megabytes are not tokenized."""
        info, longest = self.info(served), served.tokenizer.longest_token
        if info is not None and longest and characters > info.max_model_len * longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {info.max_model_len} tokens. "
                f"However, your {param} has {characters} characters, which can not fit.",
                param=param,
            )

    async def render(
        self,
        served: ServedModel,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation through the model's template. Raises ClientError."""
        self._check_length(served, sum(map(_content_size, messages)), "messages")

        def render() -> tuple[int, ...]:
            ids = served.template.render(
                messages,
                served.tokenizer,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs or {},
            )
            return tuple(ids)

        if not (tools or kwargs) and sum(map(_inline_size, messages)) <= INLINE_ENCODE_CHARS:
            return render()
        return await asyncio.to_thread(render)

    async def prepare(
        self, served: ServedModel, sampling: SamplingParams, constraint_param: str = "constraint"
    ) -> SamplingParams:
        """The same controls with what needs the tokenizer filled in (bad_word_ids), after looking whether a constraint
        can be served. Raises ClientError, or Overloaded when too many constraints wait to be compiled."""
        if sampling.constraint is not None:
            await self._checker(served).check(sampling.constraint, constraint_param)
        words = sampling.bad_words
        if not words:
            return sampling
        check_bad_words(words)
        if sum(len(word) + WORD_CHARS for word in words) <= INLINE_ENCODE_CHARS:
            ids = bad_word_ids(words, served.tokenizer)
        else:
            ids = await asyncio.to_thread(bad_word_ids, words, served.tokenizer)
        return msgspec.structs.replace(sampling, bad_word_ids=ids)

    def _checker(self, served: ServedModel) -> ConstraintChecker:
        """Made for the first constraint: it starts a process."""
        checker = self._checkers.get(served.name)
        if checker is None:
            checker = self._checkers[served.name] = ConstraintChecker(served.tokenizer)
        return checker

    def generate(self, call: GenerationCall) -> Generation:
        """Check, draw the seed, submit. Raises ClientError or Overloaded; later refusals come from admitted().

        call.sampling went through `prepare`.
        """
        assert bool(call.sampling.bad_words) <= bool(call.sampling.bad_word_ids), "sampling was not prepared"
        served = self.served(call.model)
        self.check_open()
        info = self.info(served)
        if info is None:
            raise NoReadyGroup(f"no group serving {served.name!r} is ready yet", retry_after=RETRY_AFTER)
        vocab_size = served.tokenizer.vocab_size
        sampling = call.sampling
        check_sampling(sampling, vocab_size, self.limits, served.tokenizer.eos_token_ids)
        check_scheduling(call.priority, call.cache_salt)
        check_prompts(call.prompts, sampling.n, vocab_size, self.limits, call.prompt_param)
        budgets = [
            resolve_max_tokens(
                len(ids),
                sampling.max_tokens,
                call.default_max_tokens,
                info.max_model_len,
                call.prompt_param,
                call.max_tokens_param,
            )
            for ids in call.prompts
        ]
        unique = f"{call.request_id}-{secrets.token_hex(6)}"
        requests = [
            Request(
                id=f"{unique}-{number}" if len(budgets) > 1 else unique,
                model=served.name,
                prompt_token_ids=ids,
                sampling=resolve_sampling(sampling, budget, vocab_size),
                seed=resolve_seed(sampling.seed),
                tenant=call.tenant,
                priority=call.priority,
                time_left=call.time_left,
                cache_salt=call.cache_salt,
            )
            for number, (ids, budget) in enumerate(zip(call.prompts, budgets, strict=True))
        ]
        generation = Generation(
            id=unique,
            model=call.model or served.name,
            prompts=call.prompts,
            sampling=sampling,
            tokenizer=served.tokenizer,
            metrics=self.metrics.model(served.name),
            every_token=call.every_token,
            on_end=self._ended,
        )
        self._generations.add(generation)
        self._idle.clear()
        generation.submit(self.backend, requests)
        return generation

    def drain(self) -> None:
        """From now on new calls are refused with Overloaded; running ones continue."""
        self.draining = True

    @property
    def running(self) -> int:
        """Calls that were generated and have not ended."""
        return len(self._generations)

    async def idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    def close(self) -> None:
        """End the processes that check constraints."""
        for checker in self._checkers.values():
            checker.close()

    def close_all(self, error: NoriError) -> None:
        """End every running call with an error (the end of a drain)."""
        for generation in list(self._generations):
            generation.close(error)

    def _ended(self, generation: Generation) -> None:
        self._generations.discard(generation)
        if not self._generations:
            self._idle.set()


def _encode(served: ServedModel, text: str, add_special: bool) -> tuple[int, ...]:
    return tuple(served.tokenizer.encode(text, parse_special=served.parse_special_tokens, add_special=add_special))


def _content_size(message: Mapping[str, Any]) -> int:
    """Characters of the content, a string or text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _inline_size(message: Mapping[str, Any]) -> int:
    """Characters of a flat message; one with anything nested (parts, tool calls) counts as too many."""
    nested = any(isinstance(value, list | dict) for value in message.values())
    texts = sum(len(value) for value in message.values() if isinstance(value, str))
    return INLINE_ENCODE_CHARS + 1 if nested else MESSAGE_CHARS + texts

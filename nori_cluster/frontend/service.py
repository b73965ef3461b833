"""Protocol-neutral serving: models, text → tokens, admission, submission. HTTP routes and the gRPC servicer call it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nori_cluster.frontend.backend import Backend, ModelInfo
from nori_cluster.frontend.generation import Delta, Generation, Usage
from nori_cluster.frontend.template import ChatTemplate
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import SamplingParams

__all__ = ["Delta", "Generation", "GenerationCall", "Limits", "ServedModel", "Service", "Usage"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one call, the same for HTTP and gRPC."""

    max_stop_strings: int = 16
    max_logprobs: int = 20
    max_prompts: int = 1024
    max_n: int = 128
    max_candidates: int = 4096  # prompts * n


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model this frontend can tokenize for. created: unix seconds."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int
    parse_special_tokens: bool = False  # read <|…|> in plain text prompts as control tokens


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a protocol edge asks for, already tokenized.

    sampling.max_tokens None = what fits. default_max_tokens: used when that is None, capped by the room left, where an
    explicit max_tokens that does not fit is refused. request_id: the client's or one made at the edge, for logs.
    time_left: seconds until the deadline.
    """

    model: str | None
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    request_id: str
    default_max_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    time_left: float | None = None
    want_token_ids: bool = False  # Deltas are also emitted for tokens without text


class Service:
    """Everything a protocol edge calls; holds no protocol words."""

    def __init__(self, backend: Backend, models: Mapping[str, ServedModel], limits: Limits = Limits()) -> None:
        self.backend = backend
        self.models = dict(models)
        self.limits = limits

    def served(self, name: str | None) -> ServedModel:
        """The model, or the only one when name is None. Raises ModelNotFound (param "model")."""
        raise NotImplementedError

    def info(self, served: ServedModel) -> ModelInfo | None:
        """What the backend knows of it: max_model_len, ready groups."""
        return self.backend.model(served.name)

    def ready(self) -> bool:
        """True when not draining and every model has a ready group."""
        raise NotImplementedError

    async def encode(self, served: ServedModel, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt; long texts are encoded off the event loop."""
        raise NotImplementedError

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
        raise NotImplementedError

    def generate(self, call: GenerationCall) -> Generation:
        """Check, draw the seed, submit. Raises ClientError or Overloaded; later refusals come from admitted()."""
        raise NotImplementedError

    def drain(self) -> None:
        """From now on new calls are refused with Overloaded; running ones continue."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """Calls that were generated and have not ended."""
        raise NotImplementedError

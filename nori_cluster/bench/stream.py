"""What one streamed answer amounts to while it comes in: events and their times, tokens, usage, how it ended.

http_client and grpc_client fill it, one per request; `record` turns it into the RequestRecord that leaves the client.
"""

from typing import Any

import msgspec

from nori_cluster.bench.records import Failure, RequestRecord
from nori_cluster.bench.workload import Planned

MESSAGE = 300  # characters of a server's words that are kept


class RequestFailed(Exception):
    """One request ended badly; the run goes on."""

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(kind, message)
        self.kind: Failure = kind
        self.message = " ".join(message.split())[:MESSAGE]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
DONE = b"[DONE]"


class Answer:
    """The owner of what is known of one answer. Times are seconds of the client's clock."""

    __slots__ = ("cached", "done", "event_tokens", "finish", "ids", "output", "prompt", "sent", "times")

    def __init__(self) -> None:
        self.sent: float | None = None
        self.times: list[float] = []
        self.event_tokens: list[int] = []  # of the events whose token ids are known
        self.ids: list[int] = []
        self.prompt: int | None = None
        self.output: int | None = None
        self.cached: int | None = None
        self.finish: str | None = None
        self.done = False

    def take(self, payload: bytes, now: float) -> None:
        """One event's data, read at `now`. Raises RequestFailed for an error event or what is no chunk."""
        if payload == DONE:
            self.done = True
            return
        try:
            chunk = _decode(payload)
        except msgspec.MsgspecError as error:
            text = payload[:80].decode(errors="replace")
            raise RequestFailed(
                "protocol", f"an event of the stream is no completion chunk ({error}): {text}"
            ) from None
        if chunk.error is not None:
            raise RequestFailed(
                "broken_stream", f"the server ended the stream with an error: {error_text(chunk.error)}"
            )
        if (usage := chunk.usage) is not None:
            self.prompt, self.output = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached = usage.prompt_tokens_details.cached_tokens
        if chunk.choices:
            self._choice(chunk.choices[0], now)

    def _choice(self, choice: _Choice, now: float) -> None:
        """A completion chunk is a token's even with an empty text; a chat's role and either's bare end are not."""
        delta = choice.delta
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason
        if delta is not None:
            news = bool(delta.content or delta.reasoning_content or choice.token_ids)
        else:
            news = bool(choice.text or choice.token_ids) or choice.finish_reason is None
        if news:
            self.news(now, choice.token_ids)

    def news(self, now: float, ids: list[int] | None) -> None:
        self.times.append(now)
        if ids is not None:
            self.ids += ids
            self.event_tokens.append(len(ids))

    def check_end(self) -> None:
        """Raises RequestFailed when the stream ended before it was complete, or said nothing."""
        if not self.done:
            raise RequestFailed("broken_stream", f"the stream ended before [DONE], after {len(self.times)} events")
        if not self.times:
            raise RequestFailed("protocol", "the stream ended well but held no text and no tokens")

    def record(self, plan: Planned, due: float, origin: float, failed: RequestFailed | None) -> RequestRecord:
        """Times become seconds since `origin`. due: on the client's clock."""
        times = tuple(time - origin for time in self.times)
        known = len(self.event_tokens) == len(times)
        tokens = tuple(self.event_tokens) if known else ()
        if not known and self.output == len(times):
            tokens = (1,) * len(times)
        output = self.output
        if output is None and known and times:
            output = len(self.ids)
        return RequestRecord(
            number=plan.number,
            due=due - origin,
            sent=(due if self.sent is None else self.sent) - origin,
            first=times[0] if times else None,
            last=times[-1] if times else None,
            events=times,
            event_tokens=tokens,
            asked_input=plan.input,
            asked_output=plan.output,
            prompt_tokens=self.prompt,
            output_tokens=output,
            cached_tokens=self.cached,
            finish_reason=self.finish,
            token_ids=tuple(self.ids),
            failure=None if failed is None else failed.kind,
            message="" if failed is None else failed.message,
        )


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, or whatever stands there."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def refusal_text(status: int, body: bytes) -> str:
    """HTTP status and the reason that a body gives."""
    try:
        value = msgspec.json.decode(body)
        reason = error_text(value["error"] if isinstance(value, dict) and "error" in value else value)
    except msgspec.MsgspecError:
        reason = body[:MESSAGE].decode(errors="replace").strip() or "no reason given"
    return f"HTTP {status}: {reason}"

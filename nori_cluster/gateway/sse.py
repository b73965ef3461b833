"""Deltas → server-sent events. All that is constant in a stream is encoded once; per event only its text is.

One StreamWriter per stream. The route joins the events of one take into one write, so a slow client gets fewer,
larger events, and nothing ever waits for a clock.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from nori_cluster.errors import NoriError
from nori_cluster.frontend.service import Delta, Generation
from nori_cluster.gateway.logprobs import Shown, chat_logprobs, completion_logprobs, echoed_logprobs
from nori_cluster.gateway.replies import finish_name, usage_object
from nori_cluster.gateway.requests import StreamMode

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def _encode(value: Any) -> bytes:
    """JSON on what every client takes for one line: many split at NEL, LS and PS too, which JSON leaves as they are."""
    data = _json(value)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def error_events(error: NoriError) -> bytes:
    """The end of a stream that failed after its headers were sent."""
    return b"data: " + _encode(error.envelope()) + b"\n\n" + DONE


class StreamWriter:
    """Chunks of one stream. A subclass names the shape: `head` up to the text, `middle` from the text on."""

    kind = ""
    prefix = ""

    def __init__(self, generation: Generation, show: Shown, mode: StreamMode) -> None:
        self._generation = generation
        self._show = show
        self._mode = mode
        self._token_ids = show.token_ids
        frame = {
            "id": f"{self.prefix}-{generation.id}",
            "object": self.kind,
            "created": generation.created,
            "model": generation.model,
        }
        self._frame = b"data: " + _encode(frame)[:-1]
        self._tail = b',"usage":null}\n\n' if mode.usage else b"}\n\n"
        self._running = mode.usage_everywhere
        self._heads: dict[int, bytes] = {}  # of candidates whose first chunk was written
        self._plain = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The events of one take."""
        parts: list[bytes] = []
        for delta in deltas:
            first = delta.index not in self._heads
            if first:
                self._heads[delta.index] = self._head(delta.index)
                self.begin(self._heads[delta.index], delta, parts)
            head = self._heads[delta.index]
            if delta.finish_reason is None and delta.logprobs is None and not self._token_ids and not self._running:
                parts += (head, self.text_key, _encode(delta.text), self.text_end, self._plain)
            else:
                self._write(head, delta, first, parts)
        return b"".join(parts)

    def _head(self, index: int) -> bytes:
        """What every chunk of a candidate begins with."""
        weights = self._generation.weights_id(index)
        told = b',"system_fingerprint":' + _encode(weights) if weights else b""
        return self._frame + told + b',"choices":[{"index":%d,' % index

    def end(self) -> bytes:
        """The usage chunk when asked for, and [DONE]."""
        if not self._mode.usage:
            return DONE
        return self._frame + b',"choices":[],"usage":' + _encode(usage_object(self._generation.usage)) + b"}\n\n" + DONE

    text_key = b""  # what stands before the JSON string of the text
    text_end = b""  # what closes the object the text is in

    def begin(self, head: bytes, delta: Delta, parts: list[bytes]) -> None:
        """Events before a candidate's first delta."""
        raise NotImplementedError

    def body(self, delta: Delta, parts: list[bytes]) -> None:
        """The object holding the text, for a chunk that is not plain."""
        raise NotImplementedError

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        raise NotImplementedError

    def prompt_ids(self, delta: Delta, parts: list[bytes]) -> None:
        """More keys of a candidate's first choice when token ids were asked for."""

    def _write(self, head: bytes, delta: Delta, first: bool, parts: list[bytes]) -> None:
        """The general chunk: logprobs, token ids, finish, running usage."""
        parts.append(head)
        self.body(delta, parts)
        parts += (b',"logprobs":', _encode(self.logprobs(delta)), b',"finish_reason":')
        if delta.finish_reason is None:
            parts.append(b"null")
        else:
            parts += (_encode(finish_name(delta.finish_reason)), b',"stop_reason":', _encode(delta.stop_reason))
        if self._token_ids:
            parts += (b',"token_ids":', _encode(delta.token_ids))
            if first:
                self.prompt_ids(delta, parts)
        self._close(parts)

    def _close(self, parts: list[bytes], extra: bytes = b"") -> None:
        """End the choice and the chunk. extra: more keys of the chunk, with a leading comma."""
        if self._running:
            parts += (b"}]", extra, b',"usage":', _encode(usage_object(self._generation.usage)), b"}\n\n")
        else:
            parts += (b"}]", extra, self._tail)


class ChatWriter(StreamWriter):
    """chat.completion.chunk: the role once per choice, content deltas, then one chunk with the finish reason."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    text_key = b'"delta":{"content":'
    text_end = b"}"

    def begin(self, head: bytes, delta: Delta, parts: list[bytes]) -> None:
        parts += (head, b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')
        extra = b""
        if self._token_ids:
            extra = b',"prompt_token_ids":' + _encode(self._generation.prompts[0])
        self._close(parts, extra)

    def body(self, delta: Delta, parts: list[bytes]) -> None:
        if delta.text or delta.finish_reason is None:
            parts += (self.text_key, _encode(delta.text), self.text_end)
        else:
            parts.append(b'"delta":{}')

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        return chat_logprobs(self._show, delta.token_ids, delta.logprobs)


class CompletionWriter(StreamWriter):
    """text_completion chunks. echo: prompt texts, sent as a first chunk of each choice."""

    kind = "text_completion"
    prefix = "cmpl"
    text_key = b'"text":'

    def __init__(self, generation: Generation, show: Shown, mode: StreamMode, echo: Sequence[str] = ()) -> None:
        super().__init__(generation, show, mode)
        self._echo = echo
        self._offsets = [0] * generation.candidates

    def begin(self, head: bytes, delta: Delta, parts: list[bytes]) -> None:
        if not self._echo:
            return
        prompt, generation, logprobs = delta.index // self._generation.n, self._generation, None
        if self._show.echo_logprobs is not None:
            logprobs, self._offsets[delta.index] = echoed_logprobs(
                self._show, generation.prompts[prompt], generation.prompt_logprobs[prompt], self._show.echo_logprobs
            )
        text = _encode(self._echo[prompt])
        parts += (head, self.text_key, text, b',"logprobs":', _encode(logprobs), b',"finish_reason":null')
        self._close(parts)

    def prompt_ids(self, delta: Delta, parts: list[bytes]) -> None:
        parts += (b',"prompt_token_ids":', _encode(self._generation.prompts[delta.index // self._generation.n]))

    def body(self, delta: Delta, parts: list[bytes]) -> None:
        parts += (self.text_key, _encode(delta.text))

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        offset = self._offsets[delta.index]
        shown, self._offsets[delta.index] = completion_logprobs(self._show, delta.token_ids, delta.logprobs, offset)
        return shown

"""A server without a model: streams from a script, with exact delays, stalls and faults. It measures the client.

`python -m nori_cluster.bench.null_server` reads a Script (JSON) from stdin, prints its port, serves until stdin closes.
Request number n (in order of arrival) gets reply n modulo their count. GET /v1/models lists the script's model.
"""

import asyncio
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Literal, Self, cast

import httptools
import msgspec
import uvloop

Fault = Literal["status", "cut", "no_done", "garbage", "error_event", "silent", "hang_up", "not_http", "no_stream"]


class Reply(msgspec.Struct, frozen=True):
    """first: seconds to the first event; gap: between events; fault: after half of the tokens, or instead of any.

    tokens None: as many as asked for. cached: prompt tokens it claims to have had in a cache.
    """

    first: float = 0.0
    gap: float = 0.0
    tokens: int | None = None
    fault: Fault | None = None
    cached: int = 0


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """stall: (second, seconds): counted from the first request, nothing is written in this time, all of it after."""

    replies: tuple[Reply, ...] = (Reply(),)
    stall: tuple[float, float] | None = None
    model: str = "null"
    port: int = 0


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_BAD = {
    "garbage": b"data: {not json\n\n",
    "error_event": b'data: {"error":{"message":"the engine fell over","code":500}}\n\n',
}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    return head + body


class Answering:
    """One stream: the next event is written by a timer (or at once), until its tokens or its fault are reached."""

    def __init__(self, server: "NullServer", transport: asyncio.Transport, reply: Reply, body: dict[str, Any]) -> None:
        self._server = server
        self._transport = transport
        self._reply = reply
        self._chat = "messages" in body
        self._tokens = int(body.get("max_tokens", 16)) if reply.tokens is None else reply.tokens
        self._with_ids = bool(body.get("return_token_ids"))
        self._prompt = body.get("prompt") or []
        self._stop_at = self._tokens // 2 if reply.fault is not None else self._tokens
        self._came = time.monotonic()
        self._written = 0  # events
        self._loop = asyncio.get_running_loop()
        frame = b'{"id":"cmpl-0","object":"text_completion","created":1700000000,"model":"%b",' % server.model
        self._frame = frame.replace(b"text_completion", b"chat.completion.chunk") if self._chat else frame
        text = b'"delta":{"content":" word"}' if self._chat else b'"text":" word"'
        self._head = b"data: " + self._frame + b'"choices":[{"index":0,' + text + b',"logprobs":null,"finish_reason":'
        self._token = _chunk(self._head + b'null}],"usage":null}\n\n')
        transport.write(_HEAD)
        self._at = server.after_stall(self._came + reply.first)
        plain = reply.fault is None and server.script.stall is None and not self._with_ids
        if plain and reply.gap == 0 and reply.first == 0:
            self._loop.call_soon(self._flat_out)
        else:
            self._wait()

    def _wait(self) -> None:
        left = self._at - time.monotonic()
        if left <= 0:
            self._loop.call_soon(self._step)
        else:
            self._loop.call_later(left, self._step)

    def _step(self) -> None:
        if self._transport.is_closing():
            return
        if time.monotonic() < self._at:  # timers are whole milliseconds
            self._wait()
            return
        if self._written >= self._stop_at:
            self._end()
            return
        self._transport.write(self._event())
        self._written += 1
        self._at = self._server.after_stall(self._came + self._reply.first + self._written * self._reply.gap)
        if self._written >= self._stop_at:
            self._end()
        else:
            self._wait()

    def _flat_out(self) -> None:
        """One event per turn of the loop, as fast as it goes."""
        self._transport.write(self._token)
        self._written += 1
        if self._written < self._tokens:
            self._loop.call_soon(self._flat_out)
        else:
            self._end()

    def _event(self) -> bytes:
        if not self._with_ids:
            return self._token
        token = (sum(self._prompt) + self._written) % 1000  # the same prompt, the same tokens
        return _chunk(self._head + b'null,"token_ids":[%d]}],"usage":null}\n\n' % token)

    def _end(self) -> None:
        fault, write = self._reply.fault, self._transport.write
        if fault == "silent":
            return
        if fault == "cut":
            self._transport.close()
            return
        if fault in _BAD:
            write(_chunk(_BAD[fault]) + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
            return
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}' % (
            len(self._prompt),
            self._written,
            self._reply.cached,
        )
        end = b"data: " + self._frame + b'"choices":[],"usage":%b}\n\n' % usage
        write(_chunk(end) + (b"" if fault == "no_done" else _chunk(b"data: [DONE]\n\n")) + _chunk(b""))


class _Connection(asyncio.Protocol):
    def __init__(self, server: "NullServer") -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._body = b""
        self._url = b""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._transport is not None:
            self._server.answer(self._url, self._body, self._transport)


class NullServer:
    """Owner of the script, the count of requests and the log."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.model = script.model.encode()
        self._requests = 0
        self._began: float | None = None

    def after_stall(self, moment: float) -> float:
        """When what is due at `moment` may be written."""
        if self.script.stall is None or self._began is None:
            return moment
        start, length = self.script.stall
        since = moment - self._began
        return self._began + start + length if start <= since < start + length else moment

    def answer(self, url: bytes, body: bytes, transport: asyncio.Transport) -> None:
        if url.endswith(b"/v1/models"):
            transport.write(_plain(b"200 OK", b'{"object":"list","data":[{"id":"%b"}]}' % self.model))
        elif url.endswith(b"/completions"):
            self._complete(msgspec.json.decode(body), transport)
        else:
            transport.write(_plain(b"404 Not Found", b'{"error":{"message":"no such path"}}'))

    def _complete(self, body: dict[str, Any], transport: asyncio.Transport) -> None:
        self._began = time.monotonic() if self._began is None else self._began
        reply = self.script.replies[self._requests % len(self.script.replies)]
        self._requests += 1
        if reply.fault == "status":
            transport.write(_plain(b"503 Service Unavailable", b'{"error":{"message":"too many requests wait"}}'))
        elif reply.fault == "hang_up":
            transport.close()
        elif reply.fault == "not_http":
            transport.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        elif reply.fault == "no_stream":
            transport.write(_plain(b"200 OK", b'{"choices":[{"text":"all at once"}]}'))
        else:
            Answering(self, transport, reply, body)


async def serve(script: Script) -> None:
    """Until stdin closes."""
    server = NullServer(script)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", script.port)
    sys.stdout.write(f"{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    listening.close()


class NullServerProcess:
    """A null server in a process of its own, ended with the context."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.url = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "nori_cluster.bench.null_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self._script) + b"\n")
        self._process.stdin.flush()
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def main() -> int:
    script = msgspec.json.decode(sys.stdin.buffer.readline(), type=Script)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(script))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One streamed chat answer over the gateway's HTTP API, with its timing. Used by `nori chat` and `nori demo`."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from nori_cluster.errors import NoriError

TIMEOUT = httpx.Timeout(10.0, read=None)  # a long prompt may be silent for minutes; connecting may not


class GatewayError(NoriError):
    """The gateway refused, broke off, or is not there."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. Times in seconds; tpot None when there was only one token; tokens as the gateway counted them."""

    text: str
    tokens: int
    ttft: float
    tpot: float | None
    total: float
    finish_reason: str | None

    def figures(self) -> str:
        """TTFT 312 ms · TPOT 16.0 ms · 58.1 tokens/s · 64 tokens"""
        parts = [f"TTFT {self.ttft * 1e3:.0f} ms"]
        if self.tpot is not None:
            parts += [f"TPOT {self.tpot * 1e3:.1f} ms"]
        parts += [f"{self.tokens / self.total:.1f} tokens/s", f"{self.tokens} tokens"]
        return " · ".join(parts)


def client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=False)


def refusal(status: int, body: bytes) -> GatewayError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or "no text"
    return GatewayError(f"the gateway answered {status}: {message}")


def unreachable(http: httpx.Client, error: httpx.TransportError) -> GatewayError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return GatewayError(f"nothing answers at {http.base_url} ({error}); start one with `nori serve` or pass --url")
    return GatewayError(f"the connection to {http.base_url} broke: {error or type(error).__name__}")


def first_model(http: httpx.Client) -> str:
    """The id of the first model the gateway lists."""
    try:
        response = http.get("/v1/models")
    except httpx.TransportError as error:
        raise unreachable(http, error) from error
    if response.status_code != 200:
        raise refusal(response.status_code, response.content)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise GatewayError(f"{http.base_url} lists no model") from error


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to [DONE]; an error event is raised."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise GatewayError(f"the stream ended with an error: {event['error'].get('message', event['error'])}")
        yield event
    raise GatewayError("the stream ended before [DONE]")


def ask(http: httpx.Client, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
    """POST /v1/chat/completions, streamed; on_text gets each piece as it arrives. GatewayError on anything else."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    first = last = start
    pieces: list[str] = []
    tokens, finish = 0, None
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise refusal(response.status_code, response.read())
            for event in events(response):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    if text := choice["delta"].get("content"):
                        last = time.perf_counter()
                        first = first if pieces else last
                        pieces.append(text)
                        on_text(text)
    except httpx.TransportError as error:
        raise unreachable(http, error) from error
    tokens = tokens or len(pieces)
    return Answer(
        text="".join(pieces),
        tokens=tokens,
        ttft=first - start,
        tpot=(last - first) / (tokens - 1) if tokens > 1 and last > first else None,
        total=max(time.perf_counter() - start, 1e-9),
        finish_reason=finish,
    )

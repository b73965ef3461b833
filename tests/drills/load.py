"""The load of a drill: streams in a closed loop whose tokens are known from an undisturbed run."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = 12  # different requests; the same ones again and again
PROMPT = list(range(20, 37))


def body_of(kind: int, tokens: int) -> dict[str, Any]:
    """Greedy and seeded, penalties, logprobs, a grammar, two candidates."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": [*PROMPT, 40 + kind], "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "temperature": 0.0 if kind % 2 else 0.9, "seed": kind,
    }  # fmt: skip
    match kind % 6:
        case 1:
            body["logprobs"] = 2
        case 2:
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.3}
        case 3:
            body |= {"n": 2, "temperature": 0.8}
        case 4:
            body |= {"structured_outputs": {"regex": "[a-z ]{40,60}"}, "ignore_eos": False}
        case 5:
            body |= {"repetition_penalty": 1.2, "logit_bias": {"50": 2.0}}
    return body


@dataclass
class Outcome:
    """What one request said, by candidate. gap: longest pause between two events, or before the first."""

    kind: int
    ids: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    gap: float = 0.0
    error: str = ""

    @property
    def whole(self) -> bool:
        return not self.error and bool(self.ids) and self.ended == set(self.ids)


async def ask(client: httpx.AsyncClient, kind: int, tokens: int) -> Outcome:
    out = Outcome(kind)
    last = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body_of(kind, tokens)) as reply:
            if reply.status_code != 200:
                out.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
                return out
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.monotonic()
                out.gap, last = max(out.gap, now - last), now
                event = json.loads(line[6:])
                if "error" in event:
                    out.error = str(event["error"]["message"])
                for choice in event.get("choices", ()):
                    out.ids.setdefault(choice["index"], []).extend(choice["token_ids"])
                    if choice["finish_reason"]:
                        out.ended.add(choice["index"])
    except httpx.HTTPError as error:
        out.error = repr(error)
    return out


class Load:
    """`streams` requests at a time until stop(); every outcome is judged against the undisturbed one."""

    def __init__(self, url: str, streams: int, tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self.refused = 0  # 429 or 503 before anything was accepted: no request of the drill
        self._url, self._streams, self._tokens = url, streams, tokens
        self._expected: dict[int, dict[int, list[int]]] = {}
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Run each kind once, undisturbed."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0) as client:
            for kind in range(KINDS):
                outcome = await ask(client, kind, self._tokens)
                assert outcome.whole, outcome.error
                self._expected[kind] = outcome.ids

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(self._streams)]

    async def stop(self) -> None:
        """What runs may end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _one(self, number: int) -> None:
        kind = number
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0) as client:
            while not self._stopping:
                outcome = await ask(client, kind % KINDS, self._tokens)
                if outcome.error[:4] in ("503:", "429:"):
                    self.refused += 1
                    await asyncio.sleep(0.2)
                    continue
                self.outcomes.append(outcome)
                kind += 5

    @property
    def lost(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.whole]

    @property
    def changed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.whole and o.ids != self._expected[o.kind]]

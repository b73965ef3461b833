"""The load of a drill: streams in a closed loop, over all gateways, whose tokens are known from an undisturbed run."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = 12  # different requests; the same ones again and again
PROMPT = list(range(20, 37))
PATIENCE = 60.0  # seconds a client waits for the next byte
REFUSED = (429, 503)  # with Retry-After: said before anything was accepted

Tokens = Mapping[int, Mapping[int, list[int]]]  # kind → candidate → token ids


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
    """What one request said, by candidate. waited: seconds to the first event or a refusal. gap: longest pause then."""

    kind: int
    gateway: str = ""
    ids: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    status: int = 0
    waited: float = 0.0
    gap: float = 0.0
    done: bool = False  # [DONE] came
    error: str = ""
    at: float = 0.0  # monotonic seconds of its end

    @property
    def whole(self) -> bool:
        return self.done and not self.error and bool(self.ids) and self.ended == set(self.ids)

    @property
    def accepted(self) -> bool:
        return self.status == 200


async def ask(client: httpx.AsyncClient, kind: int, tokens: int, gateway: str = "") -> Outcome:
    out = Outcome(kind, gateway)
    begin = time.monotonic()
    last = 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=body_of(kind, tokens)) as reply:
            out.status = reply.status_code
            out.waited = time.monotonic() - begin
            if not out.accepted:
                after = reply.headers.get("retry-after")
                out.error = f"{out.status}, retry after {after}: {(await reply.aread())[:200]!r}"
                if out.status in REFUSED and after is None:
                    out.status = -out.status  # a refusal without Retry-After is none
                return out
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    out.done = True
                elif line.startswith("data: "):
                    now = time.monotonic()
                    if last:
                        out.gap = max(out.gap, now - last)
                    else:
                        out.waited = now - begin
                    last = now
                    _take_in(out, json.loads(line[6:]))
    except httpx.HTTPError as error:
        out.error = repr(error)
        out.gap = max(out.gap, time.monotonic() - (last or begin))
    return out


def _take_in(out: Outcome, event: dict[str, Any]) -> None:
    if "error" in event:
        out.error = str(event["error"]["message"])
    for choice in event.get("choices", ()):
        out.ids.setdefault(choice["index"], []).extend(choice["token_ids"])
        if choice["finish_reason"]:
            out.ended.add(choice["index"])


async def learn(url: str, tokens: int) -> dict[int, dict[int, list[int]]]:
    """What each kind says while nothing happens."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        outcomes = await asyncio.gather(*(ask(client, kind, tokens) for kind in range(KINDS)))
    for outcome in outcomes:
        assert outcome.whole, outcome.error
        if body_of(outcome.kind, tokens)["ignore_eos"]:
            assert {len(ids) for ids in outcome.ids.values()} == {tokens}, f"kind {outcome.kind} ended early"
    return {outcome.kind: outcome.ids for outcome in outcomes}


def says(outcome: Outcome, expected: Mapping[int, list[int]], tokens: int) -> bool:
    """Whether every token is the one of the undisturbed run, and for a whole outcome whether all of them came."""
    if not set(outcome.ids) <= set(expected):
        return False
    for candidate, ids in outcome.ids.items():
        wanted = expected[candidate][:tokens]
        if ids != (wanted if outcome.whole else wanted[: len(ids)]):
            return False
    return not outcome.whole or set(outcome.ids) == set(expected)


class Load:
    """`streams` requests at a time until stop(); every outcome is judged against the undisturbed one.

    gateways: name → URL. expected: as learn() gave it, of at least `tokens` tokens.
    """

    def __init__(self, gateways: Mapping[str, str], streams: int, tokens: int, expected: Tokens) -> None:
        self.outcomes: list[Outcome] = []
        self.refused = 0  # 429 or 503 with Retry-After, or a gateway that left: no request of the drill
        self.running: Counter[str] = Counter()  # by gateway
        self.tokens = tokens
        self._gateways = dict(gateways)
        self._streams = streams
        self._expected = expected
        self._left: set[str] = set()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(self._streams)]

    async def stop(self) -> None:
        """What runs may end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def leaves(self, gateway: str) -> None:
        """Clients turn to the other gateways from now on; what this one had accepted is the drill's own verdict."""
        self._left.add(gateway)

    async def _one(self, number: int) -> None:
        names = itertools.cycle(self._gateways)
        for _ in range(1 + number % len(self._gateways)):
            name = next(names)
        kind = number
        while not self._stopping:
            async with httpx.AsyncClient(base_url=self._gateways[name], timeout=PATIENCE) as client:
                while not self._stopping and name not in self._left:
                    self.running[name] += 1
                    outcome = await ask(client, kind % KINDS, self.tokens, name)
                    self.running[name] -= 1
                    outcome.at = time.monotonic()
                    await self._keep(outcome)
                    kind += 5
            if self._left >= set(self._gateways):
                return
            while name in self._left:
                name = next(names)

    async def _keep(self, outcome: Outcome) -> None:
        if outcome.status in REFUSED or (outcome.gateway in self._left and not outcome.accepted):
            self.refused += 1
        else:
            self.outcomes.append(outcome)
        if not outcome.accepted:
            await asyncio.sleep(0.2)

    # -- judgement --------------------------------------------------------------------------------------------------

    def of(self, gateways: Sequence[str]) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.gateway in gateways]

    @property
    def lost(self) -> list[Outcome]:
        """Accepted or not answered at all, and not ended as they should. Those of a gateway that left are not here."""
        return [o for o in self.outcomes if not o.whole and o.gateway not in self._left]

    @property
    def ended_with_gateway(self) -> list[Outcome]:
        """Accepted by a gateway that left, and not whole."""
        return [o for o in self.outcomes if o.accepted and not o.whole and o.gateway in self._left]

    @property
    def changed(self) -> list[Outcome]:
        """A token doubled, left out or another; what was cut off is compared as far as it came."""
        return [o for o in self.outcomes if not self.is_right(o)]

    def is_right(self, outcome: Outcome) -> bool:
        return says(outcome, self._expected[outcome.kind], self.tokens)

    def longest_gap(self, queues: bool) -> float:
        """Of the requests that count. queues: the time before the first token is waiting in a queue, no pause."""
        counted = [o for o in self.outcomes if o.gateway not in self._left]
        return max((o.gap if queues else max(o.gap, o.waited) for o in counted), default=0.0)

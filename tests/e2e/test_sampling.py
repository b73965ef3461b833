"""Sampling controls on a real cluster (TP 2, batch-invariant) beside a running request: F08 to F10, F12, F13, F52."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 384
USER = [{"role": "user", "content": "hi"}]
Post = Callable[..., httpx.Response]


@pytest.fixture
def post(http: httpx.Client) -> Post:
    return lambda path, **fields: http.post(path, json={"model": "tiny", **fields}, timeout=60)


@pytest.fixture
def beside(http: httpx.Client) -> Iterator[None]:
    """A greedy request of 200 tokens runs all along and says what it says alone; /health stays 200."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def say() -> str:
        reply = http.post(COMPLETIONS, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    alone = say()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(say)
        yield
        assert running.result() == alone
    assert http.get("/health").status_code == 200


def refused(reply: httpx.Response, param: str) -> None:
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_f08_f09_ids_outside_the_vocabulary(post: Post, beside: None) -> None:
    for bias in ({str(VOCAB): 5}, {"-1": 5}, {"999999999999": 5}, {"abc": 1}, {"10": 101}, {"10": "x"}):
        reply = post(CHAT, messages=USER, max_tokens=4, logit_bias=bias)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("logit_bias")
    for bias in ({str(VOCAB - 1): -100}, {}):
        assert post(CHAT, messages=USER, max_tokens=4, logit_bias=bias).status_code == 200
    for id_ in (VOCAB, 151645, -1, 4611686018427387904):
        refused(post(COMPLETIONS, prompt="x", stop_token_ids=[id_], min_tokens=1, max_tokens=8), "stop_token_ids")


def test_f09_min_tokens(post: Post, beside: None) -> None:
    loud = {"2": 100, "9": 100}
    fields = {"temperature": 0, "min_tokens": 4, "max_tokens": 8, "logit_bias": loud, "return_token_ids": True}
    choice = post(COMPLETIONS, prompt="x", stop_token_ids=[9], **fields).json()["choices"][0]
    assert len(choice["token_ids"]) == 5
    assert not {2, 9} & set(choice["token_ids"][:4])
    assert choice["token_ids"][4] in (2, 9)
    assert choice["finish_reason"] == "stop"


def test_f10_echo_with_logprobs(post: Post, tiny_folder: Path) -> None:
    base = {"prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "temperature": 0, "return_token_ids": True}
    body = post(COMPLETIONS, **base, max_tokens=0).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (base["prompt"], "length")
    assert body["usage"]["completion_tokens"] == 0
    ids = choice["prompt_token_ids"]
    model = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    logprobs = choice["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    for position, value in enumerate(logprobs[1:]):
        assert value == pytest.approx(float(expected[position, ids[position + 1]]), abs=1e-3)
    longer = post(COMPLETIONS, **base, max_tokens=5, ignore_eos=True).json()["choices"][0]["logprobs"]
    assert {len(values) for values in longer.values()} == {len(ids) + 5}
    assert longer["token_logprobs"][: len(ids)] == logprobs


def test_f12_values_and_edges(post: Post, beside: None) -> None:
    for bad in (
        {"repetition_penalty": 0}, {"top_p": -0.1}, {"top_k": -2}, {"min_p": 1.5}, {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1}, {"n": 100000}, {"n": 0}, {"prompt_logprobs": -1}, {"logprobs": 100000},
    ):  # fmt: skip
        refused(post(COMPLETIONS, prompt="x", max_tokens=4, **bad), next(iter(bad)))
    for good in ({"top_k": 0}, {"top_k": -1}, {"top_k": 10**7}, {"top_p": 1}, {"repetition_penalty": 0.001}, {"n": 5}):
        reply = post(COMPLETIONS, prompt="x", max_tokens=4, **good)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == good.get("n", 1)


@pytest.mark.parametrize("length", [16, 17, 33])
def test_f13_prompt_logprobs_and_the_prefix_cache(post: Post, length: int) -> None:
    ids = list(range(100, 100 + length))
    longer = [*range(100, 132), *range(200, 216)]
    told = []
    for prompt in (ids, ids, longer, ids):
        body = post(COMPLETIONS, prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=1).json()
        entries = body["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == len(prompt) == body["usage"]["prompt_tokens"]
        if prompt is ids:
            told.append([next(iter(entry.values()))["logprob"] for entry in entries[1:]])
        echoed = post(COMPLETIONS, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1).json()
        assert len(echoed["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1
    assert told[0] == told[1] == told[2]


def test_f52_structured_output(post: Post, beside: None) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    loose: dict[str, Any] = {"max_tokens": 100, "seed": 1, "logit_bias": {}}
    reply = post(CHAT, messages=USER, response_format=asked, **loose)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    if choice["finish_reason"] == "stop":  # random weights may fill the space between tokens with blanks
        assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
    reply = post(CHAT, messages=USER, guided_regex="(ab|cd){3}", min_tokens=2, **loose)
    assert re.fullmatch("(ab|cd){3}", reply.json()["choices"][0]["message"]["content"])
    refused(post(CHAT, messages=USER, guided_regex="["), "guided_regex")
    refused(post(CHAT, messages=USER, response_format={"type": "banana"}), "response_format.type")

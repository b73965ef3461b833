"""Sampling controls over HTTP: F08, F09, F10, F12, F13 at the edge, and how each reaches the backend."""

import json
import math
from itertools import cycle
from typing import Any

import pytest
from fakes.backend import Script
from fakes.gateway import COMPLETIONS, FakeGateway, error_of, events
from fakes.text import ABC, DEF, EOS, HELLO, VOCAB_SIZE, WORLD, byte_tokenizer, definition, ids_of, served_model
from openai.types.chat import ChatCompletion

from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import Request

pytestmark = pytest.mark.unit
IDS = {f"ids {ids}": ids for ids in ([VOCAB_SIZE], [151645], [-1], [4611686018427387904])}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": "0.1"}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 100000}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"seed": 36893488147419103232}, "seed"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 4097}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids[...]"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS, 9], "stop_token_ids": [9], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[...]"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_f12_values_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    gateway = FakeGateway()
    for post in (gateway.chat, gateway.complete):
        named = error_of(await post(**fields))["param"]
        assert named.partition("[")[0] == param.partition("[")[0]
    assert not gateway.backend.requests
    assert (await gateway.get("/health")).status_code == 200


@pytest.mark.parametrize("fields", [{"logprobs": -1}, {"logprobs": 100000}, {"logprobs": 21}])
async def test_f12_logprobs_out_of_range(fields: dict[str, Any]) -> None:
    gateway = FakeGateway()
    assert error_of(await gateway.complete(**fields))["param"] == "logprobs"
    assert error_of(await gateway.complete(**fields, echo=True))["param"] == "logprobs"
    assert error_of(await gateway.chat(logprobs=True, top_logprobs=fields["logprobs"]))["param"] == "top_logprobs"
    assert not gateway.backend.requests


async def test_f12_max_logprobs_is_configurable() -> None:
    gateway = FakeGateway(config={"max_logprobs": 2})
    assert error_of(await gateway.complete(logprobs=3))["param"] == "logprobs"
    assert error_of(await gateway.complete(prompt_logprobs=3))["param"] == "prompt_logprobs"
    assert error_of(await gateway.chat(logprobs=True, top_logprobs=3))["param"] == "top_logprobs"
    assert (await gateway.complete(logprobs=2)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 0}, {"top_k": -1}, {"top_k": 10000000}, {"top_p": 1}, {"repetition_penalty": 0.001}, {"min_p": 0},
     {"min_p": 1}, {"repetition_penalty": 100}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"best_of": 1},
     {"n": 2, "best_of": 2}, {"min_tokens": 4}, {"allowed_token_ids": [5]}, {"bad_words": []}, {"n": 65},
     {"logit_bias": {}}, {"prompt_logprobs": 0}],
)  # fmt: skip
async def test_f12_good_edges(fields: dict[str, Any]) -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO])))
    for post in (gateway.chat, gateway.complete):
        reply = await post(max_tokens=4, **fields)
        assert reply.status_code == 200, reply.text
        assert "x-nori-ignored-fields" not in reply.headers
        assert len(reply.json()["choices"]) == fields.get("n", 1)


async def test_every_control_reaches_the_backend() -> None:
    gateway = FakeGateway()
    wanted: dict[str, Any] = {
        "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 3,
        "top_k": 7, "seed": 5,
    }  # fmt: skip
    await gateway.chat(**wanted, logit_bias={"7": -100}, allowed_token_ids=[9, 8, 9], prompt_logprobs=2)
    (request,) = gateway.backend.requests
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.sampling.logit_bias == {7: -100}
    assert request.sampling.allowed_token_ids == (9, 8)
    assert request.sampling.prompt_logprobs == 2


async def test_bad_words_are_tokenized_with_and_without_a_space() -> None:
    gateway = FakeGateway()
    await gateway.complete(bad_words=["ab", " ab", "  "])
    (request,) = gateway.backend.requests
    assert request.sampling.bad_word_ids == (tuple(ids_of("ab")), tuple(ids_of(" ab")), tuple(ids_of("  ")))
    many = [f"word {number}" for number in range(200)]  # tokenized off the loop
    await gateway.complete(bad_words=many)
    assert len(gateway.backend.requests[1].sampling.bad_word_ids) == 400
    body = rb'{"prompt":"x","bad_words":["\ud83d"]}'
    assert (await gateway.post(COMPLETIONS, body)).status_code == 400


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
async def test_f09_stop_token_ids_out_of_the_vocabulary(ids: list[int]) -> None:
    gateway = FakeGateway()
    for more in ({}, {"min_tokens": 1}):
        error = error_of(await gateway.complete(stop_token_ids=ids, max_tokens=8, temperature=0, **more))
        assert error["param"] == "stop_token_ids"
    assert not gateway.backend.requests


@pytest.mark.parametrize("padded", [False, True])
async def test_f08_f09_ids_are_bounded_by_the_model_not_the_tokenizer(padded: bool) -> None:
    size = VOCAB_SIZE + 64 if padded else VOCAB_SIZE
    served = served_model()
    if padded:
        tokenizer = Tokenizer(definition(), special_tokens=byte_tokenizer().special_tokens, vocab_size=size)
        served = type(served)(name="smol", tokenizer=tokenizer, template=served.template, created=1)
    gateway = FakeGateway(served=served)
    for fields in ({"stop_token_ids": [size]}, {"allowed_token_ids": [size]}, {"logit_bias": {str(size): 1}}):
        assert error_of(await gateway.complete(**fields))["param"] == next(iter(fields))
    for fields in (
        {"stop_token_ids": [size - 1]},
        {"allowed_token_ids": [size - 1]},
        {"logit_bias": {str(size - 1): 1}},
    ):
        assert (await gateway.complete(**fields)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_f09_min_tokens_delays_stop_strings(stream: bool) -> None:
    gateway = FakeGateway(Script(tokens=[ABC, ABC, ABC, DEF, EOS], chunk=2))
    wanted = [(0, "", 1), (1, "ABC", 2), (2, "ABCABC", 3), (3, "ABCABCABCDEF", 5)]
    for min_tokens, text, count in wanted:
        fields = {"min_tokens": min_tokens, "stop": "ABC", "max_tokens": 8}
        if stream:
            chunks = events(await gateway.complete(**fields, stream=True, stream_options={"include_usage": True}))
            got = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            usage = chunks[-1]["usage"]
        else:
            body = (await gateway.complete(**fields)).json()
            got, usage = body["choices"][0]["text"], body["usage"]
        assert (got, usage["completion_tokens"]) == (text, count)


F10 = {"prompt": "Your answer: Yes", "echo": True, "temperature": 0}


def hello_world(request: Request, number: int) -> Script:
    return Script(tokens=cycle([HELLO, WORLD]))


def check_arrays(logprobs: dict[str, Any], text: str, count: int, prompt: int) -> None:
    assert {len(values) for values in logprobs.values()} == {count}
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value is not None and value <= 0 for value in logprobs["token_logprobs"][1:])
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:k]) for k in range(count)]
    chosen = zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True)
    assert all(token in top for token, top in chosen)
    assert prompt <= count


async def test_f10_scoring_a_prompt_generates_nothing() -> None:
    gateway = FakeGateway(Script(tokens=[EOS]))
    body = (await gateway.complete(**F10, logprobs=1, max_tokens=0)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (F10["prompt"], "length", None)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (16, 0)
    check_arrays(choice["logprobs"], F10["prompt"], 16, 16)
    assert gateway.backend.requests[0].sampling.max_tokens == 1
    assert "prompt_logprobs" not in choice


async def test_f10_variants() -> None:
    gateway = FakeGateway(hello_world)
    plain = (await gateway.complete(**F10, max_tokens=0)).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (F10["prompt"], None)
    body = (await gateway.complete(**F10, logprobs=1, max_tokens=5)).json()
    whole = body["choices"][0]
    assert whole["text"] == F10["prompt"] + "hello world" * 2 + "hello"
    check_arrays(whole["logprobs"], whole["text"], 16 + 5, 16)
    ids = (await gateway.complete(**{**F10, "prompt": ids_of(F10["prompt"])}, logprobs=1, max_tokens=5)).json()
    assert ids["choices"][0]["logprobs"] == whole["logprobs"]
    for fields in ({**F10, "max_tokens": -1}, {"max_tokens": 0}):
        assert error_of(await gateway.complete(**fields))["param"] == "max_tokens"
    assert error_of(await gateway.chat(max_tokens=0))["param"] == "max_tokens"
    assert error_of(await gateway.chat(max_completion_tokens=0))["param"] == "max_completion_tokens"
    error = error_of(await gateway.complete(**F10, max_tokens=0, min_tokens=1))
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_f10_streaming_sends_the_prompt_once(max_tokens: int, chunk: int) -> None:
    gateway = FakeGateway(lambda request, number: Script(tokens=cycle([HELLO, WORLD]), chunk=chunk))
    fields = {**F10, "prompt": ["ab", "cd"], "n": 2, "logprobs": 1, "max_tokens": max_tokens}
    whole = (await gateway.complete(**fields)).json()["choices"]
    chunks = events(await gateway.complete(**fields, stream=True))
    for choice in whole:
        mine = [c for piece in chunks for c in piece["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        parts = [c["logprobs"] for c in mine if c["logprobs"]]
        assert {key: [v for part in parts for v in part[key]] for key in choice["logprobs"]} == choice["logprobs"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


async def test_f10_a_sibling_waits_for_the_prompt_logprobs() -> None:
    def script(request: Request, number: int) -> Script:
        return Script(tokens=[HELLO, WORLD, EOS], start_after=0.05 if number == 0 else 0.0)

    fields = {**F10, "prompt": "ab", "n": 3, "logprobs": 0, "max_tokens": 8}
    chunks = events(await FakeGateway(script).complete(**fields, stream=True))
    for index in range(3):
        texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert texts[0] == "ab"
        assert "".join(texts) == "abhello world"


async def test_prompt_logprobs_in_vllm_shape() -> None:
    gateway = FakeGateway()
    chat = (await gateway.chat(prompt_logprobs=2, max_tokens=2)).json()
    ids = gateway.backend.requests[0].prompt_token_ids
    entries = chat["prompt_logprobs"]
    assert len(entries) == len(ids) == chat["usage"]["prompt_tokens"]
    assert entries[0] is None
    for id_, entry in zip(ids[1:], entries[1:], strict=True):
        assert next(iter(entry)) == str(id_)
        token = byte_tokenizer().token_text(id_)
        assert entry[str(id_)] == {"logprob": -0.5, "rank": 1, "decoded_token": token}
        assert len(entry) <= 3
    ChatCompletion.model_validate(chat)
    body = (await gateway.complete(prompt=["ab", "x"], n=2, prompt_logprobs=0, max_tokens=1)).json()
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [2, 2, 1, 1]
    (entry,) = body["choices"][0]["prompt_logprobs"][1].values()
    assert entry == {"logprob": -0.5, "rank": None, "decoded_token": "b"}


async def test_f13_echo_and_prompt_logprobs_have_their_own_counts() -> None:
    gateway = FakeGateway()
    for logprobs, asked in ((1, 3), (3, 1)):
        body = (await gateway.complete(prompt="abc", echo=True, logprobs=logprobs, prompt_logprobs=asked)).json()
        choice = body["choices"][0]
        assert gateway.backend.requests[-1].sampling.prompt_logprobs == 3
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [logprobs] * 2
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [asked] * 2


@pytest.mark.parametrize("value", [-math.inf, math.nan])
async def test_minus_infinity_is_json(value: float) -> None:
    gateway = FakeGateway(Script(tokens=[HELLO, EOS], logprob=value))
    chat = await gateway.chat(logprobs=True, top_logprobs=1, prompt_logprobs=1)
    complete = await gateway.complete(logprobs=1, echo=True)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for reply in (chat, complete):
        json.loads(reply.content, parse_constant=refuse)
    assert chat.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert next(iter(chat.json()["prompt_logprobs"][1].values()))["logprob"] == -9999.0
    assert complete.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0, -9999.0]


async def test_tokens_as_token_ids() -> None:
    gateway = FakeGateway(Script(tokens=[ABC, EOS]))
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 4}
    logprobs = (await gateway.complete(**fields, logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ABC}", f"token_id:{EOS}"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[f"token_id:{ABC}"], [f"token_id:{EOS}"]]
    assert logprobs["text_offset"] == [0, 3]
    chat = (await gateway.chat(**fields, logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat] == logprobs["tokens"]
    assert bytes(chat[0]["bytes"]) == b"ABC"


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_usage_counts_drafts_only_where_there_were_some(endpoint: str) -> None:
    plain = (await getattr(FakeGateway(), endpoint)()).json()["usage"]["completion_tokens_details"]
    assert plain == {"reasoning_tokens": 0}
    gateway = FakeGateway(Script(tokens=[HELLO, EOS], drafts=(3, 5)))
    usage = (await getattr(gateway, endpoint)(n=2)).json()["usage"]
    wanted = {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}
    assert usage["completion_tokens_details"] == wanted
    chunks = events(await getattr(gateway, endpoint)(n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == usage

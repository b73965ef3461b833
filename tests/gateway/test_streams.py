"""Streams and whole replies of both endpoints: F01, F02, F04, F05, F06."""

from itertools import cycle
from typing import Any

import pytest
from fakes.backend import Script
from fakes.gateway import CHAT, USER, FakeGateway, error_of, events, text_by_index
from fakes.text import ABC, CJK_HEAD, DEF, EMOJI_HEAD, EOS, HELLO, ids_of
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from nori_cluster.errors import EngineFailure

pytestmark = pytest.mark.unit

ENDPOINTS = ["chat", "complete"]
NUMBERS = ("prompt_tokens", "completion_tokens", "total_tokens")


def numbers(usage: dict[str, Any]) -> tuple[int, ...]:
    return tuple(usage[name] for name in NUMBERS)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_f01_usage_in_one_closing_chunk(endpoint: str, n: int) -> None:
    gateway = FakeGateway()
    post = getattr(gateway, endpoint)
    whole = (await post(n=n, max_tokens=4, temperature=0)).json()
    chunks = events(await post(n=n, max_tokens=4, temperature=0, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert last["choices"] == []
    assert numbers(last["usage"]) == numbers(whole["usage"])
    assert last["usage"]["completion_tokens"] == 4 * n
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in others)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None, {"continuous_usage_stats": True}])
async def test_f01_no_usage_unless_asked(endpoint: str, options: Any) -> None:
    more = {} if options is None else {"stream_options": options}
    chunks = events(await getattr(FakeGateway(), endpoint)(max_tokens=4, stream=True, **more))
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_f01_stream_options_need_stream(endpoint: str) -> None:
    for options in ({}, {"include_usage": True}):
        error = error_of(await getattr(FakeGateway(), endpoint)(stream=False, stream_options=options))
        assert error["param"] == "stream_options"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_continuous_usage_runs(endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await getattr(FakeGateway(), endpoint)(max_tokens=4, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


F02_SCRIPTS = {
    "emoji": ([EMOJI_HEAD, 3 + 0x98, 3 + 0x80], "\U0001f600"),
    "cjk": ([CJK_HEAD, 3 + 0xAA], "\u6b6a"),
    "two cjk": ([CJK_HEAD, 3 + 0xAA] * 2, "\u6b6a\u6b6a"),
    "zwj family": (ids_of("\U0001f468\u200d\U0001f469\u200d\U0001f467"), "\U0001f468\u200d\U0001f469\u200d\U0001f467"),
    "cut off": ([EMOJI_HEAD, 3 + 0x98], "\ufffd"),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", F02_SCRIPTS)
async def test_f02_characters_over_several_tokens(endpoint: str, name: str) -> None:
    tokens, text = F02_SCRIPTS[name]
    post = getattr(FakeGateway(Script(tokens=tokens)), endpoint)
    chunks = events(await post(max_tokens=len(tokens), stream=True))
    assert text_by_index(chunks) == {0: text}
    whole = (await post(max_tokens=len(tokens))).json()["choices"][0]
    assert (whole["text"] if "text" in whole else whole["message"]["content"]) == text
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for chunk in chunks for piece in text_by_index([chunk]).values())


async def test_f02_logprobs_carry_raw_bytes() -> None:
    gateway = FakeGateway(Script(tokens=[EMOJI_HEAD, 3 + 0x98]))
    whole = (await gateway.chat(max_tokens=2, logprobs=True, top_logprobs=2)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240, 159], [0x98]]
    assert content[0]["token"] == "\ufffd"
    assert len(content[0]["top_logprobs"]) == 2
    ChatCompletion.model_validate(whole)
    chunks = events(await gateway.chat(max_tokens=2, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    forced = (await gateway.complete(max_tokens=2, logprobs=1)).json()["choices"][0]
    assert forced["finish_reason"] == "length"


async def test_completion_logprobs_are_four_equal_arrays() -> None:
    gateway = FakeGateway(Script(tokens=[ABC, DEF, EOS]))
    for fields in ({"logprobs": 2}, {"logprobs": 0}):
        whole = (await gateway.complete(max_tokens=8, **fields)).json()
        logprobs = whole["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["ABC", "DEF", "<|im_end|>"]
        assert logprobs["text_offset"] == [0, 3, 6]
        assert {len(values) for values in logprobs.values()} == {3}
        assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
        Completion.model_validate(whole)
        chunks = events(await gateway.complete(max_tokens=8, stream=True, **fields))
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        assert {key: [value for part in parts for value in part[key]] for key in logprobs} == logprobs


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ["DEFG"]}, "ABC"),
        ({"stop": "DEFX"}, "ABCDEFG"),
        ({"stop": ["\n", "DEFGH", "EFX"]}, "ABCDEFG"),
        ({"stop": ["FG"], "max_tokens": 3}, "ABCDE"),
    ],
)
async def test_f04_stop_strings_over_chunk_borders(endpoint: str, fields: dict[str, Any], text: str) -> None:
    post = getattr(FakeGateway(Script(tokens=[ABC, DEF, *ids_of("G"), EOS])), endpoint)
    chunks = events(await post(**fields, stream=True))
    assert text_by_index(chunks) == {0: text}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    later = chunks[1:-1] if endpoint == "chat" else chunks[:-1]
    assert all(text_by_index([chunk])[0] for chunk in later), "an empty delta while text was held back"
    whole = (await post(**fields)).json()["choices"][0]
    assert (whole["text"] if "text" in whole else whole["message"]["content"]) == text
    assert whole["finish_reason"] == "stop"


async def test_f04_repeated_token() -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO])))
    chunks = events(await gateway.complete(max_tokens=8, stream=True, stop=["ohe"]))
    assert text_by_index(chunks) == {0: "hell"}
    assert chunks[-1]["choices"][0]["stop_reason"] == "ohe"
    await gateway.quiet()


F05_VARIANTS: list[tuple[list[int], dict[str, Any], str]] = [
    ([ABC, DEF, HELLO], {"n": 2, "max_tokens": 3}, "length"),
    ([EOS], {"max_tokens": 5}, "stop"),
    ([ABC], {"max_tokens": 1}, "length"),
    ([ABC, *ids_of("a"), DEF], {"stop": ["a"], "max_tokens": 20}, "stop"),
]


@pytest.mark.parametrize(("tokens", "fields", "reason"), F05_VARIANTS)
async def test_f05_finish_reason_is_in_every_chunk(tokens: list[int], fields: dict[str, Any], reason: str) -> None:
    chunks = events(await FakeGateway(Script(tokens=tokens)).chat(stream=True, **fields))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert all({"index", "delta", "finish_reason"} <= set(choice) for choice in chunk["choices"])
    for index in range(fields.get("n", 1)):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [reason]
    if tokens == [EOS]:
        assert text_by_index(chunks) == {0: ""}
    if fields == {"max_tokens": 1}:
        assert text_by_index(chunks) == {0: "ABC"}


async def test_f06_parameter_errors_come_before_the_headers() -> None:
    gateway = FakeGateway()
    error = error_of(await gateway.chat(stream=True, n=0, max_tokens=4))
    assert (error["param"], error["type"]) == ("n", "invalid_request_error")
    assert not gateway.backend.requests


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_f06_fault_in_a_stream(endpoint: str) -> None:
    script = Script(tokens=cycle([HELLO]), fault=EngineFailure("worker 0 died"), fault_after=2)
    gateway = FakeGateway(script)
    *chunks, last = events(await getattr(gateway, endpoint)(stream=True, max_tokens=50))
    assert last == {
        "error": {"message": "worker 0 died", "type": "server_error", "param": None, "code": "engine_failure"}
    }
    assert text_by_index(chunks) == {0: "hellohello"}
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    error = error_of(await getattr(gateway, endpoint)(max_tokens=50), 500)
    assert error["code"] == "engine_failure"
    await gateway.quiet()


async def test_prompt_lists_and_n_index_as_prompt_times_n_plus_i() -> None:
    gateway = FakeGateway(
        lambda request, number: Script(tokens=[request.prompt_token_ids[0], *ids_of(str(number)), EOS])
    )
    body = (await gateway.complete(prompt=["a", "b"], n=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 12
    chunks = events(await gateway.complete(prompt=["a", "b"], n=2, stream=True))
    assert text_by_index(chunks) == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_echo_comes_first() -> None:
    gateway = FakeGateway()
    body = (await gateway.complete(prompt=["ab", "c\u0000d"], echo=True, max_tokens=1)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abhello", "c\u0000dhello"]
    chunks = events(await gateway.complete(prompt=[3 + 97, 3 + 98], echo=True, max_tokens=1, stream=True))
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert text_by_index(chunks) == {0: "abhello"}
    assert (await gateway.complete(echo=True, logprobs=1)).status_code == 200


async def test_token_ids_come_back_when_asked() -> None:
    gateway = FakeGateway(Script(tokens=[EMOJI_HEAD, 3 + 0x98, 3 + 0x80, EOS]))
    choice = (await gateway.complete(return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [EMOJI_HEAD, 3 + 0x98, 3 + 0x80, EOS]
    assert choice["prompt_token_ids"] == ids_of("hi")
    chunks = events(await gateway.complete(return_token_ids=True, stream=True))
    assert [id_ for chunk in chunks for id_ in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert "prompt_token_ids" in chunks[0]["choices"][0]
    chat = events(await gateway.chat(return_token_ids=True, stream=True))
    whole = (await gateway.chat(return_token_ids=True)).json()
    assert chat[0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_replies_satisfy_the_client_types() -> None:
    gateway = FakeGateway()
    chat = await gateway.chat(seed=5, temperature=0.5, logit_bias={"5": 1}, user="u", store=False)
    parsed = ChatCompletion.model_validate(chat.json())
    assert parsed.choices[0].message.content == "hello" * 3
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.id.startswith("chatcmpl-")
    assert Completion.model_validate((await gateway.complete()).json()).choices[0].text == "hello" * 3
    request = gateway.backend.requests[0]
    assert (request.seed, request.sampling.temperature, request.sampling.logit_bias) == (5, 0.5, {5: 1.0})
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)
    assert gateway.backend.requests[1].sampling.max_tokens == 16


async def test_max_completion_tokens_wins() -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO])))
    body = (await gateway.post(CHAT, {"messages": USER, "max_tokens": 9, "max_completion_tokens": 2})).json()
    assert body["usage"]["completion_tokens"] == 2
    assert body["model"] == "smol"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_an_event_is_one_line_for_every_client(endpoint: str) -> None:
    """Text may hold what str.splitlines takes for the end of a line: NEL, LS, PS and control characters."""
    text = "a\u0085b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
    gateway = FakeGateway(Script(tokens=[*(3 + byte for byte in text.encode()), EOS]))
    reply = await getattr(gateway, endpoint)(stream=True, max_tokens=100)
    lines = [line for line in reply.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert text_by_index(events(reply))[0] == text


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_the_fingerprint_names_the_weights_that_spoke(endpoint: str) -> None:
    gateway = FakeGateway(Script(tokens=[*[HELLO] * 3, EOS], weights_id="ab12@2"))
    post = getattr(gateway, endpoint)
    assert (await post(max_tokens=4)).json()["system_fingerprint"] == "ab12@2"
    chunks = [chunk for chunk in events(await post(n=2, max_tokens=4, stream=True)) if chunk["choices"]]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"ab12@2"}
    assert "system_fingerprint" not in (await getattr(FakeGateway(), endpoint)(max_tokens=4)).json()

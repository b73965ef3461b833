"""Message normalisation: what templates see, and which field a refusal names."""

from typing import Any

import pytest

from nori_cluster.errors import ClientError
from nori_cluster.frontend.messages import normalise_messages

pytestmark = pytest.mark.unit
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}


def one(message: Any) -> dict[str, Any]:
    return normalise_messages([message])[0]


def with_arguments(arguments: Any) -> Any:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    return one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"]


def refused(message: Any) -> str | None:
    with pytest.raises(ClientError) as error:
        one(message)
    assert error.value.http_status == 400
    return error.value.param


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hello", "Hello"),
        ([{"type": "text", "text": "Hello"}], "Hello"),
        ([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "Hello"),
        ([], ""),
        ("", ""),
    ],
)
def test_f22_parts_are_concatenated(content: Any, text: str) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": text}


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "nope", "text": "x"}],
        [{"type": ["text"], "text": "x"}],
        [{"text": "x"}],
        ["plain"],
        {"type": "text", "text": "x"},
        3,
        True,
    ],
)
def test_f22_refusals_name_the_content(content: Any) -> None:
    assert refused({"role": "user", "content": content}) == "messages[0].content"


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_f23_assistant_with_calls_needs_no_content(message: dict[str, Any]) -> None:
    found = one({"role": "assistant", "tool_calls": [CALL], **message})
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_f23_null_calls_are_absent() -> None:
    assert one({"role": "assistant", "content": "x", "tool_calls": None}) == {"role": "assistant", "content": "x"}
    assert one({"role": "assistant", "content": "x", "tool_calls": []}) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("null", {}),
        ("", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("{oops", "{oops"),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_f23_arguments(arguments: Any, expected: Any) -> None:
    assert with_arguments(arguments) == expected


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_f23_null_content_without_calls(role: str) -> None:
    assert refused({"role": role, "content": None, "tool_call_id": "c1"}) == "messages[0].content"
    assert refused({"role": role, "tool_call_id": "c1"}) == "messages[0].content"


def test_f23_tool_needs_its_call() -> None:
    assert refused({"role": "tool", "content": "sunny"}) == "messages[0].tool_call_id"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "root", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "reasoning": 3}, "messages[0].reasoning_content"),
    ],
)
def test_refusals_name_the_field(message: Any, param: str) -> None:
    assert refused(message) == param


@pytest.mark.parametrize("messages", [None, "hi", {}, []])
def test_not_a_list(messages: Any) -> None:
    with pytest.raises(ClientError) as error:
        normalise_messages(messages)
    assert error.value.param == "messages"


def test_roles_of_other_times() -> None:
    assert one({"role": "developer", "content": "x"})["role"] == "system"
    assert normalise_messages([{"role": "developer", "content": "x"}], keep_developer=True)[0]["role"] == "developer"
    assert one({"role": "function", "name": "f", "content": "x"})["role"] == "tool"
    call = one({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}})["tool_calls"]
    assert call == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_input_is_left_alone() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    before = repr(message)
    one(message)
    assert repr(message) == before


def test_reasoning_is_readable_under_both_names() -> None:
    found = one({"role": "assistant", "content": "x", "reasoning": "because"})
    assert found["reasoning"] == found["reasoning_content"] == "because"

"""Chat messages as clients send them → the one shape chat templates are given. Pure.

template renders the result; gateway and rpc pass what they received. Every refusal is a ClientError naming the field.
"""

import json
from typing import Any

from nori_cluster.errors import ClientError, MissingParameter, UnsupportedParameter

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MEDIA_PARTS = frozenset({"image_url", "input_audio", "file", "video_url", "audio_url", "image", "video", "audio"})


def normalise_messages(messages: Any, *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """New messages whose content is a string and whose null fields are absent.

    Content parts are concatenated without a separator. The legacy role `function` becomes `tool`, `developer` becomes
    `system` unless the template knows it. tool_calls[].function.arguments become objects where they are JSON objects
    ("", null and "null" are {}); other text stays text.
    """
    if not isinstance(messages, list):
        raise ClientError(f"messages must be a list, found {_kind(messages)}", param="messages")
    if not messages:
        raise ClientError("messages must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]", keep_developer) for i, message in enumerate(messages)]


def _message(message: Any, at: str, keep_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ClientError(f"{at} must be an object, found {_kind(message)}", param=at)
    found = {key: value for key, value in message.items() if value is not None}
    role = found.get("role")
    if role is None:
        raise MissingParameter(f"{at}.role is required", param=f"{at}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise ClientError(f"{at}.role must be one of {', '.join(sorted(ROLES))}", param=f"{at}.role")
    found["role"] = "system" if role == "developer" and not keep_developer else "tool" if role == "function" else role
    if role == "assistant":
        _assistant(found, at)
    else:
        found.pop("tool_calls", None)
        found.pop("function_call", None)
    if role == "tool" and not isinstance(found.get("tool_call_id"), str):
        raise MissingParameter(f"{at}.tool_call_id is required in a tool message", param=f"{at}.tool_call_id")
    if "name" in found and not isinstance(found["name"], str):
        raise ClientError(f"{at}.name must be a string", param=f"{at}.name")
    found["content"] = _content(found, at)
    return found


def _assistant(found: dict[str, Any], at: str) -> None:
    """Tool calls and reasoning of one assistant message, in place."""
    calls = found.pop("tool_calls", [])
    legacy = found.pop("function_call", None)
    if not isinstance(calls, list):
        raise ClientError(f"{at}.tool_calls must be a list, found {_kind(calls)}", param=f"{at}.tool_calls")
    if not calls and legacy is not None:
        found["tool_calls"] = [{"type": "function", "function": _function(legacy, f"{at}.function_call")}]
    elif calls:
        found["tool_calls"] = [_tool_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    reasoning = found.get("reasoning_content", found.get("reasoning"))
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise ClientError(f"{at}.reasoning_content must be a string", param=f"{at}.reasoning_content")
        found["reasoning_content"] = found["reasoning"] = reasoning


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ClientError(f"{at} must be an object, found {_kind(call)}", param=at)
    if call.get("type", "function") != "function":
        raise UnsupportedParameter(f"{at}.type {call['type']!r:.80} is not served; use 'function'", param=f"{at}.type")
    kept = {key: value for key, value in call.items() if value is not None}
    return kept | {"type": "function", "function": _function(call.get("function"), f"{at}.function")}


def _function(function: Any, at: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ClientError(f"{at} must be an object with a name", param=at)
    return function | {"arguments": _arguments(function.get("arguments"), f"{at}.arguments")}


def _arguments(arguments: Any, at: str) -> Any:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise ClientError(f"{at} must be JSON text, found {_kind(arguments)}", param=at)
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value if isinstance(value, dict) else arguments


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _content(found: dict[str, Any], at: str) -> str:
    at = f"{at}.content"
    content = found.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if found["role"] == "assistant" and found.keys() & {"tool_calls", "reasoning_content", "refusal"}:
            return ""
        needed = " unless it has tool_calls" if found["role"] == "assistant" else ""
        raise MissingParameter(f"{at} is required in a message of role {found['role']}{needed}", param=at)
    if not isinstance(content, list):
        raise ClientError(f"{at} must be a string or a list of parts, found {_kind(content)}", param=at)
    return "".join([_part(part, i, at) for i, part in enumerate(content)])


def _part(part: Any, index: int, at: str) -> str:
    if not isinstance(part, dict):
        raise ClientError(f"{at}: part {index} must be an object like {{'type': 'text', 'text': …}}", param=at)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            raise UnsupportedParameter(f"{at}: part {index}: this model takes text only, not {kind}", param=at)
        raise ClientError(f"{at}: part {index}: unknown type {kind!r:.80}", param=at)
    text = part.get(kind)
    if not isinstance(text, str):
        raise ClientError(f"{at}: part {index} of type {kind} must have {kind!r} as a string", param=at)
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

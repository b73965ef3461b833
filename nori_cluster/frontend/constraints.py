"""Constraints of a request: from the fields of three API dialects to one Constraint, and whether it can be served.

The edge calls constraint_of on a decoded body and ConstraintChecker.check before admission. Nothing here raises
anything but NoriErrors, and no grammar is compiled in this process.
"""

import json
import re
from typing import Any

import msgspec

from nori_cluster.errors import ClientError, MissingParameter, UnsupportedParameter
from nori_cluster.frontend.constraint_checker import ConstraintChecker
from nori_cluster.grammar.limits import MAX_ENTRIES, GrammarError, check_text
from nori_cluster.types import Constraint

__all__ = ["ConstraintChecker", "ConstraintFields", "constraint_of"]

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
BACKENDS = ("auto", "guidance", "llguidance")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# structured_outputs key, guided_* or SGLang field → kind
_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
}


class ConstraintFields(msgspec.Struct, kw_only=True):
    """The fields as they were sent (decoded JSON, not checked); null and absent are the same."""

    response_format: Any = None  # OpenAI
    structured_outputs: Any = None  # vLLM
    guided_json: Any = None  # vLLM before 0.12
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    regex: Any = None  # SGLang
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None


def constraint_of(fields: ConstraintFields) -> tuple[Constraint, str] | None:
    """The one constraint of a request and the name of its field; None without one.

    Raises ClientError for a wrong shape, for two constraints, and for options that would not be honoured.
    """
    _check_options(fields)
    found: list[tuple[str, str, Any]] = []  # param, kind, value
    if fields.response_format is not None:
        found += _response_format(fields.response_format)
    if fields.structured_outputs is not None:
        found += _structured_outputs(fields.structured_outputs)
    for name, kind in _FIELDS.items():
        value = getattr(fields, name)
        if value is not None:
            found.append((name, kind, value))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(param for param, _, _ in found)
        raise ClientError(f"only one constraint can be given, not {names}", param=found[1][0])
    param, kind, value = found[0]
    return _constraint(param, kind, value), param


def _check_options(fields: ConstraintFields) -> None:
    backend = fields.guided_decoding_backend
    if backend is not None and backend not in BACKENDS:
        raise UnsupportedParameter(
            "guided_decoding_backend must be one of " + ", ".join(BACKENDS), param="guided_decoding_backend"
        )
    if fields.guided_whitespace_pattern is not None:
        raise UnsupportedParameter("guided_whitespace_pattern is not supported", param="guided_whitespace_pattern")


def _response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in FORMATS:
        raise ClientError("response_format.type must be one of " + ", ".join(FORMATS), param="response_format.type")
    if kind == "text":
        return []
    if kind == "structural_tag":
        return [("response_format", "structural_tag", value)]
    if kind == "json_object":
        if value.get("schema") is not None:  # llama.cpp and others
            return [("response_format.schema", "json_schema", value["schema"])]
        return [("response_format", "json_object", None)]
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise MissingParameter(
            "response_format.json_schema must be an object with name and schema", param="response_format.json_schema"
        )
    at = "response_format.json_schema"
    name, strict = inner.get("name"), inner.get("strict")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ClientError(f"{at}.name must have 1 to 64 letters, digits, _ or -", param=f"{at}.name")
    if strict is not None and not isinstance(strict, bool):
        raise ClientError(f"{at}.strict must be a boolean", param=f"{at}.strict")
    if inner.get("schema") is None:
        raise MissingParameter(f"{at}.schema is missing", param=f"{at}.schema")
    return [(f"{at}.schema", "json_schema", inner["schema"])]


def _structured_outputs(value: Any) -> list[tuple[str, str, Any]]:
    if not isinstance(value, dict):
        raise ClientError("structured_outputs must be an object", param="structured_outputs")
    found: list[tuple[str, str, Any]] = []
    for key, inner in value.items():
        param = f"structured_outputs.{key}"
        if inner is None or (key != "json" and inner is False):
            continue
        if key == "json_object":
            if inner is not True:
                raise ClientError(f"{param} must be a boolean", param=param)
            found.append((param, "json_object", None))
        elif key in _KINDS:
            found.append((param, _KINDS[key], inner))
        elif key != "disable_fallback":  # whitespace_pattern, disable_any_whitespace, disable_additional_properties
            raise UnsupportedParameter(f"{param} is not supported", param=param)
    if not found:
        raise ClientError(
            "structured_outputs must have one of json, regex, choice, grammar, json_object, structural_tag",
            param="structured_outputs",
        )
    return found


def _constraint(param: str, kind: str, value: Any) -> Constraint:
    if kind == "json_object":
        return Constraint("json_object")
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise ClientError(f"{param} must be a list of at least one string", param=param)
        if len(value) > MAX_ENTRIES:
            raise ClientError(f"{param} has {len(value)} choices, at most {MAX_ENTRIES}", param=param)
    elif kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise ClientError(f"{param} must be a string", param=param)
    elif not isinstance(value, str | dict | bool):
        raise ClientError(f"{param} must be an object or a string of JSON", param=param)
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        check_text(text)
    except GrammarError as error:
        raise ClientError(f"{param} {error}", param=param) from error
    except RecursionError as error:
        raise ClientError(f"{param} is nested too deeply", param=param) from error
    return Constraint(kind, text)  # type: ignore[arg-type]  # one of the literals above

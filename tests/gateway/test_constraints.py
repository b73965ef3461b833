"""Structured output over HTTP and gRPC: which field becomes which constraint, and what is refused by name (F52)."""

import json
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from fakes.backend import Script
from fakes.gateway import FakeGateway, error_of
from fakes.text import HELLO

from nori_cluster.frontend.constraints import ConstraintFields
from nori_cluster.gateway.fields import NEUTRAL, PLANNED
from nori_cluster.types import Constraint

pytestmark = pytest.mark.unit
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
GATEWAY = FakeGateway(Script(tokens=cycle([HELLO])))


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    yield
    GATEWAY.service.close()


def json_of(constraint: Constraint | None) -> Any:
    assert constraint is not None
    return json.loads(constraint.text)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": FORMAT}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, "json_schema"),
        ({"guided_regex": "[ab]+"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar"),
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
    ],
)
async def test_constraints_reach_the_backend(endpoint: str, fields: dict[str, Any], kind: str) -> None:
    reply = await getattr(GATEWAY, endpoint)(**fields, max_tokens=2)
    assert reply.status_code == 200, reply.text
    assert "x-nori-ignored-fields" not in reply.headers
    constraint = GATEWAY.backend.requests[-1].sampling.constraint
    assert constraint is not None
    assert constraint.kind == kind
    if kind == "json_schema":
        assert json_of(constraint) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "(?<=x)*"}, "guided_regex"),
        ({"guided_regex": "(" * 5000}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar"),
        ({"guided_decoding_backend": "outlines", "guided_regex": "a"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " ", "guided_json": {}}, "guided_whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
        ({"response_format": {"type": "banana"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "banana"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_f52_bad_constraints_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    before, began = len(GATEWAY.backend.requests), time.monotonic()
    for post in (GATEWAY.chat, GATEWAY.complete):
        assert error_of(await post(**fields))["param"] == param
        assert error_of(await post(**fields, stream=True))["param"] == param
    assert time.monotonic() - began < 5
    assert len(GATEWAY.backend.requests) == before
    assert (await GATEWAY.get("/health")).status_code == 200


async def test_text_and_null_ask_for_nothing() -> None:
    nulls = dict.fromkeys(ConstraintFields.__struct_fields__)
    for fields in ({"response_format": {"type": "text"}}, nulls):
        assert (await GATEWAY.chat(**fields, max_tokens=1)).status_code == 200
        assert GATEWAY.backend.requests[-1].sampling.constraint is None


def test_no_constraint_field_is_planned_or_neutral() -> None:
    assert not set(ConstraintFields.__struct_fields__) & (NEUTRAL | set(PLANNED))


async def test_the_document_names_the_fields() -> None:
    document = (await GATEWAY.get("/openapi.json")).json()
    for name in ("ChatRequest", "CompletionRequest"):
        properties = document["components"]["schemas"][name]["properties"]
        assert {"response_format", "min_p", "bad_words", "prompt_logprobs", "structured_outputs"} <= properties.keys()

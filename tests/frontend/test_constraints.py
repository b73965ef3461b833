"""Which constraint a request has, and field report F52: hostile ones end with 400 in bounded time and leave nothing."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.tokenizers import byte_level

from nori_cluster.errors import ClientError
from nori_cluster.frontend import constraint_checker
from nori_cluster.frontend.constraints import ConstraintChecker, ConstraintFields, constraint_of
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.types import Constraint

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.fixture(scope="module")
def checker() -> Iterator[ConstraintChecker]:
    made = ConstraintChecker(Tokenizer(byte_level(), eos_token_ids=(1,)))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (schema_format(SCHEMA), "json_schema", SCHEMA, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            "json_object",
            "",
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_choice": ["é"]}, "choice", ["é"], "guided_choice"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "guided_grammar"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"', "ebnf"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "json_schema"),
    ],
)
def test_every_dialect(fields: dict[str, Any], kind: str, text: Any, param: str) -> None:
    found = constraint_of(ConstraintFields(**fields))
    assert found is not None
    constraint, name = found
    assert (constraint.kind, name) == (kind, param)
    assert constraint.text == text or json.loads(constraint.text) == text


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_decoding_backend": "guidance"}])
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert constraint_of(ConstraintFields(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex"),
        ({"response_format": {"type": "json_object"}, "ebnf": "x"}, "response_format and ebnf"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.regex and structured_outputs.choice",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "disable_any_whitespace"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"response_format": {"type": "banana"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}}, "strict"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 5001}, "5001 choices"),
        ({"guided_regex": 1}, "guided_regex must be a string"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": "a" * 300_000}, "guided_regex is too long"),
        ({"guided_regex": "\ud800"}, "surrogate"),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ],
)
def test_shapes_that_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ClientError) as caught:
        constraint_of(ConstraintFields(**fields))
    assert named in caught.value.message
    assert caught.value.param


def siblings(count: int) -> dict[str, Any]:
    """A schema whose $refs have siblings: llguidance merges them one by one, for minutes."""
    definitions: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for i in range(1, count):
        below = {"$ref": f"#/$defs/d{i - 1}", "type": "object"}
        definitions[f"d{i}"] = {"type": "object", "properties": {"a": below, "b": below}}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": definitions}


def products(factors: int) -> dict[str, Any]:
    """allOf of anyOfs, which multiply out."""
    names = [[f"a{j}_{i}" for i in range(8)] for j in range(factors)]
    return {
        "allOf": [{"anyOf": [{"type": "object", "properties": {n: {"type": "integer"}}} for n in row]} for row in names]
    }


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "["}, "guided_regex has an unclosed character class"),
    ({"guided_regex": "(?<=x)*"}, "guided_regex has a lookaround"),
    ({"guided_regex": "(a{1,1000}){1,1000}"}, "guided_regex repeats up to 1000000 times"),
    ({"guided_regex": "(" * 5000}, "guided_regex is nested too deeply"),
    ({"guided_regex": "(a?)" * 9 + "{1,9}" * 3}, "quantifier after a quantifier"),
    ({"guided_regex": r"(\w+\s?)*(a)\1"}, "escape"),
    (schema_format({"type": "object", "properties": {"foo": "bar"}}), '"bar" at #/properties/foo'),
    (schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "'$ref'"),
    (schema_format({"enum": [f"string {i}" for i in range(100_000)]}), "too long"),
    (schema_format({"enum": list(range(6000))}), "enum"),
    (schema_format(nested(80)), "nested too deeply"),
    (schema_format(nested(300)), "nested too deeply"),
    (schema_format(siblings(26)), "cannot be compiled: it is too complex"),
    (schema_format(products(4)), "compile"),
    (schema_format({"anyOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}]}), "'oneOf' at #/anyOf/0, whose"),
    ({"guided_json": {"properties": {"a": {}}, "maxProperties": 3}}, "'maxProperties' at #, beside optional"),
    (schema_format({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}), "'not' at #/properties/a"),
    ({"guided_json": "[" * 3000}, "nested too deeply"),
    ({"guided_json": "{"}, "guided_json is no JSON value"),
    ({"guided_grammar": "root ::= root"}, "guided_grammar cannot be compiled: nothing matches it"),
    ({"guided_grammar": "root ::= " + "(" * 3000}, "nested too deeply"),
    ({"guided_grammar": "start: " + "(" * 3000}, "nested too deeply"),
    ({"guided_grammar": "root ::= missing"}, "missing"),
    ({"guided_grammar": "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)) + "root ::= r0"}, "guided_grammar"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"structural_tag": "{}"}, "structural_tag has no 'structures'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), HOSTILE)
async def test_hostile_constraints_end_with_400_in_time(
    checker: ConstraintChecker, fields: dict[str, Any], named: str
) -> None:
    gaps: list[float] = []

    async def stream() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            gaps.append(time.perf_counter() - began)

    beside = asyncio.create_task(stream())
    await asyncio.sleep(0.02)
    began = time.perf_counter()
    with pytest.raises(ClientError) as caught:
        found = constraint_of(ConstraintFields(**fields))
        assert found is not None
        await checker.check(*found)
    took = time.perf_counter() - began
    beside.cancel()
    assert named in caught.value.message
    assert caught.value.http_status == 400
    assert len(caught.value.message) < 500
    assert took < 5
    assert max(gaps) < 1


def resident(pid: int | str = "self") -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
async def test_hostile_constraints_leave_no_memory_thread_or_process() -> None:
    checker = ConstraintChecker(Tokenizer(byte_level(), eos_token_ids=(1,)))
    await checker.check(Constraint("regex", "a"), "regex")
    child = checker._process._child
    assert child is not None
    own, childs, threads = resident(), resident(child.pid), threading.active_count()
    for fields, _ in HOSTILE:
        with pytest.raises(ClientError):
            await checker.check(*constraint_of(ConstraintFields(**fields)))  # type: ignore[misc]
    assert child.poll() is not None, "one of them had to be killed"
    again = checker._process._child
    total = resident() - own + ((resident(again.pid) if again else 0) - childs)
    assert total < 200 << 20
    assert threading.active_count() == threads
    checker.close()
    assert again is None or again.poll() is not None


async def test_good_constraints_pass_once_compiled_and_from_the_cache(checker: ConstraintChecker) -> None:
    for number in range(3):
        constraint = Constraint("json_schema", json.dumps({**SCHEMA, "title": f"number {number}"}))
        await checker.check(constraint, "guided_json")
        began = time.perf_counter()
        await checker.check(constraint, "guided_json")
        assert time.perf_counter() - began < 0.01
    checker.check_now(Constraint("choice", '["a"]'), "guided_choice")
    with pytest.raises(ClientError, match="guided_regex has an unclosed"):
        checker.check_now(Constraint("regex", "("), "guided_regex")


async def test_a_child_that_is_gone_is_started_again(checker: ConstraintChecker) -> None:
    checker.check_now(Constraint("regex", "x1"), "regex")
    child = checker._process._child
    assert child is not None
    child.kill()
    child.wait()
    await checker.check(Constraint("regex", "x2"), "regex")


async def test_same_constraint_at_once_is_compiled_once(
    checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Constraint] = []
    verdict = constraint_checker.CompilerProcess.verdict

    def counting(self: constraint_checker.CompilerProcess, constraint: Constraint) -> str:
        asked.append(constraint)
        return verdict(self, constraint)

    monkeypatch.setattr(constraint_checker.CompilerProcess, "verdict", counting)
    await asyncio.gather(*(checker.check(Constraint("regex", "once"), "regex") for _ in range(20)))
    assert len(asked) == 1


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)

"""Which keywords are enforced, which are annotations and which are refused by name."""

import json
from typing import Any

import pytest

from nori_cluster.grammar import GrammarError, grammar_of
from nori_cluster.grammar.limits import MAX_ENTRIES, MAX_NODES
from nori_cluster.grammar.schema import EXACT, enforced
from nori_cluster.types import Constraint

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {}),
        ("not", False),
        ("contains", {}),
        ("minContains", 0),
        ("uniqueItems", True),
        ("uniqueItems", 1),
        ("propertyNames", {"pattern": "^a"}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {}),
        ("dependencies", {}),
        ("$dynamicRef", "#a"),
        ("$recursiveRef", "#"),
        ("extends", {}),
        ("disallow", "string"),
        ("divisibleBy", 2),
        ("formatMinimum", "2020-01-01"),
        ("format", "uri-template"),
        ("format", "email "),
        ("format", 3),
        ("minProperties", 2),
        ("$ref", "https://example.com/schema"),
        ("$ref", "other.json"),
        ("$ref", "#anchor"),
        ("$ref", "#/nowhere"),
        ("$ref", 1),
        ("type", "any"),
        ("type", []),
        ("type", {}),
        ("required", True),
        ("required", [1]),
        ("enum", []),
        ("enum", "ab"),
        ("enum", [EXACT + 1]),
        ("const", 1e-9),
        ("const", "\x01"),
        ("minimum", "1"),
        ("minimum", True),
        ("maximum", 1e300),
        ("multipleOf", 0),
        ("multipleOf", -1),
        ("minLength", -1),
        ("maxLength", 1.5),
        ("maxItems", "3"),
        ("pattern", "("),
        ("pattern", "(?=a)"),
        ("pattern", r"\bword"),
        ("pattern", 1),
        ("properties", []),
        ("properties", {"a": "integer"}),
        ("patternProperties", {"[": {}}),
        ("additionalProperties", None),
        ("items", None),
        ("items", "string"),
        ("prefixItems", {}),
        ("allOf", []),
        ("anyOf", {}),
    ],
)
def test_what_is_not_enforced_is_refused_with_keyword_and_path(keyword: str, value: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        enforced({"properties": {"x/y": {"items": {keyword: value}}}})
    assert "#/properties/x~1y/items" in str(caught.value)
    where = str(value[0] if isinstance(value, list) and value else value)
    assert f"'{keyword}'" in str(caught.value) or keyword in ("properties", "items") or where in str(caught.value)


def test_if_is_refused_only_where_it_asserts() -> None:
    with pytest.raises(GrammarError, match="'if' at #"):
        enforced({"if": {}, "then": {}})
    assert enforced({"if": {}}) == enforced({"then": {}}) == {}


@pytest.mark.parametrize(
    "annotations",
    [
        {"title": "t", "description": "d", "default": {"not": 1}, "examples": [{"not": {}}], "$comment": "c"},
        {"deprecated": True, "readOnly": True, "writeOnly": False, "contentEncoding": "base64"},
        {"x-order": 1, "enumNames": ["a"], "discriminator": {"propertyName": "k"}, "nullable": False},
        {"$id": "https://example.com/s", "$anchor": "a", "$vocabulary": {}, "$dynamicAnchor": "b"},
        {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}},
        {"uniqueItems": False, "propertyNames": True, "unevaluatedItems": True, "unevaluatedProperties": {}},
        {"$defs": {"unused": {"not": {}}}, "definitions": {"unused": {"if": {}, "then": {}}}},
    ],
)
def test_annotations_pass_and_are_dropped(annotations: dict[str, Any]) -> None:
    assert enforced({"type": "integer", **annotations}) == {"type": "integer"}


def test_names_are_no_keywords() -> None:
    names = {name: {"type": "null"} for name in ("not", "if", "then", "$ref", "x-guidance", "contains")}
    assert enforced({"properties": names}) == {"properties": names}
    assert enforced({"const": {"not": 1}, "enum": [{"$ref": 2}]}) == {"const": {"not": 1}, "enum": [{"$ref": 2}]}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        # items of older drafts
        ({"items": [{"const": 1}], "additionalItems": False}, {"prefixItems": [{"const": 1}], "items": False}),
        ({"items": {"type": "null"}, "additionalItems": {"not": 1}}, {"items": {"type": "null"}}),
        ({"prefixItems": [True], "additionalItems": {}, "items": False}, {"prefixItems": [True], "items": False}),
        ({"minimum": 1, "exclusiveMinimum": True}, {"minimum": 1, "exclusiveMinimum": True}),
        # what unevaluated… means without anything that could evaluate
        ({"properties": {"a": True}, "unevaluatedProperties": False},
         {"properties": {"a": True}, "additionalProperties": False}),
        ({"prefixItems": [True], "unevaluatedItems": False}, {"prefixItems": [True], "items": False}),
        ({"items": {}, "unevaluatedItems": False}, {"items": {}}),
        # a minimum that the required names fulfil
        ({"required": ["a", "b", "a"], "minProperties": 2}, {"required": ["a", "b"]}),
        ({"minProperties": 1}, {"minProperties": 1}),
        ({"type": "array", "minProperties": 5}, {"type": "array", "minProperties": 5}),
        # formats concern strings
        ({"type": "integer", "format": "int64"}, {"type": "integer"}),
        ({"type": ["integer", "number", "null"]}, {"type": ["number", "null"]}),
        ({"maxLength": 3.0}, {"maxLength": 3}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ],
)  # fmt: skip
def test_one_dialect_is_written(schema: Any, written: Any) -> None:
    assert enforced(schema) == written


def test_one_of_distinct_literals_is_any_of() -> None:
    distinct = [{"const": 1, "title": "one"}, {"enum": [2, True, {"a": 1}]}]
    written = [{"const": 1}, {"enum": [2, True, {"a": 1}]}]
    assert enforced({"oneOf": distinct}) == {"anyOf": written}
    assert enforced({"oneOf": distinct, "anyOf": [{}]}) == {"anyOf": [{}], "allOf": [{"anyOf": written}]}
    equal = [{"const": {"a": 1, "b": [2]}}, {"const": {"b": [2.0], "a": 1.0}}]
    assert enforced({"oneOf": equal}) == {"oneOf": equal}


def tagged(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], **more}


A, B = tagged({"const": "a"}), tagged({"enum": ["b", "c"]})
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("alternatives", "exclusive"),
    [
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "null"}], True),
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], False),
        ([{"$ref": "#/$defs/A"}, tagged({"type": "string"})], False),
        ([{"$ref": "#/$defs/A"}, {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}], True),
        ([{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, B | {"type": ["object", "null"]}], False),
        ([{"properties": A["properties"], "type": "object"}, {"properties": B["properties"], "type": "object"}], False),
        ([{"properties": A["properties"], "type": "object"}, B], True),
        ([{"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"x": {}}}]}, {"allOf": [B]}], True),
        ([tagged({"$ref": "#/$defs/K", "enum": [1]}), tagged({"const": 2})], True),
        ([CLOSED | {"required": ["x"]}, CLOSED | {"required": ["y"]}], True),
        ([CLOSED | {"required": ["x"], "properties": {"x": {}, "y": {}}}, CLOSED | {"properties": {"x": {}}}], False),
        ([CLOSED | {"required": ["x"]}, {"type": "object", "required": ["y"]}], True),
        ([{"type": "object", "required": ["x"]}, {"type": "object", "required": ["y"]}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "integer"}, {"type": ["string", "null"]}], True),
        ([{"const": 1}, {"const": True}, {"const": 1.5}, {"enum": ["1", None]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"minimum": 0}], False),
        ([True, {"type": "null"}], False),
        ([True, False], True),
        ([{"$ref": "#"}, {"type": "null"}], False),
    ],
)
def test_one_of_is_any_of_where_alternatives_exclude_each_other(alternatives: list[Any], exclusive: bool) -> None:
    schema = {"items": {"oneOf": alternatives}, "$defs": {"A": A, "B": B, "K": {"type": "integer"}}}
    items: Any = enforced(schema)["items"]  # type: ignore[index]
    assert set(items) == {"anyOf" if exclusive else "oneOf"}


def test_keywords_beside_a_ref_do_not_tell_alternatives_apart_in_old_drafts() -> None:
    any_kind = {"$ref": "#/definitions/any"}
    schema = {"oneOf": [{**any_kind, "const": 1}, {**any_kind, "const": 2}], "definitions": {"any": {}}}
    assert "anyOf" in enforced(schema)  # type: ignore[operator]
    assert enforced(schema | {"$schema": "http://json-schema.org/draft-07/schema#"}) == {
        "oneOf": [{"$ref": "#/$defs/r1"}, {"$ref": "#/$defs/r1"}],
        "$defs": {"r1": {}},
    }


def test_unevaluated_beside_applicators_is_refused() -> None:
    with pytest.raises(GrammarError, match="'unevaluatedProperties' at # beside"):
        enforced({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False})


def test_refs_are_written_under_defs() -> None:
    tree = {"type": "object", "properties": {"x": {"$ref": "#/definitions/a~1b%25"}, "y": {"$ref": "#"}}}
    assert enforced(
        {**tree, "definitions": {"a/b%": {"type": "array", "items": {"$ref": "#/definitions/a~1b%25"}}}}
    ) == {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/r1"}, "y": {"$ref": "#"}},
        "$defs": {"r1": {"type": "array", "items": {"$ref": "#/$defs/r1"}}},
    }
    own = {"$id": "https://example.com/s.json", "$ref": "https://example.com/s.json#/x/0", "x": [{"type": "null"}]}
    assert enforced(own) == {"$ref": "#/$defs/r1", "$defs": {"r1": {"type": "null"}}}


def test_a_ref_reaches_only_walked_schemas() -> None:
    with pytest.raises(GrammarError, match="'not' at #/examples/0"):
        enforced({"$ref": "#/examples/0", "examples": [{"not": {}}]})


def test_an_inner_id_around_refs_is_refused() -> None:
    inner = {"$id": "other", "$defs": {"a": {}}, "$ref": "#/$defs/a"}
    with pytest.raises(GrammarError, match="'\\$id' at #/properties/p"):
        enforced({"properties": {"p": inner}, "$defs": {"a": {"type": "null"}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"type": "null"}, {"oneOf": [{"$ref": "#/$defs/a"}]}], "$defs": {"a": {"anyOf": [{"$ref": "#"}]}}},
        {"properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_refs_without_progress_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="comes back to itself"):
        enforced(schema)


def test_refs_with_progress_pass() -> None:
    tree = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}
    assert enforced(tree) == tree


def test_order_of_properties_is_that_of_the_schema() -> None:
    first = {"allOf": [{"properties": {"z": {}}}], "properties": {"a": {}}, "required": ["a"], "title": "t"}
    assert list(enforced(first)) == ["allOf", "properties", "required"]  # type: ignore[arg-type]
    second = {"required": ["a"], "properties": {"a": {}}, "allOf": [{"properties": {"z": {}}}]}
    assert list(enforced(second)) == ["properties", "required", "allOf"]  # type: ignore[arg-type]


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        (ENDLESS, False),
        (ENDLESS | {"type": ["object", "null"]}, True),
        (ENDLESS | {"required": []}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [True], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        (
            {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
            True,
        ),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS | {"properties": {"a": {"$ref": "#/$defs/a"}}}}}, False),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}], "$defs": {"a": ENDLESS}}, True),
    ],
)
def test_schemas_without_a_finite_instance_are_refused(schema: Any, ends: bool) -> None:
    if ends:
        enforced(schema)
    else:
        with pytest.raises(GrammarError, match="no finite value"):
            enforced(schema)


def test_caps() -> None:
    with pytest.raises(GrammarError, match="too many enum entries"):
        enforced({"properties": {str(i): {"enum": list(range(100))} for i in range(MAX_ENTRIES // 100 + 1)}})
    with pytest.raises(GrammarError, match="too many subschemas"):
        enforced({"properties": {str(i): True for i in range(MAX_NODES)}})
    deep: Any = {}
    for _ in range(70):
        deep = {"anyOf": [deep]}
    with pytest.raises(GrammarError, match="nested too deeply"):
        enforced(deep)


def test_grammar_of_refuses_what_is_no_schema() -> None:
    for text in ("", "{", "NaN", "[]", '"a"', "3", "null", '{"minimum": NaN}', '{"const": 1e999}', "false", "\ud800"):
        with pytest.raises(GrammarError):
            grammar_of(Constraint("json_schema", text))


def test_options_of_the_library_stand_last() -> None:
    """It takes them out by moving the last key into their place, which would reorder properties."""
    grammar = json.loads(grammar_of(Constraint("json_schema", '{"x-guidance": {"lenient": true}, "type": "object"}')))
    schema = grammar["grammars"][0]["json_schema"]
    assert list(schema) == ["type", "x-guidance"]
    assert schema["x-guidance"]["lenient"] is False

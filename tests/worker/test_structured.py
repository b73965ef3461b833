"""Masks against independent oracles (jsonschema, re, enumeration) by random walks; resumption, drafts, failures."""

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from fakes.tokenizers import byte_level, write_folder
from numpy.typing import NDArray

from nori_cluster.grammar import load_tokenizer
from nori_cluster.types import Constraint, Int32Array
from nori_cluster.worker.structured import Structured, pack_bits

pytestmark = pytest.mark.unit

EOS = (1, 0)  # <|im_end|>, <|im_start|>
WIDTH = 448  # logits; the tokenizer has fewer ids
NOTHING = np.array([], np.int32)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    TREE,
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"xa": {"type": "integer"}}, "patternProperties": {"^x": {"minimum": 3}}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {}}, "required": ["c", "a"], "maxProperties": 3, "minProperties": 2},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": False, "minItems": 1},
    {"type": "array", "items": [{"const": 1}, {"type": "null"}], "additionalItems": {"type": "boolean"}},
    {"type": "array", "items": {"type": "string", "format": "date"}, "maxItems": 2},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    {"enum": [1, 2.5, "x\n\"y", None, True, {"a": [1, {"b": "é"}]}, []]},
    {"oneOf": [{"type": "string", "minLength": 2, "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "y": {"type": "null"}}, "required": ["k", "y"]},
        ]
    },
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20.25},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": -100, "maximum": 1000},
    {"type": ["integer", "string"], "minimum": 5, "pattern": "^[a-c]+$"},
    {"type": "string", "pattern": "(^a|b)c{1,3}$", "maxLength": 9},
    {"type": "string", "format": "uuid"},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"a": {"minimum": 2}}}],
     "type": "object"},
    {"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "array", "items": {"$ref": "#/$defs/z"}, "minItems": 1},
                                       "z": {"type": "boolean"}}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
]  # fmt: skip
REGEXES = [
    r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)+", r"a.c", r"\d+\.\d{2}", r"^x?y*$", r"[^\W\d]{1,4}|\s",
    r"(?i:ab)|[\]\-&~^]", r"\S\S", r"(?:a|bc){2,3}?d", r"é+|世{1,2}", r"\\|/|\"|\n|'", r"[\x41-\x43]\u0044",
    r"(?P<year>20\d\d)", r"",
]  # fmt: skip
GRAMMARS = [
    ('root ::= "<" inner ">"\ninner ::= [a-c]+ | root', r"<+[a-c]+>+"),
    ('start: "a" b+\nb: /[0-9]/ | "-"', r"a[0-9\-]+"),
    ('start: %json {"type": "boolean"} "!"', r"(true|false)!"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module")
def structured(folder: Path) -> Iterator[Structured]:
    made = Structured(folder, WIDTH, EOS)
    yield made
    made.close()


class Text:
    """Ids ↔ bytes of the test tokenizer."""

    def __init__(self) -> None:
        self.library = load_tokenizer(byte_level(), 0, EOS)
        self.size = self.library.vocab_size
        texts = [b"" if i in EOS else self.library.decode_bytes([i]) for i in range(self.size)]
        self.bytes_of = np.array(texts, dtype=object)
        self.closing = np.array([text in (b'"', b"}", b"]", b">", b"!", b"d") for text in texts])

    def encode(self, text: str) -> list[int]:
        return list(self.library.tokenize_bytes(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.bytes_of[ids]).decode()


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


def ids_of(row: Int32Array) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def mask(structured: Structured, slot: int = 0) -> NDArray[np.intp]:
    structured.begin([slot], [[]])
    masks, failures = structured.finish()
    assert failures == {}
    assert masks.shape == (1, WIDTH // 32)
    return ids_of(masks[0])


def walk(structured: Structured, text: Text, generator: random.Random, longest: int = 300) -> str | None:
    """A random output under the masks of slot 0; None when it does not end in time."""
    ids: list[int] = []
    while len(ids) < longest:
        allowed = mask(structured)
        assert allowed.max(initial=0) < text.size
        ends = [id_ for id_ in allowed if id_ in EOS]
        assert len(ends) in (0, len(EOS))
        if ends and (generator.random() < 0.3 or len(ends) == len(allowed)):
            return text.decode(ids)
        others = [int(id_) for id_ in allowed if id_ not in EOS]
        closing = [id_ for id_ in others if text.closing[id_]]
        ids.append(generator.choice(closing if closing and generator.random() < 0.3 else others))
        structured.advance(0, ids[-1:])
    return None


def outputs(structured: Structured, text: Text, constraint: Constraint, count: int = 12) -> list[str]:
    found = []
    for seed in range(count):
        structured.start(0, constraint, NOTHING)
        found.append(walk(structured, text, random.Random(seed)))
    done = [output for output in found if output is not None]
    assert len(done) >= count // 3
    return done


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_every_walk_is_an_instance_of_the_schema(structured: Structured, text: Text, schema: Any) -> None:
    constraint = Constraint("json_schema", json.dumps(schema))
    validator = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    checker = validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for output in outputs(structured, text, constraint):
        checker.validate(json.loads(output))


def test_json_object_is_any_object(structured: Structured, text: Text) -> None:
    for output in outputs(structured, text, Constraint("json_object")):
        assert isinstance(json.loads(output), dict)


@pytest.mark.parametrize("pattern", REGEXES)
def test_every_walk_matches_the_regex(structured: Structured, text: Text, pattern: str) -> None:
    for output in outputs(structured, text, Constraint("regex", pattern)):
        assert re.fullmatch(pattern, output, re.ASCII), (pattern, output)


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_every_walk_is_of_the_grammar(structured: Structured, text: Text, grammar: str, pattern: str) -> None:
    for output in outputs(structured, text, Constraint("grammar", grammar)):
        assert re.fullmatch(pattern, output), output


def test_choices_are_all_reached_and_nothing_else(structured: Structured, text: Text) -> None:
    choices = ["yes", "yes please", "no", "", 'a"b\\', "ü/\n", "yes"]
    found = outputs(structured, text, Constraint("choice", json.dumps(choices)), count=60)
    assert set(found) == set(choices)


TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "object", "additionalProperties": False}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("output", "belongs"),
    [
        ("", True),
        ("plain text, 世界 < f= >", True),
        ("call <f=one>12</f> and <f=two>{}</f>.", True),
        ("<f=one>12</f><f=one>-3</f>", True),
        ("<f=one>x</f>", False),
        ("<f=three>", False),
        ("<f=two>{} </f>", False),
        ("a <f=one>1", False),
    ],
)
def test_structural_tags(structured: Structured, text: Text, output: str, belongs: bool) -> None:
    assert accepts(structured, text, Constraint("structural_tag", json.dumps(TAG)), output) is belongs


def accepts(structured: Structured, text: Text, constraint: Constraint, output: str) -> bool:
    structured.start(0, constraint, NOTHING)
    for id_ in text.encode(output):
        if id_ not in mask(structured):
            return False
        structured.advance(0, [id_])
    return EOS[0] in mask(structured)


@pytest.mark.parametrize(
    ("schema", "output", "belongs"),
    [
        (PERSON, '{"name":"A","age":3}', True),
        (PERSON, '{ "name" : "A",\n  "age": 3, "tags": ["a", "ü"] }', True),
        (PERSON, '{"name":"A","age":3,"tags":[]} ', False),
        (PERSON, '{"name":"A","age":' + " " * 40 + "3}", False),
        (PERSON, '{"name":"A","age":151}', False),
        # the library itself lets an escaped spelling of a known name past its schema
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061":"x"}', False),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "x-guidance": {"lenient": True}},
            '{"a":"x"}',
            False,
        ),
        # and lets a name that is written twice count twice
        ({"type": "object", "minProperties": 1}, '{"a":1,"a":1}', True),
        # additionalItems beside prefixItems made it forget prefixItems
        ({"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": True, "items": True}, "[1]", False),
        ({"const": "a"}, '"\\u0061"', False),
        ({"type": "string", "format": "date"}, '"2023-02-29"', False),
        ({"type": "string", "format": "date"}, '"2024-02-29"', True),
        ({"type": "string", "pattern": "^.$"}, '"\\r"', False),
        ({"type": "string", "pattern": "^[[&]$"}, '"&"', True),
    ],
)
def test_spellings(structured: Structured, text: Text, schema: Any, output: str, belongs: bool) -> None:
    assert accepts(structured, text, Constraint("json_schema", json.dumps(schema)), output) is belongs


def test_resumed_state_equals_the_advanced_one(structured: Structured, text: Text) -> None:
    constraint = Constraint("json_schema", json.dumps(PERSON))
    ids = text.encode('{"name": "Jo", "age": 12, "tags": ["a"]}')
    structured.start(0, constraint, NOTHING)
    for cut, id_ in enumerate(ids):
        structured.start(1, constraint, np.array(ids[:cut], np.int32))
        structured.begin([0, 1], [[], []])
        masks, failures = structured.finish()
        assert failures == {}
        assert (masks[0] == masks[1]).all()
        structured.advance(0, [id_])
    structured.start(1, constraint, np.array(ids, np.int32))
    assert mask(structured, 1).tolist() == sorted(EOS)


def test_drafts_are_looked_at_and_taken_back(structured: Structured, text: Text) -> None:
    constraint = Constraint("json_schema", json.dumps(TREE))
    ids = text.encode('{"v": 12, "next": {"v": 3, "next": null}}')
    generator = random.Random(0)
    for cut in range(0, len(ids), 3):
        prefix = np.array(ids[:cut], np.int32)
        draft = ids[cut : cut + generator.randrange(5)]
        singles = []
        for length in range(len(draft) + 1):
            structured.start(1, constraint, np.array(ids[: cut + length], np.int32))
            singles.append(mask(structured, 1))
        structured.start(0, constraint, prefix)
        structured.start(2, constraint, prefix)
        for _ in range(2):  # the second time shows that the first changed nothing
            structured.begin([0, 2], [draft, []])
            masks, failures = structured.finish()
            assert failures == {}
            assert len(masks) == len(draft) + 2
            for row, expected in zip([*masks[:-1], masks[-1]], [*singles, singles[0]], strict=True):
                assert ids_of(row).tolist() == expected.tolist()
        structured.advance(0, draft)
        assert mask(structured).tolist() == singles[-1].tolist()


def test_positions_behind_a_forbidden_draft_allow_everything(structured: Structured, text: Text) -> None:
    for slot in range(3):
        structured.start(slot, Constraint("choice", '["ab", "ac"]'), NOTHING)
    a, b, c, x = (text.encode(char)[0] for char in "abcx")
    everything = text.size
    structured.begin([0, 1, 2], [[a, x, b], [x, a], [a, b, EOS[0], a]])
    masks, failures = structured.finish()
    assert failures == {}
    found = [ids_of(row) for row in masks]
    assert [len(ids) for ids in found[2:7]] == [everything, everything, len(found[0]), everything, everything]
    assert c in found[1]
    assert x not in found[1]
    assert found[9].tolist() == sorted(EOS)
    assert [len(ids) for ids in found[10:]] == [everything, everything]


def test_a_finished_grammar_allows_only_the_end_whatever_follows(structured: Structured, text: Text) -> None:
    structured.start(0, Constraint("choice", '["ab"]'), NOTHING)
    structured.advance(0, text.encode("ab"))
    assert mask(structured).tolist() == sorted(EOS)
    structured.advance(0, [EOS[0], EOS[0], text.encode("x")[0]])  # ignore_eos, min_tokens
    assert mask(structured).tolist() == sorted(EOS)


def test_failures_stay_with_their_slot(structured: Structured, text: Text) -> None:
    good = Constraint("choice", '["ab"]')
    structured.start(0, good, NOTHING)
    structured.start(1, Constraint("regex", "["), NOTHING)
    structured.start(2, good, np.array(text.encode("x"), np.int32))
    structured.start(3, Constraint("grammar", "root ::= root"), NOTHING)
    structured.start(4, None, NOTHING)
    structured.start(5, Constraint("json_schema", "{"), NOTHING)
    for _ in range(2):
        structured.begin([0, 1, 2, 3, 4, 5], [[], [7, 8], [], [], [], []])
        masks, failures = structured.finish()
        assert len(masks) == 8
        assert set(failures) == {1, 2, 3, 5}
        assert "character class" in failures[1]
        assert "does not allow the token" in failures[2]
        assert len(ids_of(masks[0])) < 3
        assert len(ids_of(masks[6])) == text.size
    structured.start(1, good, NOTHING)
    structured.start(2, None, NOTHING)
    structured.drop(3)
    structured.begin([0, 1, 2, 3], [[], [], [], []])
    masks, failures = structured.finish()
    assert failures == {}
    assert (masks[0] == masks[1]).all()
    assert structured.constrained(np.array([2, 1, 3, 0, 9])).tolist() == [False, True, False, True, False]


def test_an_ambiguous_grammar_fails_its_slot_before_it_holds_the_others(structured: Structured, text: Text) -> None:
    """Parsing is cubic then: unlimited, one mask takes seconds after 200 tokens."""
    structured.start(0, Constraint("grammar", 'start: x\nx: x x | "a" | "b" | "ab" | x x x'), NOTHING)
    structured.start(1, Constraint("json_object"), NOTHING)
    generator, longest = random.Random(0), 0.0
    for _ in range(300):
        began = time.perf_counter()
        structured.begin([0, 1], [[], []])
        masks, failures = structured.finish()
        longest = max(longest, time.perf_counter() - began)
        if failures:
            break
        structured.advance(0, text.encode(generator.choice("ab")))
    assert set(failures) == {0}
    assert "too complex" in failures[0]
    assert 0 < len(ids_of(masks[1])) < 10
    assert longest < 1


def test_a_folder_without_tokenizer_fails_the_slot(tmp_path: Path) -> None:
    structured = Structured(tmp_path, 64, EOS)
    structured.preload()
    structured.start(0, Constraint("json_object"), NOTHING)
    structured.begin([0], [[]])
    masks, failures = structured.finish()
    assert "tokenizer.json" in failures[0]
    assert masks.shape == (1, 2)
    structured.close()


@pytest.mark.parametrize("width", [100, 448, 4099])
def test_any_width_of_logits(folder: Path, width: int) -> None:
    structured = Structured(folder, width, EOS)
    structured.start(0, Constraint("json_object"), NOTHING)
    structured.begin([0], [[]])
    masks, failures = structured.finish()
    assert masks.shape == (1, (width + 31) // 32)
    assert failures == {}
    assert 0 < len(ids_of(masks[0])) < 10
    structured.close()


def test_pack_bits() -> None:
    assert ids_of(pack_bits(np.array([0, 31, 32, 63, 70]), 3)).tolist() == [0, 31, 32, 63, 70]

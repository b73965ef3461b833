"""Random schemas, random walks under their masks, jsonschema as the judge: no walk may end in a forbidden instance."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from fakes.tokenizers import byte_level, write_folder

from nori_cluster.grammar import GrammarError, compile_matcher, load_tokenizer
from nori_cluster.types import Constraint
from nori_cluster.worker.structured import Structured

pytestmark = pytest.mark.unit

NAMES = ["a", "b", "xa", "é", "a b"]
PATTERNS = ["^x", "a$", "^[^x]*$", "b", r"\d", "^$"]
VALUES = [0, 1, -3, 2.5, "a", "xa", "", None, True, [1], {"a": 1}, {}]


class Schemas:
    """A seeded source of schemas out of the keywords that may be accepted."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, chance: float) -> bool:
        return self.random.random() < chance

    def root(self) -> Any:
        schema = self.schema(3)
        if isinstance(schema, dict):
            schema["$defs"] = {"d": self.schema(1), "e": self.schema(1)}
        return schema

    def schema(self, depth: int) -> Any:
        if depth == 0 or self.some(0.1):
            return self.random.choice(
                [True, {}, {"type": "integer"}, {"type": "string"}, {"type": "null"}, {"const": 1}]
            )
        out: dict[str, Any] = {}
        parts = [self.numbers, self.strings, self.arrays, self.objects, self.combined, self.literal]
        for part in self.random.sample(parts, self.random.randint(1, 2)):
            out |= part(depth)
        if self.some(0.5):
            kinds = ["integer", "number", "string", "array", "object", "null", "boolean"]
            picked = self.random.sample(kinds, self.random.randint(1, 2))
            out["type"] = picked[0] if len(picked) == 1 else picked
        items = list(out.items())
        self.random.shuffle(items)
        return dict(items)

    def numbers(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for keyword in ("minimum", "exclusiveMinimum"):
            if self.some(0.4):
                out[keyword] = self.random.choice([-10, -1, 0, 0.5, 2, 3.25])
        for keyword in ("maximum", "exclusiveMaximum"):
            if self.some(0.4):
                out[keyword] = self.random.choice([0, 1, 4.5, 12, 1000, 0.001])
        if self.some(0.3):
            out["multipleOf"] = self.random.choice([1, 2, 7, 0.5, 0.25])
        return out

    def strings(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.some(0.4):
            out["minLength"] = self.random.randint(0, 3)
        if self.some(0.5):
            out["maxLength"] = self.random.randint(0, 6)
        if self.some(0.4):
            out["pattern"] = self.random.choice([*PATTERNS, "^(a|bc)*$", r"^\w{2}\s\S$", "[^a-c]", "^.x"])
        if self.some(0.1):
            out["format"] = self.random.choice(["date", "uuid", "ipv4", "time"])
        return out

    def arrays(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.some(0.5):
            out["prefixItems"] = [self.schema(depth - 1) for _ in range(self.random.randint(1, 2))]
        if self.some(0.6):
            out["items"] = self.random.choice([False, self.schema(depth - 1)])
        if self.some(0.4):
            out["minItems"] = self.random.randint(0, 2)
        if self.some(0.4):
            out["maxItems"] = self.random.randint(0, 3)
        return out

    def objects(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.some(0.7):
            names = self.random.sample(NAMES, self.random.randint(1, 3))
            out["properties"] = {name: self.schema(depth - 1) for name in names}
        if self.some(0.4):
            out["patternProperties"] = {p: self.schema(depth - 1) for p in self.random.sample(PATTERNS, 1)}
        if self.some(0.5):
            out["additionalProperties"] = self.random.choice([False, self.schema(depth - 1)])
        if self.some(0.5):
            out["required"] = self.random.sample(NAMES, self.random.randint(1, 2))
        for keyword in ("minProperties", "maxProperties"):
            if self.some(0.2):
                out[keyword] = self.random.randint(0, 3)
        return out

    def combined(self, depth: int) -> dict[str, Any]:
        keyword = self.random.choice(["anyOf", "allOf", "oneOf", "$ref"])
        if keyword == "$ref":
            return {"$ref": self.random.choice(["#/$defs/d", "#/$defs/e", "#"])}
        return {keyword: [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}

    def literal(self, depth: int) -> dict[str, Any]:
        if self.some(0.5):
            return {"const": self.random.choice(VALUES)}
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 4))}


def check_seeds(folder: Path, seeds: range) -> dict[str, int]:
    """Counts of what happened. Raises AssertionError at a walk that is no instance."""
    eos = (1,)
    library = load_tokenizer(byte_level(), 0, eos)
    structured = Structured(folder, library.vocab_size, eos)
    bytes_of = [b"" if i in (0, 1) else library.decode_bytes([i]) for i in range(library.vocab_size)]
    closing = {i for i, data in enumerate(bytes_of) if data in (b'"', b"}", b"]", b"l", b"e")}
    counts = {"refused": 0, "instances": 0, "unfinished": 0, "dead ends": 0}
    for seed in seeds:
        schema = Schemas(seed).root()
        constraint = Constraint("json_schema", json.dumps(schema))
        try:
            compile_matcher(library, constraint)
        except GrammarError:
            counts["refused"] += 1
            continue
        for attempt in range(3):
            generator, ids = random.Random(attempt), list[int]()
            structured.start(0, constraint, np.array([], np.int32))
            while len(ids) < 150:
                structured.begin([0], [[]])
                masks, failures = structured.finish()
                if failures:
                    counts["dead ends"] += 1
                    break
                allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist()
                if eos[0] in allowed and (len(allowed) == 1 or generator.random() < 0.3):
                    text = b"".join(bytes_of[i] for i in ids).decode()
                    jsonschema.Draft202012Validator(
                        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
                    ).validate(json.loads(text))
                    counts["instances"] += 1
                    break
                allowed = [i for i in allowed if i != eos[0]]
                ends = [i for i in allowed if i in closing]
                ids.append(generator.choice(ends if ends and generator.random() < 0.4 else allowed))
                structured.advance(0, ids[-1:])
            else:
                counts["unfinished"] += 1
    structured.close()
    return counts


def test_no_walk_leaves_a_random_schema(tmp_path: Path) -> None:
    counts = check_seeds(write_folder(tmp_path, byte_level()), range(150))
    assert counts["instances"] > 50

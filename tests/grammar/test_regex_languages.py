"""Random regular expressions on every short string: the same language as Python's re, where the regex is accepted."""

import itertools
import json
import random
import re

import llguidance
import pytest
from fakes.tokenizers import byte_level

from nori_cluster.grammar import GrammarError, compile_matcher, load_tokenizer
from nori_cluster.types import Constraint

pytestmark = pytest.mark.unit

ALPHABET = "ab-\n"
STRINGS = ["".join(chars) for n in range(4) for chars in itertools.product(ALPHABET, repeat=n)]
ATOMS = [
    "a",
    "b",
    "-",
    ".",
    "[ab]",
    "[^a]",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    r"[\w-]",
    "[a-b]",
    r"\n",
    "^",
    "$",
    r"\-",
    "[.]",
]


def expression(generator: random.Random, depth: int) -> str:
    if depth == 0:
        return generator.choice(ATOMS)
    kind = generator.randrange(5)
    parts = [expression(generator, depth - 1) for _ in range(2)]
    if kind == 0:
        return "(" + "|".join(parts) + ")"
    if kind == 1:
        return f"(?:{parts[0]})" + generator.choice(["*", "+", "?", "{2}", "{1,2}", "{0,1}?", "*?"])
    if kind == 2:
        return "|".join(parts)
    return "".join(parts)


def accepts(tokenizer: llguidance.LLTokenizer, matcher: llguidance.LLMatcher, text: str) -> bool:
    walk = matcher.deep_copy()
    ids = tokenizer.tokenize_bytes(text.encode())
    return walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting()


@pytest.mark.parametrize("kind", ["regex", "pattern"])
def test_same_language_as_python(kind: str) -> None:
    tokenizer = load_tokenizer(byte_level(), 0, (1,))
    compared = 0
    for seed in range(400):
        source = expression(random.Random(seed), 3)
        schema = json.dumps({"type": "string", "pattern": source})
        constraint = Constraint("regex", source) if kind == "regex" else Constraint("json_schema", schema)
        try:
            matcher = compile_matcher(tokenizer, constraint)
        except GrammarError:
            continue
        # Python's $ also matches before a last line end, JavaScript's and ours only at the end.
        oracle = re.compile(re.sub(r"(?<!\\)\$", r"\\Z", source), re.ASCII)
        for text in STRINGS:
            if kind == "regex":
                same = bool(oracle.fullmatch(text)) == accepts(tokenizer, matcher, text)
            else:
                same = bool(oracle.search(text)) == accepts(tokenizer, matcher, json.dumps(text))
            assert same, (seed, source, text)
            compared += 1
    assert compared > 10_000

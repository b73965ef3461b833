"""Regexes, Lark, GBNF, choices, structural tags: what they become and what is refused."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nori_cluster.grammar import GrammarError, grammar_of, regex
from nori_cluster.grammar.text import checked_lark, choice, grammar, structural_tag
from nori_cluster.types import Constraint

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[", "unclosed character class"),
        ("[]", "empty character class"),
        ("(", "unclosed parenthesis"),
        (")", "closing parenthesis too many"),
        ("*a", "repeats nothing"),
        ("(*a)", "repeats nothing"),
        ("a**", "quantifier after a quantifier"),
        ("a++", "quantifier after a quantifier"),
        ("a{2}{3}", "quantifier after a quantifier"),
        ("a{,3}", "no repetition"),
        ("a{3,2}", "ends before it begins"),
        ("a{10001}", "repeats up to 10001 times"),
        ("((a{100})b{50}){101}", "repeats up to 10100 times"),
        ("(?=a)", "lookaround"),
        ("(?<!a)", "lookaround"),
        ("(?>a)", "group that is not supported"),
        ("(?#c)", "group that is not supported"),
        (r"(a)\1", "escape"),
        (r"\bA", "escape"),
        (r"\Z", "escape"),
        ("a\\", "ends with a backslash"),
        ("[a--b]", "--"),
        ("(" * 65 + ")" * 65, "nested too deeply"),
    ],
)
def test_regexes_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        regex.rewrite(pattern)


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("a.b", r"a[^\n\r\x85\u2028\u2029]b"),
        (r"\d\w", "[0-9][0-9A-Za-z_]"),
        (r"[\d-]", "[[0-9]-]"),
        ("[[&~]", r"[\[\&\~]"),
        ("a*?b+?", "a*b+"),
        ("(?P<x>a)(?<y>b)(?:c)", "(?:a)(?:b)(?:c)"),
        ("(?i)a|b", "(?i:a|b)"),
        ("a/b\\/\n", r"a\x2fb\x2f\x0a"),
        (r"\cA\0[\b]", r"\x01\x00[\x08]"),
    ],
)
def test_one_dialect_is_written(pattern: str, written: str) -> None:
    assert regex.rewrite(pattern) == written


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_is_rewritten_or_refused(text: str) -> None:
    for kind in ("regex", "grammar", "choice", "json_schema", "structural_tag"):
        try:
            grammar_of(Constraint(kind, text))  # type: ignore[arg-type]
        except GrammarError as error:
            assert len(str(error)) < 1000  # noqa: PT017


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: %json {", "no JSON value after %json"),
        ('start: %json {"not": {}}', "'not' at #"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "allow_invalid_utf8"),
        ("start: a\na[max_tokens=3]: /x/", "max_tokens"),
        ("start: a\na[capture, temperature=0.5]: /x/", "temperature"),
        ('start: a\na[stop="x"]: /x/', "stop"),
        ("root ::= other", "GBNF"),
        ('rule ::= "a"', "GBNF"),
        ('root ::= "\\uD800"', "does not exist"),
        ('root ::= "a\\', "GBNF"),
    ],
)
def test_grammars_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(reason)):
        grammar(text)


def test_strings_and_comments_of_lark_are_left_alone() -> None:
    text = 'start: "%json {" /[stop=1]\\/%json/ a // %json\n# [max_tokens=1]\na: "[max_tokens=1]"\n%import common.INT\n'
    assert checked_lark(text) == text


def test_schemas_inside_of_lark_are_walked() -> None:
    written = checked_lark('start: "x" %json {"type": "integer", "title": "%json"} "y"')
    assert '"title"' not in written
    assert written.startswith('start: "x" %json {"type": "integer", "x-guidance"')
    assert written.endswith('} "y"')


def test_gbnf_escapes_are_written_as_characters() -> None:
    assert '"é9"' in grammar('root ::= "\\u00e99"')


def test_choices() -> None:
    assert choice('["a.b", "", "a.b"]') == r"(?:a\x{2E}b)|(?:)"
    for text in ("[]", "{}", "[1]", '"a"'):
        with pytest.raises(GrammarError):
            choice(text)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"structures": [], "triggers": ["<"]}',
        '{"structures": [{"begin": "<a>", "end": ""}]}',
        '{"structures": [{"begin": "<a>", "end": ""}], "triggers": [""]}',
        '{"structures": [{"begin": "a", "end": ""}], "triggers": ["<"]}',
        '{"structures": [{"begin": "<a>"}], "triggers": ["<"]}',
        '{"structures": [{"begin": "<a>", "end": "", "schema": {"not": 1}}], "triggers": ["<"]}',
        '{"format": {"type": "any_text"}}',
    ],
)
def test_structural_tags_that_are_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        structural_tag(text)

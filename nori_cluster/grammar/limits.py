"""Caps on constraints, looked at before any work, and the error they and all other refusals share.

They bound what a stranger's constraint may cost; the time of compiling is bounded by whoever compiles.
"""

import re

MAX_TEXT = 256 << 10  # characters of a constraint
MAX_DEPTH = 64  # nesting of a schema, and of brackets in a regex or grammar
MAX_NODES = 10_000  # subschemas in all, each $ref target counted once
MAX_ENTRIES = 5_000  # enum entries in all, or choices
MAX_REPETITION = 10_000  # product of nested bounded repetitions of a regex

_SURROGATES = re.compile("[\ud800-\udfff]")
_JSON_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|[\[{]|[\]}]', re.DOTALL)


class GrammarError(ValueError):
    """A constraint that is refused; the message names the keyword and where it stands."""


def check_text(text: str) -> None:
    """Raises GrammarError for a text that is too long or is no Unicode text."""
    if len(text) > MAX_TEXT:
        raise GrammarError(f"is too long: {len(text)} characters, at most {MAX_TEXT}")
    if _SURROGATES.search(text):
        raise GrammarError("holds a lone UTF-16 surrogate")


def check_json_depth(text: str) -> None:
    """Refuse deep JSON before a parser recurses into it."""
    depth = 0
    for match in _JSON_BRACKETS.finditer(text):
        token = match.group()
        depth += (token in "[{") - (token in "]}")
        if depth > 2 * MAX_DEPTH:  # one schema level takes up to two: {"properties": {"a": {
            raise GrammarError(f"is nested too deeply: more than {2 * MAX_DEPTH} levels")

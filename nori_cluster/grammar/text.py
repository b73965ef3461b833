"""Lark and GBNF grammars, choices and structural tags as grammars of llguidance (its variant of Lark).

A user's Lark text may not reach past our checks: schemas inside (%json) are walked, options that would change decoding
(max_tokens, temperature, stop) are refused.
"""

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from nori_cluster.grammar import regex
from nori_cluster.grammar.limits import MAX_DEPTH, MAX_ENTRIES, GrammarError
from nori_cluster.grammar.schema import brief, enforced

# Bounded, so that a model cannot emit white space without end; 32 hold a line end and ten levels of indentation.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# \uXXXX is off: llguidance takes "\u0061" for a name other than "a", and so past the schema of that property.
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_TOKENS = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)|[^\\]", re.DOTALL)
_LARK_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|%(?P<word>\w+)'
    r"|\[[^\]\n]*\b(?P<option>max_tokens|temperature|stop|stop_capture)\b[^\]\n]*\]"
)
_LARK_OPTIONS = frozenset({"no_forcing", "ignore_once"})


def json_grammar(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A walked schema with every option of the JSON compiler said."""
    if schema is False:
        raise GrammarError("is false: nothing satisfies it")
    # Last: the library takes it out by putting the last key in its place, which would change the order of properties.
    return {**({} if schema is True else schema), "x-guidance": JSON_OPTIONS}


def grammar(text: str) -> str:
    """Lark from Lark or GBNF (also called EBNF: rules are written ::=)."""
    check_brackets(text)
    if _GBNF.search(text):
        try:
            return gbnf_to_lark(plain_escapes(text))
        except Exception as error:  # the converter raises bare Exception
            raise GrammarError(f"cannot be read as GBNF: {error or type(error).__name__}") from error
    return checked_lark(text)


def check_brackets(text: str) -> None:
    depth = 0
    for match in re.finditer(r'"(?:\\.|[^"\\\n])*"|[(\[{]|[)\]}]', text):
        token = match.group()
        depth += (token in "([{") - (token in ")]}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"is nested too deeply: more than {MAX_DEPTH} brackets")


def plain_escapes(text: str) -> str:
    """GBNF with escapes above ASCII written as the characters, which the converter gets wrong (it drops zeros)."""

    def plain(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if not digits:
            return match.group()
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise GrammarError(f"names a character that does not exist: {match.group()}")
        return chr(code) if code > 0x9F else f"\\x{code:02x}"

    return _GBNF_TOKENS.sub(plain, text)


def checked_lark(text: str) -> str:
    out: list[str] = []
    at = 0
    for match in _LARK_TOKENS.finditer(text):
        if match.start() < at:
            continue  # inside of a JSON value that was taken as a whole
        if match["option"]:
            raise GrammarError(f"uses the rule option {match['option']!r}, which is not supported")
        if match["word"] in ("json", "llguidance", "regex"):
            out.append(text[at : match.start()])
            value, at = _json_at(text, match.end(), match["word"])
            out.append(_inline(match["word"], value))
    return "".join(out) + text[at:]


def _json_at(text: str, start: int, word: str) -> tuple[Any, int]:
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"has no JSON value after %{word}") from error
    return value, end


def _inline(word: str, value: Any) -> str:
    if word == "json":
        return "%json " + dumps(json_grammar(enforced(value)))
    if word == "llguidance" and (not isinstance(value, dict) or not value.keys() <= _LARK_OPTIONS):
        raise GrammarError(f"sets options that are not supported: %llguidance {brief(value)}")
    return f"%{word} " + dumps(value)


def choice(text: str) -> str:
    """A regular expression of the choices."""
    values = json.loads(text)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise GrammarError("must be a list of at least one string")
    if len(values) > MAX_ENTRIES:
        raise GrammarError(f"has too many choices: {len(values)}, at most {MAX_ENTRIES}")
    return "|".join(f"(?:{regex.literal(value)})" for value in dict.fromkeys(values))


def structural_tag(text: str) -> str:
    """Free text, in which each trigger must begin one of the structures: begin, JSON by its schema, end."""
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise GrammarError("must be an object")
    if "format" in tag:
        raise GrammarError("uses 'format', which is not supported; give 'structures' and 'triggers'")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("has no 'structures' (a list of at least one)")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("has no 'triggers' (a list of at least one string)")
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for number, structure in enumerate(structures):
        trigger, body = _structure(structure, number, list(bodies))
        bodies[trigger].append(body)
    used = {trigger: found for trigger, found in bodies.items() if found}
    lines = ["%llguidance {}", "start: (" + " | ".join(f"tag{i}" for i in range(len(used))) + ")* text_end"]
    lines += ["text_end: TEXT", r"TEXT: /(.|\n)*/"]
    for i, (trigger, found) in enumerate(used.items()):
        lines.append(f"head{i}[lazy]: TEXT {quoted(trigger)}")
        lines.append(f"tag{i}: head{i} (" + " | ".join(found) + ")")
    return "\n".join(lines) + "\n"


def _structure(structure: Any, number: int, triggers: list[str]) -> tuple[str, str]:
    at = f"structures[{number}]"
    begin, end = (structure.get(key) if isinstance(structure, dict) else None for key in ("begin", "end"))
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(f"has no strings 'begin' and 'end' in {at}")
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise GrammarError(f"has a 'begin' in {at} that starts with none of the triggers: {brief(begin)}")
    try:
        schema = dumps(json_grammar(enforced(structure.get("schema", {}))))
    except GrammarError as error:
        raise GrammarError(f"in {at}: the schema {error}") from error
    parts = [quoted(begin[len(trigger) :]), f"%json {schema}", quoted(end)]
    return trigger, " ".join(part for part in parts if part != '""')


def quoted(text: str) -> str:
    """A string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

"""Constraint → a compiled matcher of llguidance. The gateway compiles to refuse, rank 0 to fill masks: with one code.

`grammar_of` is pure and says what is refused; `compile_matcher` adds what only the library knows.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance

from nori_cluster.grammar import regex, text
from nori_cluster.grammar.limits import GrammarError, check_json_depth, check_text
from nori_cluster.grammar.schema import below, enforced, show
from nori_cluster.types import Constraint

__all__ = ["GrammarError", "compile_matcher", "first_line", "grammar_of", "load_tokenizer"]

# What one compilation and one mask may cost. Fuel is about 50 k/ms (initial), 14 k/ms and 20 k/ms (per step).
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,  # an object with 1000 optional properties has some 1000
    "max_lexer_states": 50_000,  # 1-2 kB each: bounds the memory of one grammar
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Of free grammars, which may be ambiguous (Earley parsing is cubic then): keeps a mask under about 40 ms.
AMBIGUOUS: dict[str, Any] = {"max_items_in_row": 500}


def grammar_of(constraint: Constraint) -> str:
    """The grammar as llguidance reads it (JSON). Raises GrammarError, whose message continues "the grammar …"."""
    check_text(constraint.text)
    try:
        return json.dumps({"grammars": [_entry(constraint)]}, ensure_ascii=False, allow_nan=False)
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("is nested too deeply") from error
    except ValueError as error:
        raise GrammarError(f"is no JSON value: {error}") from error


def _entry(constraint: Constraint) -> dict[str, Any]:
    kind, source = constraint.kind, constraint.text
    if kind in ("json_schema", "choice", "structural_tag"):
        check_json_depth(source)
    if kind == "json_schema":
        return {"json_schema": text.json_grammar(enforced(json.loads(source)))}
    if kind == "json_object":
        return {"json_schema": text.json_grammar({"type": "object"})}
    if kind == "grammar":
        return {"lark_grammar": text.grammar(source)}
    if kind == "structural_tag":
        return {"lark_grammar": text.structural_tag(source)}
    expression = regex.rewrite(source) if kind == "regex" else text.choice(source)
    return {"lark_grammar": f"start: /{expression or '(?:)'}/\n"}


def load_tokenizer(definition: str, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """The library's tokenizer from the text of tokenizer.json, for masks of at least vocab_size bits.

    Raises ValueError when the text cannot be read.
    """
    eos = list(eos_token_ids) or None
    try:
        return llguidance.LLTokenizer(definition, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise
    return llguidance.LLTokenizer(definition, eos_token=eos)  # the model has no logits for the last ids


def compile_matcher(tokenizer: llguidance.LLTokenizer, constraint: Constraint) -> llguidance.LLMatcher:
    """A matcher at the start of the grammar. Raises GrammarError when it is refused, or allows no first token."""
    limits = LIMITS | (AMBIGUOUS if constraint.kind == "grammar" else {})
    matcher = llguidance.LLMatcher(
        tokenizer, grammar_of(constraint), log_level=0, limits=llguidance.LLParserLimits(**limits)
    )
    error = matcher.get_error()
    if not error:
        some = any(matcher.compute_bitmask())
        error = matcher.get_error()
        if error.startswith("NoExtension") or not (error or some):
            error = "nothing matches it"
    if error:
        raise GrammarError(explained(error, constraint))
    return matcher


def explained(error: str, constraint: Constraint) -> str:
    """The library's refusal, with the places of the keyword where it concerns one (the library does not say)."""
    for sign, keyword, reason in (
        ("oneOf", "oneOf", "whose alternatives are not seen to exclude each other (they do by different types, or by "
         "different constants of a property that is required), or use 'anyOf'"),
        ("min/maxProperties", "maxProperties", "beside optional 'properties', which is not supported"),
        ("patternProperty", "patternProperties", "whose patterns are not seen to exclude each other"),
    ):  # fmt: skip
        if sign in error and constraint.kind == "json_schema":
            found = [show(path) for path in places(json.loads(constraint.text), keyword)]
            return f"uses {keyword!r} at {' or '.join(found[:3]) or '#'}, {reason}"
    return f"cannot be compiled: {first_line(error)}"


def places(value: Any, keyword: str, path: str = "") -> Iterator[str]:
    """Paths of the objects that have the keyword."""
    if isinstance(value, dict):
        if keyword in value:
            yield path
        for key, inner in value.items():
            yield from places(inner, keyword, below(path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, keyword, below(path, number))


def first_line(error: str) -> str:
    """The part of the library's message that concerns the user; panics come with a backtrace."""
    line = error.split("<backtrace>")[0].split("<state>")[0].strip()
    return (line.splitlines() or ["no reason given"])[0][:300]

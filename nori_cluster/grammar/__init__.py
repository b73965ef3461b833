"""Constraint → a compiled matcher of llguidance. The gateway compiles to refuse, rank 0 to fill masks: with one code.

`grammar_of` is pure and says what is refused; `compile_matcher` adds what only the library knows.
"""

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from nori_cluster.grammar import regex, text
from nori_cluster.grammar.limits import GrammarError, check_json_depth, check_text
from nori_cluster.grammar.schema import enforced
from nori_cluster.types import Constraint

__all__ = ["GrammarError", "compile_matcher", "grammar_of", "load_tokenizer"]

# What one compilation and one mask may cost. Fuel is about 50 k/ms (initial), 14 k/ms and 20 k/ms (per step).
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # 1-2 kB each: bounds the memory of one grammar
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


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


def compile_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Raises GrammarError when the library refuses the grammar, or when it allows no first token."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    error = matcher.get_error()
    if not error:
        some = any(matcher.compute_bitmask())
        error = matcher.get_error()
        if error.startswith("NoExtension") or not (error or some):
            error = "nothing matches it"
    if error:
        raise GrammarError(f"cannot be compiled: {first_line(error)}")
    return matcher


def first_line(error: str) -> str:
    """The part of the library's message that concerns the user; panics come with a backtrace."""
    line = error.split("<backtrace>")[0].split("<state>")[0].strip()
    return (line.splitlines() or ["no reason given"])[0][:300]

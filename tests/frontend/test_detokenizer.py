"""Detokenizer: any chunking gives the text of the bytes decoded once."""

from itertools import pairwise

import pytest
from fakes import tokenizers as fake
from fakes.text import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from nori_cluster.frontend.detokenizer import Detokenizer
from nori_cluster.frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.unit
BYTES = byte_tokenizer()
LLAMA2 = Tokenizer(fake.llama2(), special_tokens={"eos_token": "</s>"})
WORD_PIECE = Tokenizer(fake.word_piece())
F02_SCRIPTS = {
    "whole emoji": ([10813, 242, 218], "😀"),
    "CJK": ([34978, 120], "歪"),
    "two CJK": ([18645, 250, 48392, 138], None),
    "ZWJ family": ([10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117], "👨\u200d👩\u200d👧"),
    "cut off": ([10813, 242], "\ufffd"),
}


def stream(tokenizer: Tokenizer, chunks: list[list[int]], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", F02_SCRIPTS)
def test_f02_scripts(name: str) -> None:
    tokenizer = Tokenizer.from_folder(fake.demo_folder())
    ids, expected = F02_SCRIPTS[name]
    once = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    deltas = stream(tokenizer, [[id_] for id_ in ids])
    assert "".join(deltas) == once == tokenizer.decode(ids)
    assert expected in (None, once)
    if name != "cut off":
        assert "\ufffd" not in once
        assert all(len(delta) <= 1 for delta in deltas)
    else:
        assert deltas == ["", "", "\ufffd"]


@given(st.lists(st.integers(0, BYTES.vocab_size - 1)), st.lists(st.integers(0, 60)), st.booleans())
def test_f02_any_chunking_equals_one_decode(ids: list[int], cuts: list[int], skip_special: bool) -> None:
    assert "".join(stream(BYTES, chunked(ids, cuts), skip_special)) == BYTES.decode(ids, skip_special)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_f02_complete_characters_arrive_whole(text: str) -> None:
    deltas = stream(BYTES, [[id_] for id_ in BYTES.encode(text)])
    assert [delta for delta in deltas if delta] == list(text)


@given(st.lists(st.integers(0, LLAMA2.vocab_size - 1)), st.lists(st.integers(0, 60)), st.booleans())
def test_byte_fallback_any_chunking(ids: list[int], cuts: list[int], skip_special: bool) -> None:
    streamed = "".join(stream(LLAMA2, chunked(ids, cuts), skip_special))
    whole = LLAMA2.decode(ids, skip_special)
    assert streamed == (" " + whole if streamed.startswith(" ") else whole)


def test_byte_fallback_keeps_the_space_after_the_prompt() -> None:
    ids = LLAMA2.encode("world", add_special=False)
    assert "".join(stream(LLAMA2, [ids])) == " world"


@given(st.lists(st.integers(0, 6)), st.lists(st.integers(0, 60)))
def test_library_decoder_any_chunking(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(WORD_PIECE, chunked(ids, cuts))) == WORD_PIECE.decode(ids)


def test_flush_gives_the_rest_once() -> None:
    detokenizer = Detokenizer(BYTES, True)
    assert detokenizer.push([3 + 0xE6, 3 + 0xAD]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push([3 + ord("a")]) == "a"


def test_special_tokens() -> None:
    assert stream(BYTES, [[1, 3 + ord("a"), 2]]) == ["a", ""]
    assert stream(BYTES, [[1, 3 + ord("a"), 2]], skip_special=False) == ["<|im_start|>a<|im_end|>", ""]

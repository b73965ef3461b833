"""Tokenizer: both modes of special parsing, token bytes, vectors of llama.cpp."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import tokenizers as fake
from hypothesis import given
from hypothesis import strategies as st

from nori_cluster.errors import CheckpointError, ClientError
from nori_cluster.frontend.tokenizer import Tokenizer, read_special_tokens

pytestmark = pytest.mark.unit
SUBSET = Path(__file__).parent / "smollm2_vectors.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "tokenizer" / "smollm2_vectors.jsonl"
MISSING_IN_SMOLLM2 = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]
BYTE_LEVEL = Tokenizer(fake.byte_level(), special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(fake.demo_folder())


@pytest.mark.parametrize("path", [SUBSET, SHARED], ids=["subset", "all"])
def test_f39_smollm2_vectors(path: Path, demo: Tokenizer) -> None:
    if not path.is_file():
        pytest.skip("no vectors beside this checkout")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wrong = [v["text"] for v in lines if demo.encode(v["text"]) != v["ids"]]
    assert len(lines) >= 40
    assert wrong == []


def test_demo_facts(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.eos_token_ids == (2,)
    assert demo.special_ids == frozenset(range(17))
    assert sorted(demo.missing_bytes) == MISSING_IN_SMOLLM2
    assert demo.token_bytes(10813) == bytes([240, 159])
    assert demo.token_bytes(1) == b"<|im_start|>"
    assert demo.token_text(10813) == "\ufffd"


def test_f18_control_character_without_token(demo: Tokenizer) -> None:
    assert demo.encode("\x04") == []
    assert demo.encode("a\x00b") == [81, 190, 82]
    assert demo.decode([81, 190, 82]) == "a\x00b"


@pytest.mark.parametrize("text", ["a\ud83dz", "\udc00"])
def test_f18_lone_surrogate(text: str) -> None:
    for parse_special in (False, True):
        with pytest.raises(ClientError, match="surrogate") as error:
            BYTE_LEVEL.encode(text, parse_special=parse_special)
        error.value.message.encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_plain_text_round_trips(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special=False) == text
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "a", "\n", "<"])).map("".join))
def test_f19_control_text_is_text_unless_parsed(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.special_ids.isdisjoint(ids)
    assert BYTE_LEVEL.decode(ids) == text
    parsed = BYTE_LEVEL.encode(text, parse_special=True)
    assert sum(map(BYTE_LEVEL.is_special, parsed)) == text.count("<|im_start|>") + text.count("<|im_end|>")
    assert BYTE_LEVEL.decode(parsed, skip_special=False) == text


@pytest.mark.parametrize("bos", [False, True])
def test_f19_merges_cannot_spell_a_control_token(bos: bool) -> None:
    tokenizer = Tokenizer(fake.forging(bos), special_tokens={"bos_token": "<s>"})
    assert tokenizer.encode("a<s>b", parse_special=True) == [0] * bos + [4, 0, 5]
    assert tokenizer.encode("a<s>b") == [0] * bos + [4, 1, 2, 3, 5]
    assert tokenizer.encode("a<s>b", add_special=False) == [4, 1, 2, 3, 5]


def test_named_special_token_is_special_even_when_the_file_says_otherwise() -> None:
    definition = fake.byte_level().replace('"special":true', '"special":false')
    tokenizer = Tokenizer(definition, special_tokens={"eos_token": "<|im_end|>"})
    assert tokenizer.special_ids == {1}
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("x<|im_end|>"))
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [1]


def test_sentencepiece_table() -> None:
    tokenizer = Tokenizer(fake.llama2(), special_tokens={"eos_token": "</s>", "unk_token": "<unk>"})
    assert tokenizer.table.kind == "byte_fallback"
    ids = tokenizer.encode("hello wörld 😀")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hello wörld 😀"
    assert tokenizer.token_bytes(tokenizer.token_id("▁w") or 0) == b" w"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.missing_bytes == frozenset()


def test_other_decoders_use_the_library() -> None:
    tokenizer = Tokenizer(fake.word_piece())
    assert tokenizer.table.kind == "library"
    assert tokenizer.decode(tokenizer.encode("playing the game")) == "playing the game"


def test_ids_without_a_token_have_no_bytes() -> None:
    tokenizer = Tokenizer(fake.byte_level(), vocab_size=1000)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.token_bytes(999) == b""
    assert tokenizer.decode([999]) == ""


def test_folder(tmp_path: Path) -> None:
    fake.write_folder(tmp_path, fake.byte_level(), {"eos_token": {"content": "<|im_end|>"}, "bos_token": None})
    assert read_special_tokens(tmp_path) == {"eos_token": "<|im_end|>"}
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": 3}', "not json"])
def test_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_no_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, nori_cluster.frontend.template, nori_cluster.checkpoint.hf_config as h; "
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'ray', 'grpc', 'fastapi')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Token id → the bytes it adds to the text, where a tokenizer's text is a concatenation of such bytes.

Built once per tokenizer from tokenizer.json's decoder; read by the detokenizer (per token) and by logprobs.
Formats: GPT-2's byte-level alphabet, and SentencePiece's ▁ for space with <0xNN> byte fallback.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

Kind = Literal["byte_level", "byte_fallback", "library"]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "▁"


class TokenTable(msgspec.Struct, frozen=True):
    """bytes_of[id]: empty for ids without a token. text_of[id]: the same as text, None where that takes other tokens.

    kind "library": both are a guess per token, good for display only; the text comes from the library's decoder.
    strips_space: a whole text loses one leading space.
    """

    kind: Kind
    bytes_of: list[bytes]
    text_of: list[str | None]
    strips_space: bool = False


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character → byte (openai/gpt-2 encoder.py, bytes_to_unicode, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def read_table(definition: str, vocab: Mapping[str, int], added: Mapping[int, Any], size: int) -> TokenTable:
    """Table of `size` ids. definition: text of tokenizer.json. added: id → AddedToken, whose text is taken as it is."""
    kind, strips = _classify(json.loads(definition).get("decoder"))
    convert = _byte_level_bytes() if kind == "byte_level" else _sentencepiece_bytes
    table = [b""] * size
    for text, id_ in vocab.items():
        table[id_] = added[id_].content.encode() if id_ in added else convert(text)
    return TokenTable(kind, table, [_whole(data) for data in table], strips)


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _classify(decoder: Any) -> tuple[Kind, bool]:
    steps = _steps(decoder)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return "byte_level", False
    replaces = [s for s in steps if s.get("type") == "Replace"]
    is_llama = names in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
    if is_llama and replaces[0].get("pattern") == {"String": SPACE} and replaces[0].get("content") == " ":
        strip = steps[-1] if names[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
        if strip.get("content") == " " and strip.get("start") in (0, 1) and strip.get("stop") == 0:
            return "byte_fallback", strip.get("start") == 1
    return "library", False


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _byte_level_bytes() -> Callable[[str], bytes]:
    """Converter of byte-level tokens; characters outside the alphabet stand for themselves."""
    alphabet = {char: bytes([byte]) for char, byte in byte_alphabet().items()}
    return lambda text: b"".join([alphabet.get(char) or char.encode() for char in text])


def _sentencepiece_bytes(text: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode()

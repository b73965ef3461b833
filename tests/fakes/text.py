"""A byte-level tokenizer without merges, made in memory, and its chat template: ids are easy to read in tests.

0-2 are <|endoftext|>, <|im_start|>, <|im_end|> (EOS); byte b is id 3 + b; WORDS follow (they decode, never encode).
"""

import json

from nori_cluster.frontend.service import ServedModel
from nori_cluster.frontend.template import ChatTemplate, TemplateSource
from nori_cluster.frontend.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
WORDS = (b"ABC", b"DEF", b"hello", b"\xf0\x9f", b"\xe6\xad", b" world")
VOCAB_SIZE = 3 + 256 + len(WORDS)
ABC, DEF, HELLO, EMOJI_HEAD, CJK_HEAD, WORLD = range(259, 259 + len(WORDS))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + k) for k, byte in enumerate(others)}


def definition() -> str:
    letters = alphabet()
    vocab = {text: id_ for id_, text in enumerate(SPECIAL)}
    vocab |= {letters[byte]: 3 + byte for byte in range(256)}
    vocab |= {"".join(letters[byte] for byte in word): 259 + k for k, word in enumerate(WORDS)}
    added = [
        {"id": id_, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for id_, text in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix":
        None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
        }
    )  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(definition(), special_tokens={"eos_token": "<|im_end|>"}, eos_token_ids=(EOS,))


def served_model(name: str = "smol", *, template: str | None = TEMPLATE) -> ServedModel:
    sources = {} if template is None else {"default": TemplateSource(template, "test")}
    return ServedModel(name=name, tokenizer=byte_tokenizer(), template=ChatTemplate(sources, {}), created=1_700_000_000)


def ids_of(text: str) -> list[int]:
    """One id per byte."""
    return [3 + byte for byte in text.encode()]

"""GGUF vocabulary → tokenizer.json, tokenizer_config.json. Pure.

llama.cpp's tokenization of the same file is the oracle: `pre` names its pre-tokenizer (llama.cpp src/llama-vocab.cpp).
Only those listed here are converted; any other is refused, as a wrong split gives wrong ids without an error.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from nori_cluster.errors import CheckpointError

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL, USER_DEFINED = 3, 4
KEY = "tokenizer.ggml."


class PreTokenizer(msgspec.Struct, frozen=True):
    """digits: split off each numeric character first. split: regex, None = GPT-2's. adds_bos: unless the file says."""

    digits: bool = False
    split: str | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "gpt2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "qwen2": PreTokenizer(split=QWEN2_SPLIT),
    "llama-bpe": PreTokenizer(split=LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
    "llama3": PreTokenizer(split=LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
    "llama-v3": PreTokenizer(split=LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
}


class Vocabulary:
    """The checked vocabulary of a GGUF file; `where` names the file in errors."""

    def __init__(self, where: str, metadata: Mapping[str, Any]) -> None:
        self._where = where
        self._metadata = metadata
        model = self._get("model", str)
        if model != "gpt2":
            raise CheckpointError(
                f"{where}: tokenizer model {model!r:.80} is not converted (only 'gpt2', byte-level BPE); "
                "use the model's safetensors folder instead"
            )
        name = self._get("pre", str)
        if name not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise CheckpointError(f"{where}: pre-tokenizer {name!r:.80} is not known; converted are {known}")
        self._pre = PRE_TOKENIZERS[name]
        self.tokens: list[str] = self._array("tokens", str)
        types: list[int] = self._array("token_type", int)
        if len(types) != len(self.tokens) or len(set(self.tokens)) != len(self.tokens):
            raise CheckpointError(
                f"{where}: {KEY}tokens: {len(self.tokens)} tokens, {len(types)} types, or a duplicate"
            )
        self._types = types
        self._merges = [self._merge(text) for text in self._array("merges", str)]
        self.bos, self.eos = self._id("bos_token_id"), self._id("eos_token_id")
        self._adds_bos = self._flag("add_bos_token", self._pre.adds_bos) and self.bos is not None
        self._adds_eos = self._flag("add_eos_token", False) and self.eos is not None

    @property
    def eos_ids(self) -> list[int]:
        """End of text and, where it differs, end of turn."""
        ids = (self.eos, self._id("eot_token_id"))
        return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))

    def tokenizer_json(self) -> str:
        vocab = {text: id_ for id_, text in enumerate(self.tokens)}
        tokenizer = tokenizers.Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=self._merges,
                fuse_unk=False,
                byte_fallback=False,
                ignore_merges=self._pre.ignore_merges,
            )
        )
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        added = [(text, type_) for text, type_ in zip(self.tokens, self._types, strict=True)]
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, y in added if y == USER_DEFINED])
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, y in added if y == CONTROL])
        frame = [*([self.bos] if self._adds_bos else []), None, *([self.eos] if self._adds_eos else [])]
        if frame != [None]:
            ids = {self.tokens[id_]: id_ for id_ in frame if id_ is not None}
            single = ["$A" if id_ is None else self.tokens[id_] for id_ in frame]
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
        return str(tokenizer.to_str())

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, chat template included."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds_bos,
            "add_eos_token": self._adds_eos,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id_ = self._id(f"{key}_token_id")
            if id_ is not None:
                config[f"{name}_token"] = self.tokens[id_]
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self._where}: tokenizer.chat_template is not a string")
        return config if template is None else config | {"chat_template": template}

    def generation_config(self) -> dict[str, Any]:
        eos = self.eos_ids
        ids = {"bos_token_id": self.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
        ids["pad_token_id"] = self._id("padding_token_id")
        return {key: value for key, value in ids.items() if value is not None}

    def _pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self._pre.split is not None:
            split = pre_tokenizers.Split(tokenizers.Regex(self._pre.split), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self._pre.digits:
            return gpt2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])

    def _get(self, key: str, type_: type) -> Any:
        value = self._metadata.get(KEY + key)
        if type(value) is not type_:
            found = "missing" if value is None else f"a {type(value).__name__}"
            raise CheckpointError(f"{self._where}: {KEY}{key}: expected {type_.__name__}, it is {found}")
        return value

    def _array(self, key: str, type_: type) -> list[Any]:
        values = self._get(key, list)
        wrong = {type(value).__name__ for value in values} - {type_.__name__}
        if wrong:
            raise CheckpointError(f"{self._where}: {KEY}{key}: an array of {wrong.pop()}, expected {type_.__name__}")
        return list(values)

    def _flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, bool)) if KEY + key in self._metadata else default

    def _id(self, key: str) -> int | None:
        if KEY + key not in self._metadata:
            return None
        id_ = self._get(key, int)
        if not 0 <= id_ < len(self.tokens):
            raise CheckpointError(f"{self._where}: {KEY}{key}: {id_} is not one of {len(self.tokens)} tokens")
        return int(id_)

    def _merge(self, text: str) -> tuple[str, str]:
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{self._where}: {KEY}merges: {text!r:.80} is not two tokens and a space")
        return left, right


def dump(value: Mapping[str, Any]) -> str:
    """JSON as it is written into checkpoint folders."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"

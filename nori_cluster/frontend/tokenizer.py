"""Text ↔ token ids over a tokenizer.json. Nothing changes after loading: safe to share between threads.

service and template encode; detokenizer and logprobs take the bytes of each token from `table`.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from nori_cluster.checkpoint.folder import confined, read_json_object, read_text
from nori_cluster.checkpoint.hf_config import read_config
from nori_cluster.errors import CheckpointError, ClientError
from nori_cluster.frontend.control_tokens import ControlTokens
from nori_cluster.frontend.token_table import TokenTable, read_table

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer.

    Control tokens written in plain text are text unless `parse_special` is given: two instances of the library's
    tokenizer, one of which never looks for them. Tokens that are added but not special (Qwen's <tool_call>, llama.cpp's
    "user defined") are found in both modes, as in the libraries they come from.

    vocab_size: ids below it are valid for the model (config.json's when there is one).
    special_tokens: bos_token, eos_token … as text. special_ids: every control token; `control` knows their spellings.
    longest_token: bytes of the longest token; 0 = not known.
    normalizes_special: control tokens are sought in normalised text, where other characters may spell one.
    """

    def __init__(
        self,
        definition: str,
        *,
        special_tokens: dict[str, str] | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        """definition: text of tokenizer.json. Raises ValueError when it cannot be read."""
        self.special_tokens = special_tokens or {}
        self._parsing = _load(definition, self.special_tokens.values())
        self._plain = _load(definition, self.special_tokens.values())
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.special_added: dict[int, tokenizers.AddedToken] = {i: token for i, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_added)
        vocab = self._parsing.get_vocab(with_added_tokens=True)
        size = 1 + max(vocab.values(), default=-1)
        self.vocab_size = size if vocab_size is None else vocab_size
        self.table: TokenTable = read_table(definition, vocab, added, max(size, self.vocab_size))
        if eos_token_ids is None:
            eos = self.token_id(self.special_tokens.get("eos_token", ""))
            eos_token_ids = () if eos is None else (eos,)
        self.eos_token_ids = tuple(eos_token_ids)
        self._forgeable = self.special_ids - {self.token_id(self.special_tokens.get("unk_token", ""))}
        self._added_count = int(self._parsing.num_special_tokens_to_add(False))
        exact = self.table.kind != "library"  # else a long unknown word may be one token
        self.longest_token = max(map(len, self.table.bytes_of), default=0) if exact else 0
        self.control = ControlTokens(self.special_added)
        self.normalizes_special = self._parsing.normalizer is not None and any(
            token.normalized for token in self.special_added.values()
        )

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and, when present, config.json. Raises CheckpointError."""
        folder = Path(folder)
        definition = read_text(folder, "tokenizer.json")
        if definition is None:
            raise CheckpointError(f"{folder}: no tokenizer.json")
        special = read_special_tokens(folder)
        config = read_config(folder) if confined(folder, "config.json").is_file() else None
        try:
            return cls(
                definition,
                special_tokens=special,
                vocab_size=config.vocab_size if config else None,
                eos_token_ids=config.eos_token_ids or None if config else None,
            )
        except ValueError as error:
            raise CheckpointError(f"{folder / 'tokenizer.json'}: {error}") from error

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = True) -> list[int]:
        """Ids of a text. add_special: also what the tokenizer adds by itself (BOS in Llama 3, nothing in SmolLM2).

        Raises ClientError when the text holds a lone UTF-16 surrogate, which no tokenizer can represent.
        """
        tokenizer = self._parsing if parse_special else self._plain
        try:
            # The plain encode holds the interpreter lock for its whole time, which may be seconds.
            ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise surrogate_error(text) from error
        if parse_special or self._forgeable.isdisjoint(ids):
            return ids
        allowed = self._added_count if add_special else 0
        if sum(id_ in self._forgeable for id_ in ids) <= allowed:
            return ids
        return self._encode_apart(text, add_special)

    def _encode_apart(self, text: str, add_special: bool) -> list[int]:
        """Plain encoding where the vocabulary's merges can spell a control token: each spelling is cut in two."""
        cuts = [0, *(at + 1 for at in self.control.starts(text)), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        encodings = [self._plain.encode(piece, add_special_tokens=False) for piece in pieces]
        merged = tokenizers.Encoding.merge(encodings)
        ids: list[int] = self._plain.post_process(merged, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        table = self.table
        if table.kind == "library":
            return self.decode_with_library(list(ids), skip_special)
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join([table.bytes_of[i] for i in ids if i not in skipped]).decode("utf-8", "replace")
        return text[1:] if table.strips_space and text.startswith(" ") else text

    def decode_with_library(self, ids: list[int], skip_special: bool) -> str:
        """The library's own decoder, for tokenizers whose text is not a concatenation of token bytes."""
        text: str = self._parsing.decode(ids, skip_special_tokens=skip_special)
        return text

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled so in the vocabulary."""
        id_: int | None = self._parsing.token_to_id(text)
        return id_

    def token_bytes(self, id_: int) -> bytes:
        """Raw bytes a token adds to the text; a special token's own text. Ids without a token give b""."""
        return self.table.bytes_of[id_]

    def token_text(self, id_: int) -> str:
        """The token's bytes as text, U+FFFD for what is not UTF-8 by itself."""
        return self.table.bytes_of[id_].decode("utf-8", "replace")

    def is_special(self, id_: int) -> bool:
        return id_ in self.special_ids

    @property
    def definition(self) -> str:
        """The text of a tokenizer.json, with every control token marked special."""
        text: str = self._parsing.to_str()
        return text

    @property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes for which a byte-level vocabulary has no token: text that needs one loses it silently when encoded.

        In SmolLM2 these are the 21 bytes 04 06 13 14 16 1d c0 c1 f1 f2 f5-ff (controls, and U+40000 to U+BFFFF).
        """
        if self.table.kind != "byte_level":
            return frozenset()
        single = {
            data[0] for id_, data in enumerate(self.table.bytes_of) if len(data) == 1 and not self.is_special(id_)
        }
        return frozenset(range(256)) - single


def surrogate_error(text: str, param: str | None = None) -> ClientError:
    at = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    return ClientError(f"the text holds a lone UTF-16 surrogate (U+{ord(text[at]):04X}) at character {at}", param=param)


def read_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token … of tokenizer_config.json (and the older special_tokens_map.json), as text."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json_object(folder, name) or {}
        for key in SPECIAL_NAMES:
            value = values.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str) and content:
                found[key] = content
    return found


def _load(definition: str, special: Iterable[str]) -> Any:
    """A tokenizer that neither cuts nor pads, with every named special token of its vocabulary marked special."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    extra = [text for text in sorted(set(special) - marked) if tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in extra])
    return tokenizer

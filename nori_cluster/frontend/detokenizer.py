"""Token ids → text, a few at a time, for one stream. Owned by one Generation candidate.

The deltas of a stream put together are the text of its ids decoded at once. Text continues a prompt, so a leading space
is kept where a whole text would lose it (SentencePiece).
"""

import codecs
from collections.abc import Sequence

from nori_cluster.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """push(ids) gives the text that is certain; bytes of an unfinished character wait for the next push or flush."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._bytes_of = tokenizer.table.bytes_of
        self._text_of = tokenizer.table.text_of
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._pending = b""
        self._window = None if tokenizer.table.kind != "library" else _Window(tokenizer, skip_special)

    def push(self, ids: Sequence[int]) -> str:
        """Text completed by these tokens; empty while a character is unfinished."""
        if self._window is not None:
            return self._window.push(ids)
        if len(ids) == 1 and not self._pending:  # nearly always: 0.25 us instead of 0.5
            text = self._text_of[ids[0]]
            if text is not None:
                return "" if ids[0] in self._skipped else text
        data = self._pending
        for id_ in ids:
            if id_ not in self._skipped:
                data += self._bytes_of[id_]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """What is left at the end of the stream: an unfinished character as U+FFFD, once."""
        if self._window is not None:
            return self._window.flush()
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _Window:
    """Slow twin for the library's decoders: decodes a window of ids with and without the new ones.

    After vLLM's detokenize_incrementally: ids before _read are context whose text was already given. Text that ends in
    U+FFFD is held back, as it may be an unfinished character, for at most MAX_HELD ids.
    """

    CONTEXT = 6
    MAX_HELD = 8

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(id_) for id_ in ids])

    def _push_one(self, id_: int) -> str:
        self._ids.append(id_)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < self.MAX_HELD:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        self._ids = self._ids[-self.CONTEXT :]
        self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer.decode_with_library
        before = decode(self._ids[: self._read], self._skip_special)
        return decode(self._ids, self._skip_special)[len(before) :]

    def flush(self) -> str:
        return self._advance(self._new_text()) if self._read < len(self._ids) else ""

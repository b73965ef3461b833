"""The control tokens of one vocabulary as text: where they are spelled, how to break a spelling, how to split at them.

Owned by the tokenizer; literal uses it to keep what clients write apart from what the chat template writes.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode noncharacters: never text of any language


class ControlTokens:
    """tokens: id → AddedToken (content, lstrip, rstrip), special ones only.

    A mark is one of MARKS put after the first character of a spelling: broken so, it is not found by `split`.
    """

    def __init__(self, tokens: Mapping[int, Any]) -> None:
        by_length = sorted(tokens.items(), key=lambda item: -len(item[1].content))
        kept = [(id_, token) for id_, token in by_length if token.content]
        self._ids = {text: id_ for id_, token in kept for text in (token.content, token.content.strip()) if text}
        borders = {token.content[i] for _, token in kept for i in (0, -1)}
        self._prefixes = sorted({token.content[:2] for _, token in kept})
        spellings = "|".join(re.escape(token.content) for _, token in kept) or "(?!)"
        self._spelling = re.compile(spellings)
        self._border = re.compile(f"[{re.escape(''.join(sorted(borders)))}]" if kept else "(?!)")
        self._whole = re.compile("|".join(_pattern(token) for _, token in kept) or "(?!)")

    def starts(self, text: str) -> list[int]:
        """Index of every character at which some control token is spelled, overlapping ones too."""
        found = []
        match = self._spelling.search(text) if self._may_spell(text) else None
        while match:
            found.append(match.start())
            match = self._spelling.search(text, match.start() + 1)
        return found

    def mark(self, text: str, mark: str) -> str:
        """The text with every spelling broken; unchanged when there is none."""
        starts = self.starts(text)
        if not starts:
            return text
        cuts = [0, *(at + 1 for at in starts), len(text)]
        return mark.join([text[start:end] for start, end in pairwise(cuts)])

    def may_join(self, text: str) -> bool:
        """True when the text holds a character with which some control token begins or ends."""
        return self._border.search(text) is not None

    def mark_borders(self, text: str, mark: str) -> str:
        """The text with marks around each character with which some control token begins or ends."""
        return self._border.sub(lambda match: f"{mark}{match[0]}{mark}", text)

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain text, id of the control token after it), the last with None. Longest spelling first."""
        at = 0
        for match in self._whole.finditer(text):
            found = match[0]
            yield text[at : match.start()], self._ids[found if found in self._ids else found.strip()]
            at = match.end()
        yield text[at:], None

    def found(self, text: str) -> list[int]:
        """Ids of the control tokens spelled in a text, in order."""
        return [id_ for _, id_ in self.split(text) if id_ is not None]

    def _may_spell(self, text: str) -> bool:
        return any(prefix in text for prefix in self._prefixes)


def _pattern(token: Any) -> str:
    """One alternative of the splitting pattern, with the space the token swallows.

    No groups: alternatives that begin with a literal let the regex engine skip to it. A spelling of one character has
    no inside to put a mark in: a mark right after it breaks it.
    """
    left, right = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
    unmarked = f"(?![{MARKS}])" if len(token.content) == 1 else ""
    return f"{left}{re.escape(token.content)}{unmarked}{right}"

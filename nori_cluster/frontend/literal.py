"""Keeping clients' text literal through a chat template (a control token typed by a user must stay text).

template marks the variables, renders, and hands the result here for encoding. Pure.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nori_cluster.errors import ClientError
from nori_cluster.frontend.control_tokens import MARKS
from nori_cluster.frontend.tokenizer import Tokenizer, surrogate_error


class LiteralText:
    """One rendering's marks: two characters that occur in none of its variables.

    Harmless text is passed to the template unchanged, so templates may trim, test and split it, and the result is
    encoded as it stands. Only where a client spells a control token is that spelling broken by a mark; the rendered
    text is then cut at the unbroken ones (the template's), and what lies between is encoded without special parsing,
    marks taken out, in one piece, so that merges go over the borders as in plain text.

    Text may also complete a control token together with its neighbours ("<|im_" before a template's "end|>").
    `check_same_controls` compares with a rendering in which none of the client's characters can begin or end one.
    """

    def __init__(self, tokenizer: Tokenizer, variables: dict[str, Any]) -> None:
        """Raises ClientError for a lone surrogate or values nested too deeply."""
        self._tokenizer = tokenizer
        self._control = tokenizer.control
        used: set[str] = set()
        self.may_join = False
        for name, text in _named_strings(variables):
            if not text.isascii():
                used.update(char for char in MARKS if char in text)
                _check_surrogates(text, name)
            self.may_join = self.may_join or self._control.may_join(text)
        free = [char for char in MARKS if char not in used]
        if len(free) < 2:
            raise ClientError("the messages use every Unicode noncharacter from U+FDD0 to U+FDEF", param="messages")
        self._mark, self.end_mark = free[:2]

    def mark(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A copy with every spelling of a control token broken."""
        change = self._control.mark
        return {name: _mapped(value, lambda text: change(text, self._mark)) for name, value in variables.items()}

    def mark_borders(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A copy in which no string can begin or end a control token."""
        change = self._control.mark_borders
        return {name: _mapped(value, lambda text: change(text, self._mark)) for name, value in variables.items()}

    def check_same_controls(self, rendered: str, unjoinable: str) -> None:
        """Raise ClientError when `rendered` holds control tokens the template did not write by itself."""
        found, own = self._control.found(rendered), self._control.found(unjoinable)
        if found != own:
            raise ClientError(
                "the messages' text would form a control token together with the chat template's", param="messages"
            )

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text: control tokens of the template as such, marked ones as text."""
        tokenizer = self._tokenizer
        if self._mark not in rendered and not tokenizer.normalizes_special:
            return tokenizer.encode(rendered, parse_special=True, add_special=False)
        ids: list[int] = []
        for plain, control in self._control.split(rendered):
            if plain:
                ids += tokenizer.encode(plain.replace(self._mark, ""), add_special=False)
            if control is not None:
                ids.append(control)
        return ids


def _check_surrogates(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise surrogate_error(text, name) from error


def _named_strings(variables: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every string in the variables, keys too, with the name of the field that holds it (messages[2].content)."""
    pending: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in variables.items()]
    while pending:
        name, value, depth = pending.pop()
        if depth > 64:
            raise ClientError(f"{name:.200} is nested too deeply", param=name[:200])
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield name, str(key)
                pending.append((f"{name}.{key}", item, depth + 1))
        elif isinstance(value, list | tuple):
            pending += [(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A deep copy with every string changed, dict keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value

"""Regular expressions of requests and schemas, rewritten into the dialect of llguidance (Rust's regex syntax).

Where JavaScript, Python and Rust read a construct differently, the rewritten one matches what all of them match, or the
construct is refused: \\d \\w \\s are ASCII, `.` is no line end of any kind, [ & ~ in a class are characters.
Lookarounds, back references and word boundaries are refused: they are no regular languages or not implemented.
"""

import re

from nori_cluster.grammar.limits import MAX_DEPTH, MAX_REPETITION, GrammarError

_SPACE = r"\t\n\x0b\x0c\r "
_EVERY_SPACE = _SPACE + r"\x1c-\x1f\x85\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACE}]",
    "S": f"[^{_EVERY_SPACE}]",
}
_ANY = r"[^\n\r\x85\u2028\u2029]"
_SLASH = r"\x2f"  # a plain one would end the expression in a grammar
_SAME = frozenset("nrtfv")  # the same control character everywhere
_BOUNDS = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_HEX = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_FLAGS = re.compile(r"\(\?([is]+)\)")  # at the start: for the whole pattern
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>|[ims]+(?:-[ims]+)?:)?")


class Rewriter:
    """One pass over a pattern. `weights[-1]`: the largest repetition product inside the open group so far."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.out: list[str] = []
        self.weights = [1]
        self.atom = 0  # weight of the atom that a quantifier would repeat; 0 = there is none

    def rewrite(self) -> str:
        while self.at < len(self.pattern):
            self._step(self.pattern[self.at])
        if len(self.weights) > 1:
            raise GrammarError("has an unclosed parenthesis")
        return "".join(self.out)

    def _step(self, char: str) -> None:
        if char == "(":
            self._open()
        elif char == ")":
            self._close()
        elif char == "[":
            self._put(self._char_class(), 1)
        elif char == "\\":
            self._put(self._escape(in_class=False), 1)
        elif char in "*+?{":
            self._quantifier(char)
        elif char == ".":
            self.at += 1
            self._put(_ANY, 1)
        elif char in "|^$":
            self.at += 1
            self._put(char, 0)
        else:
            self.at += 1
            self._put(_plain(char), 1)

    def _put(self, text: str, weight: int) -> None:
        self.out.append(text)
        self.atom = weight

    def _open(self) -> None:
        match = _GROUP.match(self.pattern, self.at + 1)
        head = match.group() if match else ""
        if head == "?":
            around = self.pattern[self.at + 1 : self.at + 4]
            what = "lookaround" if around[1:2] in ("=", "!", "<") else "group"
            raise GrammarError(f"has a {what} that is not supported: ({around}…")
        self.at += 1 + len(head)
        self.weights.append(1)
        if len(self.weights) > MAX_DEPTH:
            raise GrammarError(f"is nested too deeply: more than {MAX_DEPTH} parentheses")
        self._put("(" + (head if head.endswith(":") else "?:"), 0)

    def _close(self) -> None:
        if len(self.weights) == 1:
            raise GrammarError("has a closing parenthesis too many")
        self.at += 1
        inner = self.weights.pop()
        self.weights[-1] = max(self.weights[-1], inner)
        self._put(")", inner)

    def _quantifier(self, char: str) -> None:
        if not self.atom:
            raise GrammarError(f"repeats nothing at character {self.at}: {char!r}")
        times, text = 1, char
        if char == "{":
            match = _BOUNDS.match(self.pattern, self.at)
            if match is None:
                raise GrammarError(f"has a brace at character {self.at} that is no repetition; write \\{{")
            text = match.group()
            low, high = int(match[1]), int(match[3] or match[1])
            if match[3] and high < low:
                raise GrammarError(f"has a repetition that ends before it begins: {text}")
            times = max(high, 1)
        weight = self.atom * times
        if weight > MAX_REPETITION:
            raise GrammarError(f"repeats up to {weight} times (nested repetitions multiply), at most {MAX_REPETITION}")
        self.weights[-1] = max(self.weights[-1], weight)
        self.at += len(text)
        follower = self.pattern[self.at : self.at + 1]
        if follower and follower in "*+{":
            raise GrammarError(f"has a quantifier after a quantifier at character {self.at}")
        self.at += follower == "?"  # lazy: the same strings match
        self._put(text, 0)

    def _escape(self, in_class: bool) -> str:
        """The rewritten escape at `at`, which moves behind it."""
        rest = self.pattern[self.at + 1 : self.at + 2]
        if not rest:
            raise GrammarError("ends with a backslash")
        for known in (_HEX, _PROPERTY):
            if match := known.match(self.pattern, self.at + 1):
                self.at += 1 + len(match.group())
                return "\\" + match.group()
        self.at += 2
        if rest in _CLASSES:
            return _CLASSES[rest]
        if rest in _SAME:
            return "\\" + rest
        if rest == "b" and in_class:
            return r"\x08"
        if rest == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return r"\x00"
        if rest == "c" and self.pattern[self.at : self.at + 1].isalpha() and self.pattern[self.at].isascii():
            self.at += 1
            return f"\\x{ord(self.pattern[self.at - 1]) % 32:02x}"
        if rest.isalnum() or not rest.isascii():
            raise GrammarError(f"has an escape that is not supported: \\{rest}")
        return re.escape(rest) if rest in ".^$|?*+()[]{}\\-&~" else _plain(rest)

    def _char_class(self) -> str:
        out = "["
        self.at += 1
        if self.pattern[self.at : self.at + 1] == "^":
            out += "^"
            self.at += 1
        first = True
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == "]":
                if first:
                    raise GrammarError("has an empty character class; write \\] for a bracket")
                self.at += 1
                return out + "]"
            if char == "\\":
                out += self._escape(in_class=True)
            else:
                if self.pattern.startswith("--", self.at):
                    raise GrammarError("has -- in a character class; write \\-")
                self.at += 1
                out += "\\" + char if char in "[&~^" else _plain(char)
            first = False
        raise GrammarError("has an unclosed character class")


def rewrite(pattern: str) -> str:
    """The pattern in Rust's syntax. Raises GrammarError (a message that continues "the regular expression …")."""
    flags = _FLAGS.match(pattern)
    if flags is None:
        return Rewriter(pattern).rewrite()
    return f"(?{flags[1]}:" + Rewriter(pattern[flags.end() :]).rewrite() + ")"


def _plain(char: str) -> str:
    """A character that stands for itself, written so that it does so outside of classes too."""
    if char < " " or char == "\x7f":
        return f"\\x{ord(char):02x}"
    return "\\" + char if char in "]}" else _SLASH if char == "/" else char


def literal(text: str) -> str:
    """A pattern that matches exactly this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)

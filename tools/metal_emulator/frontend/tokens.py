"""Tokens of preprocessed MSL text, with the line of the source each came from."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+) | (?P<newline>\n) | (?P<directive>\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
      | (?P<number>(?:0[xX][0-9a-fA-F]+ | (?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[a-zA-Z]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<punct>:: | -> | \[\[ | == | != | <= | >= | && | \|\| | .)""",
    re.VERBOSE,
)
_LINE_MARK = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class MslError(Exception):
    """Source the emulator does not accept; the message starts with file:line."""


@dataclass
class Token:
    kind: str
    text: str
    line: int
    file: str
    out: str = ""  # what is written in its place; starts as the text itself

    def __post_init__(self) -> None:
        self.out = self.text


class TokenList:
    """The significant tokens, for matching, and all of them, for writing the text back."""

    def __init__(self, text: str) -> None:
        self.all: list[Token] = []
        self.sig: list[Token] = []
        line, file = 1, "kernel.metal"
        for match in _TOKEN.finditer(text):
            kind = str(match.lastgroup)
            token = Token(kind, match.group(), line, file)
            self.all.append(token)
            if kind == "newline":
                line += 1
            elif kind == "directive":
                if mark := _LINE_MARK.match(token.text):
                    line, file = int(mark.group(1)) - 1, mark.group(2)
            elif kind != "space":
                self.sig.append(token)

    def __len__(self) -> int:
        return len(self.sig)

    def text(self, i: int) -> str:
        """Text of token i, or nothing beyond either end."""
        return self.sig[i].text if 0 <= i < len(self.sig) else ""

    def kind(self, i: int) -> str:
        return self.sig[i].kind if 0 <= i < len(self.sig) else ""

    def error(self, i: int, message: str) -> MslError:
        token = self.sig[min(max(i, 0), len(self.sig) - 1)]
        return MslError(f"{token.file}:{token.line}: {message}")

    def close(self, i: int) -> int:
        """Index of the bracket that closes the one at i."""
        if self.text(i) == "[[":
            return self._close_attribute(i)
        opening = self.text(i)
        depth, closing = 0, _PAIRS[opening]
        j = i
        while j < len(self.sig):
            text = self.text(j)
            if text == opening:
                depth += 1
            elif text == "[[" and opening == "[":
                depth += 2
            elif text == closing:
                depth -= 1
                if depth == 0:
                    return j
            j += 1
        raise self.error(i, f"'{opening}' is never closed")

    def _close_attribute(self, i: int) -> int:
        depth = 0
        for j in range(i, len(self.sig)):
            text = self.text(j)
            depth += 2 if text == "[[" else 1 if text == "[" else -1 if text == "]" else 0
            if depth == 0:
                return j
        raise self.error(i, "'[[' is never closed")

    def close_angle(self, i: int) -> int:
        """Index of the '>' that closes the template argument list opened at i."""
        depth, j = 0, i
        while j < len(self.sig):
            text = self.text(j)
            if text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return j
            elif text in _PAIRS:
                j = self.close(j)
            elif text in (";", ")", "}"):
                break
            j += 1
        raise self.error(i, "'<' is never closed")

    def erase(self, first: int, last: int) -> None:
        """Drops tokens first to last from the output; line breaks stay, so lines keep."""
        for token in self.sig[first : last + 1]:
            token.out = ""

    def joined(self, first: int, last: int) -> str:
        return " ".join(t.text for t in self.sig[first : last + 1])

    def output(self) -> str:
        return "".join(t.out for t in self.all)

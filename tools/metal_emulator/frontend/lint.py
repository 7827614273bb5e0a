"""Rules a kernel must keep because the shim would accept what Metal does not."""

from __future__ import annotations

from .tokens import MslError, TokenList

_FORBIDDEN = {
    "double": "Metal has no double",
    "goto": "Metal has no goto",
    "new": "Metal has no heap",
    "delete": "Metal has no heap",
    "virtual": "Metal has no virtual functions",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "asm": "Metal has no inline assembly",
    "thread_local": "Metal has no thread_local",
    "std": "the standard library is metal::, not std::",
    "volatile": "only atomics order accesses of other threads",
    "ray_data": "ray tracing is not modelled",
    "texture2d": "textures are not modelled",
    "sampler": "textures are not modelled",
    "co_await": "not in Metal's C++14",
    "concept": "not in Metal's C++14",
    "requires": "not in Metal's C++14",
    "vertex": "a word of Metal for another kind of function: choose another name",
    "fragment": "a word of Metal for another kind of function: choose another name",
}


_BEFORE_4 = {  # what the tensor types of Metal 4 cannot do without
    "auto": "write the type: only version 4 has types that cannot be written",
}


def _check_lambda(tokens: TokenList, i: int) -> None:
    before = tokens.text(i - 1)
    starts_expression = before in ("=", "(", ",", "{", ";", "return")
    if tokens.text(i) == "[" and starts_expression and tokens.text(i + 1) in ("&", "=", "]"):
        raise tokens.error(i, "lambdas are not in Metal before version 4: write a function")


def _check_static(tokens: TokenList, i: int, depth: int) -> None:
    if tokens.text(i) == "static" and depth > 0 and tokens.text(i + 1) != "constexpr":
        raise tokens.error(i, "Metal has no static locals: 'static' inside a function")


def _check_recursion(tokens: TokenList, name: str, first: int, last: int) -> None:
    for j in range(first, last):
        if tokens.text(j) == name and tokens.text(j + 1) in ("(", "<"):
            if tokens.text(j - 1) not in (".", "->", "::"):
                raise tokens.error(j, f"Metal has no recursion: {name} calls itself")


def lint(tokens: TokenList, language: int) -> None:
    """Raises MslError at the first broken rule."""
    depth = 0
    forbidden = _FORBIDDEN if language >= 400 else _FORBIDDEN | _BEFORE_4
    for i, token in enumerate(tokens.sig):
        if token.kind == "name" and token.text in forbidden:
            raise tokens.error(i, f"'{token.text}': {forbidden[token.text]}")
        if token.text == "{" and tokens.text(i - 1) == ")":
            _check_function(tokens, i)
        depth += {"{": 1, "}": -1}.get(token.text, 0)
        _check_static(tokens, i, depth)
        if language < 400:
            _check_lambda(tokens, i)


def _check_function(tokens: TokenList, body: int) -> None:
    """Looks for a call of itself in the function whose body opens at `body`."""
    i, depth = body - 1, 0
    while i > 0:
        depth += {")": 1, "(": -1}.get(tokens.text(i), 0)
        if depth == 0:
            break
        i -= 1
    name = tokens.text(i - 1)
    if tokens.kind(i - 1) == "name" and name not in ("if", "for", "while", "switch"):
        _check_recursion(tokens, name, body, tokens.close(body))


__all__ = ["MslError", "lint"]

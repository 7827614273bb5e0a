"""Rules a kernel must keep because clang and the shim would accept what Metal does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from . import names
from .tokens import MslError, TokenList

Finding = tuple[int, str]  # a token and what is wrong there

_FORBIDDEN = {
    "double": "Metal has no double",
    "goto": "Metal has no goto",
    "new": "Metal has no heap",
    "delete": "Metal has no heap",
    "virtual": "Metal has no virtual functions",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "noexcept": "Metal has no exceptions",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "asm": "Metal has no inline assembly",
    "register": "Metal has no register",
    "thread_local": "Metal has no thread_local",
    "std": "the standard library is metal::, not std::",
    "volatile": "only atomics order accesses of other threads",
    "ray_data": "ray tracing is not modelled",
    "texture2d": "textures are not modelled",
    "sampler": "textures are not modelled",
    "vertex": "a word of Metal for another kind of function: choose another name",
    "fragment": "a word of Metal for another kind of function: choose another name",
    "wchar_t": "Metal has no wide characters",
    "char8_t": "Metal has no wide characters",
    "char16_t": "Metal has no wide characters",
    "char32_t": "Metal has no wide characters",
    "concept": "not in Metal's C++",
    "requires": "not in Metal's C++",
    "consteval": "not in Metal's C++",
    "constinit": "not in Metal's C++",
    "co_await": "not in Metal's C++",
    "co_yield": "not in Metal's C++",
    "co_return": "not in Metal's C++",
    "_Float16": "the type is half",
    "__bf16": "the type is bfloat",
    "__int128": "Metal has no integers beyond 64 bits",
}
_BEFORE_4 = {  # what the tensor types of Metal 4 cannot do without
    "auto": "write the type: only version 4 has types that cannot be written",
}
_SHIM = re.compile(r"(__builtin_|__attribute__|msl_|MSL_)")
_FLOATING = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?(\w*)")
_NO_VARIABLE = {"using", "typedef", "template", "struct", "class", "union", "enum", "namespace",
                "static_assert", "extern", "friend", "public", "private", "}"}  # fmt: skip
_CONTROL = {"if", "for", "while", "switch", "catch", "return", "sizeof", "decltype"}
_QUALIFIERS = {"const", "static", "constexpr", "inline", "typename", "struct", "coherent", "::"}


def _words(t: TokenList, language: int) -> Iterator[Finding]:
    forbidden = _FORBIDDEN if language >= 400 else _FORBIDDEN | _BEFORE_4
    for i, token in enumerate(t.sig):
        if token.kind != "name":
            continue
        if token.text in forbidden:
            yield i, f"'{token.text}': {forbidden[token.text]}"
        elif _SHIM.match(token.text):
            yield i, f"'{token.text}' is the compiler's or the shim's, not Metal's"
        elif token.text == "detail" and t.text(i - 1) == "::" and t.text(i - 2) == "metal":
            yield i, "metal::detail is the shim's"
        elif token.text == "long" and t.text(i + 1) == "long":
            yield i, "Metal has no long long: long has 64 bits"
        elif token.text in names.ALL - {"char", "short", "int", "long"}:
            if t.text(i - 1) in names.ALL:
                yield i, f"'{token.text}' names a type in Metal"


def _literals(t: TokenList, language: int) -> Iterator[Finding]:
    for i, token in enumerate(t.sig):
        match = _FLOATING.fullmatch(token.text) if token.kind == "number" else None
        if match and match.group(3) == "":
            yield i, f"{token.text} is a float in Metal and a double here: write {token.text}f"


def _functions(t: TokenList) -> Iterator[tuple[str, int, int]]:
    """Name and braces of each body that follows a parameter list."""
    for body in range(len(t)):
        if t.text(body) != "{" or t.text(body - 1) != ")":
            continue
        i, depth = body - 1, 0
        while i > 0:
            depth += {")": 1, "(": -1}.get(t.text(i), 0)
            if depth == 0:
                break
            i -= 1
        name = t.text(i - 1)
        if t.kind(i - 1) == "name" and name not in _CONTROL:
            yield name, body, t.close(body)


def _recursion(t: TokenList, language: int) -> Iterator[Finding]:
    calls: dict[str, dict[str, int]] = {}
    for name, first, last in _functions(t):
        made = calls.setdefault(name, {})
        for j in range(first, last):
            if t.kind(j) == "name" and t.text(j + 1) in ("(", "<"):
                if t.text(j - 1) not in (".", "->", "::"):
                    made.setdefault(t.text(j), j)
    for name in calls:
        reached, todo = set(), [name]
        while todo:
            for called, at in calls[todo.pop()].items():
                if called == name:
                    yield at, f"Metal has no recursion: {name} calls itself"
                if called in calls and called not in reached:
                    reached.add(called)
                    todo.append(called)


def _static_locals(t: TokenList, language: int) -> Iterator[Finding]:
    for _, first, last in _functions(t):
        for i in range(first, last):
            if t.text(i) == "static" and t.text(i + 1) != "constexpr":
                yield i, "Metal has no static locals: 'static' inside a function"


def _lambdas(t: TokenList, language: int) -> Iterator[Finding]:
    for i in range(len(t) if language < 400 else 0):
        starts_expression = t.text(i - 1) in ("=", "(", ",", "{", ";", "return")
        if t.text(i) == "[" and starts_expression and t.text(i + 1) in ("&", "=", "]"):
            yield i, "lambdas are not in Metal before version 4: write a function"


def _pointers(t: TokenList, language: int) -> Iterator[Finding]:
    """Every * and & of a declaration belongs to an address space."""
    types = names.ALL | names.aliases(t) | names.classes(t)
    for i in range(len(t)):
        if t.text(i) not in ("*", "&"):
            continue
        j = i - 1
        while t.text(j) == "const":
            j -= 1
        if t.text(j) == ">":  # of template arguments
            depth = 0
            while j > 0:
                depth += {">": 1, "<": -1}.get(t.text(j), 0)
                j -= 1
                if depth == 0:
                    break
            if t.text(j) not in names.TEMPLATES | types:
                continue
        elif t.text(j) not in types or t.text(j - 1) in (".", "->"):
            continue
        j -= 1
        while t.text(j) in _QUALIFIERS or t.text(j - 1) == "::" or t.text(j + 1) == "::":
            j -= 1
        before = {t.text(j), t.text(j - 1)} if t.text(j) == "const" else {t.text(j)}
        if not before & names.ADDRESS_SPACES:
            yield i, "a pointer or reference without an address space"


def _function_pointers(t: TokenList, language: int) -> Iterator[Finding]:
    for i in range(len(t)):
        inner = t.text(i) == "(" and t.text(i + 1) == "*" and t.kind(i + 2) == "name"
        if inner and t.text(i + 3) == ")" and t.text(i + 4) == "(" and t.kind(i - 1) == "name":
            yield i, "Metal has no function pointers"


def _derived(t: TokenList, language: int) -> Iterator[Finding]:
    for i in range(len(t)):
        named = t.text(i) in ("struct", "class") and t.text(i - 1) != "enum"
        if named and t.kind(i + 1) == "name" and t.text(i + 2) == ":":
            yield i, "Metal's C++ has no derived classes"


def _variables(t: TokenList, language: int) -> Iterator[Finding]:
    """Variables of the program, and static ones of classes, lie in the constant address space."""
    yield from _variables_in(t, 0, len(t), False)


def _variables_in(t: TokenList, first: int, last: int, in_class: bool) -> Iterator[Finding]:
    i = first
    while i < last:
        start, words, call, assigned = i, set(), False, False
        while i < last and t.text(i) not in (";", "{", "}"):
            if t.text(i) in ("(", "[", "[["):
                call = call or (t.text(i) == "(" and not assigned)
                i = t.close(i)
            elif t.text(i) == "=":
                assigned = True
                if t.text(i + 1) == "{":
                    i = t.close(i + 1)
            else:
                words.add(t.text(i))
            i += 1
        opened = t.text(i) == "{"
        if opened and words & {"namespace", "struct", "class", "union"} and not call:
            inner = not words & {"namespace"}
            yield from _variables_in(t, i + 1, t.close(i), inner)
        elif not words & _NO_VARIABLE and not call and words and "constant" not in words:
            if not in_class or "static" in words:
                yield start, "a variable of the program without 'constant'"
        i = t.close(i) + 1 if opened else i + 1


_RULES = [_words, _literals, _recursion, _static_locals, _lambdas, _pointers,
          _function_pointers, _derived, _variables]  # fmt: skip


def findings(t: TokenList, language: int) -> list[MslError]:
    """All broken rules, by their place in the text."""
    found = sorted({f for rule in _RULES for f in rule(t, language)})
    return [t.error(i, message) for i, message in found]


def lint(t: TokenList, language: int) -> None:
    """Raises MslError with every broken rule, a line for each."""
    found = findings(t, language)
    if found:
        raise MslError("\n".join(str(f) for f in found))


__all__ = ["MslError", "findings", "lint"]

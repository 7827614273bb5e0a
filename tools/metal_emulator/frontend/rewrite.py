"""Turns MSL into C++ for clang: token by token, refusing whatever it cannot classify.

Five things of MSL cannot be said by macros or templates alone, and are rewritten:
  - attributes: argument bindings become tables, `host_name` instantiations registrations;
  - vector construction and casts, `float4(a, b)`, `(half4)x`: calls of the shim;
  - `threadgroup` as a storage class: a static variable that the executor knows;
  - function constants: variables that a pipeline sets;
  - literals of half and bfloat.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from . import names
from .lint import lint
from .tokens import TokenList

_CLASS_TEMPLATES = {"vec", "matrix"}
_BUILTINS = {
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
}
_STATEMENT_WORDS = {"return", "else", "case", "do"}
_KEPT_ATTRIBUTES = {"maybe_unused", "nodiscard", "fallthrough", "likely", "unlikely"}
_MAX_THREADS = "max_total_threads_per_threadgroup"


@dataclass
class Parameter:
    kind: str  # an enumerator of msl_source, shim/runtime.h
    index: str  # expression for the binding's index
    name: str


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    max_threads: str
    body: tuple[int, int]  # token indices of its braces


@dataclass
class Module:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    entries: list[tuple[str, str]] = field(default_factory=list)  # host name, function expression
    constants: list[str] = field(default_factory=list)


class Rewriter:
    def __init__(self, preprocessed: str, language: int | None) -> None:
        self.language = language
        self.t = TokenList(preprocessed)
        self.module = Module()
        self.types = names.VECTORS | names.MATRICES | {"half", "bfloat"}
        self.done: set[int] = set()  # attributes already dealt with, by their first token

    def run(self) -> str:
        if self.language is not None:
            lint(self.t, self.language)
        self.types |= names.aliases(self.t)
        self._instantiations()
        self._kernels()
        self._function_constants()
        self._remaining_attributes()
        self._threadgroup_words()
        self._expressions()
        self._literals()
        return self.t.output() + self._registrations()

    # ---- attributes

    def _attribute(self, i: int) -> tuple[str, int]:
        """Text between the brackets of the attribute at i, and the index of its last token."""
        end = self.t.close(i)
        return self.t.joined(i + 1, end - 2), end

    def _host_name(self, i: int) -> str:
        text, _ = self._attribute(i)
        match = re.fullmatch(r'host_name \( ((?:"[^"]*" ?)+)\)', text)
        if not match:
            raise self.t.error(i, f"attribute [[{text}]]: expected host_name(\"...\")")
        return "".join(re.findall(r'"([^"]*)"', match.group(1)))

    def _instantiations(self) -> None:
        """template [[host_name("x")]] [[kernel]] void f<T>(...); -> an entry named x."""
        t = self.t
        for i in range(len(t)):
            if t.text(i) != "template" or t.text(i + 1) != "[[":
                continue
            host = self._host_name(i + 1)
            self.done.add(i + 1)
            j = t.close(i + 1) + 1
            while t.text(j) in ("kernel", "[["):
                if t.text(j) == "[[":
                    self.done.add(j)
                j = t.close(j) + 1 if t.text(j) == "[[" else j + 1
            if t.text(j) == "decltype":
                j = t.close(j + 1) + 1
            elif t.kind(j) == "name" and t.kind(j + 1) == "name":
                j += 1  # void, or the name of a function's type
            else:
                raise t.error(j, f"instantiation of '{host}': expected the type of a function")
            first = j
            if t.text(j + 1) != "<":
                raise t.error(j, f"instantiation of '{host}': expected template arguments")
            last = t.close_angle(j + 1)
            end = last
            while t.text(end) != ";":
                if t.text(end) == "[[":
                    self.done.add(end)
                end += 1
            self.module.entries.append((host, t.joined(first, last)))
            t.erase(i, end)

    def _kernels(self) -> None:
        t = self.t
        for i in range(len(t)):
            if t.sig[i].out == "":
                continue
            if t.text(i) == "kernel":
                t.sig[i].out = ""
                self._kernel(i, i + 1)
            elif t.text(i) == "[[" and self._attribute(i)[0] == "kernel":
                self.done.add(i)
                end = t.close(i)
                t.erase(i, end)
                self._kernel(i, end + 1)

    def _kernel(self, start: int, i: int) -> None:
        t = self.t
        host, limit = self._leading_attributes(start)
        while t.text(i) == "[[":
            more, maximum = self._kernel_attribute(i)
            host, limit = more or host, maximum or limit
            i = t.close(i) + 1
        if t.text(i) != "void" or t.kind(i + 1) != "name" or t.text(i + 2) != "(":
            raise t.error(i, "expected 'void name(' after 'kernel'")
        name, close = t.text(i + 1), t.close(i + 2)
        body = close + 1
        while t.text(body) == "[[":
            more, maximum = self._kernel_attribute(body)
            host, limit = more or host, maximum or limit
            body = t.close(body) + 1
        if t.text(body) != "{":
            raise t.error(body, f"kernel {name}: expected its body")
        if name in self.module.kernels:
            raise t.error(i, f"kernel {name} is defined twice")
        parameters = [self._parameter(a, b) for a, b in self._split(i + 3, close)]
        self._number_bindings(parameters)
        self.module.kernels[name] = Kernel(
            name, parameters, limit or "0", (body, t.close(body))
        )
        if not self._is_template(start):
            self.module.entries.append((host or name, name))

    def _leading_attributes(self, start: int) -> tuple[str, str]:
        """Attributes before the word kernel: they end right before it."""
        host = limit = ""
        while self.t.text(start - 1) == "]" and self.t.text(start - 2) == "]":
            i = start - 2
            while self.t.text(i) != "[[":
                i -= 1
            more, maximum = self._kernel_attribute(i)
            host, limit, start = more or host, maximum or limit, i
        return host, limit

    def _kernel_attribute(self, i: int) -> tuple[str, str]:
        """(host name, limit of threads) as far as the attribute at i tells."""
        text, end = self._attribute(i)
        self.done.add(i)
        self.t.erase(i, end)
        if text.startswith("host_name"):
            return self._host_name(i), ""
        if match := re.fullmatch(_MAX_THREADS + r" \( (.*) \)", text):
            return "", match.group(1)
        raise self.t.error(i, f"attribute [[{text}]] of a kernel is not modelled")

    def _is_template(self, start: int) -> bool:
        i = start - 1
        while i >= 0 and self.t.sig[i].out == "":
            i -= 1
        return self.t.text(i) == ">"

    def _split(self, first: int, close: int) -> list[tuple[int, int]]:
        """Ranges of the parameters in [first, close), apart at commas of the outer level."""
        parts, start, i, angle = [], first, first, 0
        while i < close:
            text = self.t.text(i)
            if text in ("(", "[", "[[", "{"):
                i = self.t.close(i)
            elif text in ("<", ">"):
                angle += 1 if text == "<" else -1
            elif text == "," and angle == 0:
                parts.append((start, i - 1))
                start = i + 1
            i += 1
        return parts + [(start, close - 1)] if start < close else parts

    def _number_bindings(self, parameters: list[Parameter]) -> None:
        """Texts of others leave indices out: then a buffer takes the lowest free one."""
        used = {p.index for p in parameters if p.kind in ("device_argument", "constant_argument")}
        for p in parameters:
            if p.index == "":
                p.index = next(n for n in map(str, range(32)) if n not in used)
                used.add(p.index)

    def _parameter(self, first: int, last: int) -> Parameter:
        t = self.t
        at = next((i for i in range(first, last + 1) if t.text(i) == "[["), None)
        if at is None and self.language is None:
            words = [t.text(i) for i in range(first, last + 1)]
            return self._bound(first, "buffer", "", t.text(last), words)
        if at is None:
            raise t.error(first, f"parameter '{t.joined(first, last)}' has no [[attribute]]")
        text, end = self._attribute(at)
        if end != last:
            raise t.error(end, "more than one attribute on a parameter")
        self.done.add(at)
        t.erase(at, end)
        name, words = t.text(at - 1), [t.text(i) for i in range(first, at)]
        if match := re.fullmatch(r"(buffer|threadgroup) \( (.*) \)", text):
            return self._bound(first, match.group(1), match.group(2), name, words)
        if text in _BUILTINS:
            return Parameter(text, "0", name)
        raise t.error(at, f"attribute [[{text}]] of a parameter is not modelled")

    def _bound(
        self, at: int, kind: str, index: str, name: str, words: list[str]
    ) -> Parameter:
        spaces = [w for w in words if w in ("device", "constant", "threadgroup", "thread")]
        if len(spaces) != 1 or not ({"*", "&"} & set(words)):
            raise self.t.error(at, f"parameter {name}: expected one address space and * or &")
        if (kind == "threadgroup") != (spaces[0] == "threadgroup") or spaces[0] == "thread":
            raise self.t.error(at, f"parameter {name}: [[{kind}]] with '{spaces[0]}'")
        return Parameter(f"{spaces[0]}_argument", index, name)

    def _function_constants(self) -> None:
        t = self.t
        for i in range(len(t)):
            if t.text(i) != "[[" or i in self.done:
                continue
            text, end = self._attribute(i)
            match = re.fullmatch(r"function_constant \( (.*) \)", text)
            if not match:
                continue
            name, start = t.text(i - 1), i - 3
            if t.text(start) != "constant" or t.text(end + 1) != ";":
                raise t.error(i, "expected 'constant TYPE NAME [[function_constant(n)]];'")
            self.done.add(i)
            t.erase(i, end)
            t.sig[start].out = "static"
            t.sig[end + 1].out = (
                f"; static metal::detail::ConstantRegistration msl_constant_{name}"
                f'("{name}", {match.group(1)}, &{name}, sizeof({name}));'
            )
            self.module.constants.append(name)
        self._derived_constants()
        self._defined_constants()

    def _derived_constants(self) -> None:
        """A constant computed from a function constant would keep its value of load time."""
        t, depth = self.t, 0
        for i in range(len(t)):
            depth += {"{": 1, "}": -1}.get(t.text(i), 0)
            if t.text(i) != "constant" or depth != 0 or t.sig[i].out == "static":
                continue
            j = i
            while j < len(t) and t.text(j) not in (";", "{", "("):
                if t.text(j) in self.module.constants:
                    name = t.text(j)
                    raise t.error(j, f"constant computed from {name}: compute it in the kernel")
                j += 1

    def _defined_constants(self) -> None:
        t = self.t
        for i in range(len(t)):
            if t.text(i) == "is_function_constant_defined":
                if t.text(i + 2) not in self.module.constants:
                    raise t.error(i, f"{t.text(i + 2)} is not a function constant")
                t.sig[i].out = "metal::detail::constant_defined"
                t.sig[i + 2].out = "&" + t.text(i + 2)

    def _remaining_attributes(self) -> None:
        for i in range(len(self.t)):
            if self.t.text(i) != "[[" or i in self.done:
                continue
            text, end = self._attribute(i)
            word = text.split(" ")[0]
            if self.language is None and word in _BUILTINS | {"buffer", "threadgroup"}:
                self.t.erase(i, end)  # others repeat them where they mean nothing
            elif word not in _KEPT_ATTRIBUTES:
                raise self.t.error(i, f"attribute [[{text}]] is not modelled")

    # ---- the word threadgroup: each one is a storage class, a pointer's, or an error

    def _threadgroup_words(self) -> None:
        bodies = [k.body for k in self.module.kernels.values()]
        for i in range(len(self.t)):
            if self.t.text(i) == "threadgroup" and self.t.sig[i].out != "":
                if not self._qualifies_pointee(i):
                    self._threadgroup_variable(i, bodies)

    def _qualifies_pointee(self, i: int) -> bool:
        """True when * or & follows before the declarator's end, or a tensor lies there."""
        t, j = self.t, i + 1
        if t.text(i - 1) == "<" and t.text(i - 2) == "tensor":
            return True
        while j < len(t):
            text = t.text(j)
            if text in ("*", "&"):
                return True
            if text == "<":
                j = t.close_angle(j)
            elif text == "::" or t.kind(j) == "name":
                pass
            else:
                return False
            j += 1
        return False

    def _threadgroup_variable(self, i: int, bodies: list[tuple[int, int]]) -> None:
        t = self.t
        if t.text(i - 1) not in ("{", "}", ";"):
            raise t.error(i, "'threadgroup' is neither a variable nor a pointer's address space")
        body = next(((a, b) for a, b in bodies if a < i < b), None)
        if body is None or self._depth(body[0], i) != 1:
            raise t.error(i, "threadgroup variables belong in the outer scope of a kernel")
        end = i
        while t.text(end) not in (";", "=", ",", "("):
            end = t.close_angle(end) + 1 if t.text(end) == "<" else end + 1
        if t.text(end) != ";":
            raise t.error(end, "threadgroup variable: one for each statement, no initialiser")
        name = end - 1
        while t.text(name) == "]":
            while t.text(name) != "[":
                name -= 1
            name -= 1
        if t.kind(name) != "name":
            raise t.error(name, "threadgroup variable: no name found")
        t.sig[i].out = "MSL_THREADGROUP_VARIABLE"
        t.sig[end].out = (
            f"; metal::detail::threadgroup_variable(&{t.text(name)}, sizeof({t.text(name)}),"
            f' "{t.text(name)}");'
        )

    def _depth(self, first: int, last: int) -> int:
        words = [self.t.text(i) for i in range(first, last)]
        return words.count("{") - words.count("}")

    # ---- construction and casts

    def _type_end(self, i: int) -> int | None:
        """Last token of the shim-made type that starts at i."""
        t = self.t
        if t.kind(i) != "name" or t.sig[i].out != t.text(i):
            return None
        if t.text(i) in _CLASS_TEMPLATES and t.text(i + 1) == "<":
            return t.close_angle(i + 1)
        return i if t.text(i) in self.types else None

    def _expressions(self) -> None:
        t = self.t
        for i in range(len(t)):
            if t.text(i) == "static_cast":
                t.sig[i].out = "metal::detail::convert_static"
                continue
            end = self._type_end(i)
            if end is None:
                continue
            before = t.text(i - 1)
            after_name = t.kind(i - 1) == "name" and before not in _STATEMENT_WORDS
            if t.text(end + 1) == "(" and not after_name and before not in (".", "->", "::"):
                t.sig[i].out = "metal::detail::make<" + t.text(i)
                t.sig[end].out += ">"
            elif t.text(end + 1) == ")" and before == "(" and self._is_cast(i - 1, end + 1):
                t.sig[i - 1].out = "metal::detail::Cast<"
                t.sig[end + 1].out = ">{} ->* "

    def _is_cast(self, opening: int, closing: int) -> bool:
        """A parenthesised type is a cast unless it is the argument of a name before it."""
        t, after = self.t, closing + 1
        before = t.text(opening - 1)
        if t.kind(opening - 1) == "name" and before not in _STATEMENT_WORDS:
            return False
        if before == ">":  # as in as_type<T>(...): a type alone is no argument, so a template's
            return False
        return t.kind(after) in ("name", "number") or t.text(after) in "(-+!~*&"

    def _literals(self) -> None:
        for token in self.t.sig:
            if token.kind == "number" and not token.text.lower().startswith("0x"):
                match = re.fullmatch(r"([0-9.eE+-]+)(h|H|bf|BF)", token.text)
                if match:
                    target = "half" if match.group(2) in "hH" else "bfloat"
                    digits = match.group(1)
                    if not re.search(r"[.eE]", digits):
                        digits += ".0"
                    token.out = f"(({target}){digits}f)"

    # ---- tables for the executor

    def _registrations(self) -> str:
        if not self.module.entries:
            raise self.t.error(0, "no kernel in the source")
        lines = ["", '#line 1 "registrations"', "#ifndef MSL_CHECK_ADDRESS_SPACES"]
        for number, (host, function) in enumerate(self.module.entries):
            kernel = self.module.kernels.get(function.split(" ")[0])
            if kernel is None:
                raise self.t.error(0, f"'{host}' instantiates {function}, which is no kernel")
            table = "".join(
                f'{{msl_source::{p.kind}, (unsigned)({p.index}), "{p.name}"}}, '
                for p in kernel.parameters
            )
            count = len(kernel.parameters)
            lines += [
                f"static constexpr metal::detail::Parameter msl_parameters_{number}[] = "
                f"{{{table}{{msl_source::end, 0, nullptr}}}};",
                f"static metal::detail::KernelRegistration<&{function}, msl_parameters_{number}> "
                f'msl_kernel_{number}("{host}", {count}, (unsigned)({kernel.max_threads}));',
            ]
        lines.append("#else  // templates are only checked once something uses them")
        for number, (_, function) in enumerate(self.module.entries):
            lines.append(f"void msl_use_{number}() {{ (void)&{function}; }}")
        return "\n".join(lines + ["#endif", ""])


def rewrite(preprocessed: str, language: int | None) -> str:
    """C++ text of the preprocessed MSL text; raises MslError. No language: no lint."""
    return Rewriter(preprocessed, language).run()

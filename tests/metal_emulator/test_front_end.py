"""What the front end refuses, with the line of the source."""

from __future__ import annotations

import pytest
from emulator import front_end

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void f(device float *a [[buffer(0)]], uint i [[thread_position_in_grid]]) {\n"

REFUSED = {
    "threadgroup list": (KERNEL + "threadgroup float x[2], y[2]; }", "one for each statement"),
    "threadgroup in a block": (KERNEL + "if (i > 0) { threadgroup float x[2]; } }", "outer scope"),
    "threadgroup in a function": ("void g() { threadgroup float x[2]; }" + KERNEL + "}", "outer"),
    "threadgroup initialised": (KERNEL + "threadgroup float x = 1.0f; }", "no initialiser"),
    "threadgroup value": ("void g(threadgroup float x) {}" + KERNEL + "}", "neither"),
    "no attribute": ("kernel void f(device float *a) {}", "no [[attribute]]"),
    "unknown attribute": ("kernel void f(device float *a [[texture(0)]]) {}", "not modelled"),
    "two attributes": ("kernel void f(device float *a [[buffer(0)]] [[flat]]) {}", "more than one"),
    "wrong space": ("kernel void f(threadgroup float *a [[buffer(0)]]) {}", "with 'threadgroup'"),
    "no space": ("kernel void f(float *a [[buffer(0)]]) {}", "one address space"),
    "double": (KERNEL + "double d = a[i]; }", "no double"),
    "static local": (KERNEL + "static float d = 0; }", "static locals"),
    "lambda": (KERNEL + "float b = [&](float x) { return x; }(a[i]); }", "lambdas"),
    "recursion": ("uint g(uint n) { return n ? g(n - 1) : 0; }" + KERNEL + "}", "recursion"),
    "qualifier as a name": ("float fragment(float x) { return x; }" + KERNEL + "}", "another"),
    "auto": (KERNEL + "auto p = a; }", "auto"),
    "derived constant": (
        "constant uint N [[function_constant(0)]];\nconstant uint M = N * 2;" + KERNEL + "}",
        "compute it in the kernel",
    ),
    "no kernel": ("void g() {}", "no kernel"),
    "unused instantiation": (
        'template [[host_name("x")]] kernel void g<float>(device float *);' + KERNEL + "}",
        "which is no kernel",
    ),
    "undeclared function": (KERNEL + "a[i] = erf(a[i]); }", "undeclared identifier 'erf'"),
    "wide vector": (KERNEL + "ulong4 v; }", "ulong4"),
    "implicit vector conversion": (KERNEL + "int4 v = 1; float4 w = v; a[i] = w.x; }", "cannot"),
    "wrong count": (KERNEL + "a[i] = float4(1.0f, 2.0f).x; }", "as many values"),
    "uninitialised local": (KERNEL + "float x; a[i] = x; }", "uninitialized"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(front_end.MslError) as error:
        front_end.build(HEAD + text)
    assert message in str(error.value)
    assert "kernel.metal:" in str(error.value)


MIXED = {
    "device to threadgroup": "threadgroup float *p = a; a[0] = p[0];",
    "device to thread": "thread float *p = a; a[0] = p[0];",
    "without a space": "float *p = a; a[0] = p[0];",
    "constant to device": "device const float *p = c; a[0] = p[0];",
}


@pytest.mark.parametrize("name", MIXED)
def test_address_space_mixed(name: str) -> None:
    text = (
        HEAD + "kernel void f(device float *a [[buffer(0)]], constant float *c [[buffer(1)]]) {\n"
        + MIXED[name] + "\n}\n"
    )  # fmt: skip
    with pytest.raises(front_end.MslError, match="address space|cannot initialize"):
        front_end.check_address_spaces(text)


def test_address_spaces_of_templates() -> None:
    """A template kernel is instantiated by this pass as well."""
    text = (
        HEAD + "template <typename T> kernel void f(device T *a [[buffer(0)]]) {\n"
        "    threadgroup T *p = a; a[0] = p[0]; }\n"
        'template [[host_name("g")]] kernel void f<half>(device half *);\n'
    )  # fmt: skip
    with pytest.raises(front_end.MslError, match="address space|cannot initialize"):
        front_end.check_address_spaces(text)

"""What the front end refuses, with the line of the source."""

from __future__ import annotations

import pytest
from emulator import front_end
from library_text import KERNELS, SHAPES, library_text

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
    "no space": ("kernel void f(float *a [[buffer(0)]]) {}", "without an address space"),
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
    "double by its literal": (KERNEL + "a[i] = 0.5; }", "write 0.5f"),
    "double by an exponent": (KERNEL + "a[i] = 1e-6 * a[i]; }", "write 1e-6f"),
    "mutual recursion": (
        "uint h(uint n);\nuint g(uint n) { return n ? h(n - 1) : 0; }\n"
        "uint h(uint n) { return g(n); }" + KERNEL + "}", "recursion"),
    "pointer parameter": ("float g(float *p) { return *p; }" + KERNEL + "}", "address space"),
    "const reference": ("float g(const float4 &p) { return p.x; }" + KERNEL + "}", "address space"),
    "pointer to a struct": (
        "struct S { float x; };\nvoid g(S *s) { s->x = 0; }" + KERNEL + "}", "address space"),
    "cast without a space": (KERNEL + "a[i] = *(float *)(a + i); }", "address space"),
    "pointer of a template": (
        "template <typename T> T g(const T *p) { return *p; }" + KERNEL + "}", "address space"),
    "variable of the program": ("const float HALF = 0.5f;" + KERNEL + "}", "without 'constant'"),
    "constexpr of the program": ("constexpr int TWO = 2;" + KERNEL + "}", "without 'constant'"),
    "static member": (
        "struct S { static constexpr int TWO = 2; };" + KERNEL + "}", "without 'constant'"),
    "table of the program": ("int table[2] = {1, 2};" + KERNEL + "}", "without 'constant'"),
    "function pointer": (KERNEL + "void (*f)(int) = nullptr; }", "function pointers"),
    "derived class": ("struct A { int x; };\nstruct B : A {};" + KERNEL + "}", "derived"),
    "long long": (KERNEL + "long long x = i; }", "64 bits"),
    "type of the compiler": (KERNEL + "_Float16 x = 1; }", "the type is half"),
    "builtin of the compiler": (KERNEL + "a[i] = __builtin_sqrtf(a[i]); }", "compiler's"),
    "inside of the shim": (KERNEL + "a[i] = metal::detail::make<float>(i); }", "the shim's"),
    "type as a name": (KERNEL + "float half = a[i]; a[i] = half; }", "names a type"),
    "coroutine": (KERNEL + "co_await a; }", "not in Metal's C++"),
    "two types in max": (KERNEL + "a[i] = max(a[i], 0); }", "ambiguous in Metal"),
    "two integers in min": (KERNEL + "a[i] = float(min(i, 3)); }", "ambiguous in Metal"),
    "two types in clamp": (KERNEL + "a[i] = clamp(a[i], 0, 1); }", "ambiguous in Metal"),
    "two types in fma": (KERNEL + "a[i] = fma(a[i], 2.0h, 1.0f); }", "ambiguous in Metal"),
    "integers in fmax": (KERNEL + "a[i] = fmax(i, 2); }", "ambiguous in Metal"),
    "math on bfloat": (KERNEL + "a[i] = float(exp(bfloat(a[i]))); }", "float or half"),
    "sum of 64 bits": (KERNEL + "a[i] = float(simd_sum((ulong)i)); }", "up to 32 bits"),
    "sum of bytes": (KERNEL + "a[i] = float(simd_sum((uchar)i)); }", "reductions take"),
    "shuffle of a struct": (
        "struct S { float x; };" + KERNEL + "S s; s.x = a[i]; a[i] = simd_shuffle(s, 0).x; }",
        "simd operations take"),
    "position of another type": (
        "kernel void f(device float *a [[buffer(0)]], int i [[thread_position_in_grid]]) {}",
        "positions are"),
    "one index twice": (
        "kernel void f(device float *a [[buffer(1)]], constant float *b [[buffer(1)]]) {}",
        "have one index"),
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


ACCEPTED = """
constant float HALF = 0.5f;
constant int TABLE[2] = {1, 2};
struct Pair { float x, y; static constant constexpr int SIZE = 2; };
enum { FOUR = 4 };
template <typename T> T first(device const T *p) { return p[0]; }
inline float product(thread const Pair &p, const thread float4 &v) { return p.x * p.y * v.x; }
inline uint below(uint n) { return n * FOUR; }
kernel void f(device float *a [[buffer(0)]], constant Pair &p [[buffer(1)]],
              threadgroup float *t [[threadgroup(1)]],
              ushort2 i [[thread_position_in_grid]]) {
    Pair mine = {p.x * HALF, p.y};
    thread float4 *q = 0;
    float4 v = max(float4(first(a)), 0.0f);
    a[i.x] = product(mine, v) * float(below(2) * sizeof(float)) + *(device float *)a + 1.e-3f;
    a[i.y] = pow(v.x, 2) + fma(v.y, 2, 1.0f) + fmax(3, v.z);
    if (q) t[0] = clamp(v, 0.0f, 1.0f).x * TABLE[1] & 1 ? 2.0h : half(3);
}
"""


def test_accepted() -> None:
    text = HEAD + ACCEPTED.replace("TABLE[1] & 1 ? 2.0h : half(3)", "float(TABLE[1] & 1)")
    front_end.build(text)
    front_end.check_address_spaces(text)


def test_all_findings_are_told() -> None:
    with pytest.raises(front_end.MslError) as error:
        front_end.build(HEAD + KERNEL + "a[i] = 0.5;\na[i] = 1.5; }")
    assert str(error.value).count("and a double here") == 2


@pytest.mark.parametrize("file", sorted(p.name for p in KERNELS.glob("*.metal")))
def test_engine_kernels_are_clean(file: str) -> None:
    """No finding of the lint, no pointer that changes its address space, at either shape."""
    for shape in SHAPES:
        front_end.check_address_spaces(library_text(file, shape))

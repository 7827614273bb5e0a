"""Faults put into good kernels: each is found, at its line, whatever the order of execution."""

from __future__ import annotations

from dataclasses import dataclass

import cases
import numpy as np
import pytest
from emulator import Library, Report


@dataclass(frozen=True)
class Fault:
    name: str
    kernel: str
    old: str
    new: str
    kind: str  # one of these words, by the order of execution


FAULTS = [
    Fault("barrier removed", "matvec",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // STAGED", "", "RACE"),
    Fault("barrier for the wrong memory", "matvec",
          "mem_threadgroup); // STAGED", "mem_device);", "RACE"),
    Fault("barrier of the simdgroup only", "matvec",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // STAGED",
          "simdgroup_barrier(mem_flags::mem_threadgroup);", "RACE"),
    Fault("guard removed", "matvec", "if (row >= shape.rows) return; // GUARD", "",
          "OUT_OF_BOUNDS"),
    Fault("every lane writes", "matvec", "if (lane == 0) { // ONE LANE", "{", "RACE"),
    Fault("return before the barrier", "matvec", "threadgroup float staged[256];",
          "threadgroup float staged[256];\nif (group * 4 + simdgroup >= shape.rows) return;",
          "BARRIER"),
    Fault("half of the array filled", "matvec", "i < shape.columns; i += group_size",
          "i < shape.columns / 2; i += group_size", "UNINITIALISED"),
    Fault("lanes leave the reduction", "matvec", "sum = simd_sum(sum);",
          "if (lane < 4) sum = simd_sum(sum);", "SIMD_PARTIAL"),
    Fault("threadgroup array overrun", "matvec", "staged[256]", "staged[192]", "OUT_OF_BOUNDS"),
    Fault("write through a constant cast", "matvec", "y[row] = sum;",
          "((device float *)x)[row] = sum;", "READ_ONLY"),
    Fault("first softmax barrier removed", "softmax",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // LARGEST", "", "RACE"),
    Fault("second softmax barrier removed", "softmax",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // TOTAL", "", "RACE"),
    Fault("row stride too small", "softmax", "values + row * COLUMNS",
          "values + row * (COLUMNS - 1)", "RACE"),
    Fault("barrier after filling removed", "gemm",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // FILLED", "", "RACE"),
    Fault("barrier after use removed", "gemm",
          "threadgroup_barrier(mem_flags::mem_threadgroup); // USED", "", "RACE"),
    Fault("edge unguarded", "gemm", "if (r < s.m && col < s.n) c", "if (r < s.m) c",
          "RACE OUT_OF_BOUNDS"),
    Fault("count without an atomic", "routing",
          "atomic_fetch_add_explicit(&counts[expert[token]], 1u, memory_order_relaxed)",
          "((device uint *)counts)[expert[token]]++", "RACE"),
    Fault("grid unguarded", "routing", "if (token >= tokens) return; // GUARD", "",
          "OUT_OF_BOUNDS"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_found(fault: Fault) -> None:
    good = cases.source(fault.kernel)
    assert good.count(fault.old) == 1
    library = Library(good.replace(fault.old, fault.new))
    for seed in cases.SEEDS:
        report, _ = getattr(cases, fault.kernel)(library, seed)
        texts = [f.text for f in report.faults]
        assert set(fault.kind.split()) & report.kinds(), f"seed {seed}: {texts}"
        assert all(f.line > 0 for f in report.faults if f.kind in fault.kind)


def test_line_and_offset() -> None:
    """An index one too high is shown at its line, buffer and byte."""
    text = (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void f(device float *a [[buffer(3)]], uint i [[thread_position_in_grid]]) {\n"
        "    a[i] = 1.0f;\n"
        "    if (i == 5)\n"
        "        a[i + 4] = 2.0f;\n"
        "}\n"
    )
    a = np.zeros(8, np.float32)
    report = Library(text).run("f", (8,), (8,), {3: a})
    (fault,) = report.faults
    assert (fault.kind, fault.line, fault.buffer) == ("OUT_OF_BOUNDS", 6, 3)
    assert fault.offset == 36


def _small(body: str, parameters: str = "") -> str:
    return (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "constant uint N [[function_constant(0)]];\n"
        "kernel void f(device uint *a [[buffer(0)]], uint i [[thread_position_in_threadgroup]]"
        f"{parameters}) {{\n{body}\n}}\n"
    )


def _run_small(text: str, seed: int = 0, threads: int = 64, **more: object) -> Report:
    return Library(text).run("f", (threads,), (threads,), {0: np.zeros(64, np.uint32)}, seed,
                             **more)  # type: ignore[arg-type]  # fmt: skip


def test_constant_without_value() -> None:
    assert _run_small(_small("a[i] = N;")).kinds() == {"CONSTANT_MISSING"}
    assert _run_small(_small("a[i] = N;"), constants={"N": np.uint32(1)}).faults == []


def test_arguments() -> None:
    text = _small("a[i] = t[0];", ", threadgroup uint *t [[threadgroup(0)]]")
    assert _run_small(text).kinds() == {"TG_MEMORY"}
    assert _run_small(text, tg={0: 65536}).kinds() == {"TG_MEMORY"}
    library = Library(_small("a[i] = 1;"))
    assert library.run("f", (1,), (1,), {}).kinds() == {"UNBOUND"}
    a = np.zeros(64, np.uint32)
    assert library.run("f", (1,), (1,), {0: a}, offsets={0: 2}).kinds() == {"MISALIGNED"}
    assert library.run("f", (2048,), (2048,), {0: a}).kinds() == {"THREADS"}


def test_before_the_offset() -> None:
    library = Library(_small("a[i] = a[-1];"))
    report = library.run("f", (1,), (1,), {0: np.zeros(64, np.uint32)}, offsets={0: 8})
    assert [(f.kind, f.buffer, f.offset) for f in report.faults] == [("OUT_OF_BOUNDS", 0, 4)]


# ---- faults that an emulator itself can have

@pytest.mark.parametrize("seed", cases.SEEDS)
def test_lanes_after_divergence(seed: int) -> None:
    """Lanes that met a divergent operation exchange the right values in the next one."""
    body = "uint v = i; if (i % 2 == 0) v = simd_sum(v); a[i] = simd_shuffle_xor(v, 1);"
    a = np.zeros(64, np.uint32)
    Library(_small(body)).run("f", (32,), (32,), {0: a}, seed)
    v = np.where(np.arange(32) % 2 == 0, 240, np.arange(32))
    assert np.array_equal(a[:32], v[np.arange(32) ^ 1])


def test_second_threadgroup_variable_is_shared() -> None:
    body = (
        "threadgroup uint first[64];\nthreadgroup uint second[64];\n"
        "first[i] = i; second[i] = i * 2;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\na[i] = first[63 - i] + second[63 - i];"
    )
    a = np.zeros(64, np.uint32)
    report = Library(_small(body)).run("f", (64,), (64,), {0: a})
    assert report.faults == [] and report.tg_static == 512
    assert np.array_equal(a, 3 * (63 - np.arange(64)))


@pytest.mark.parametrize("seed", cases.SEEDS)
def test_simdgroup_barrier_orders_its_simdgroup_only(seed: int) -> None:
    text = _small(
        "threadgroup uint s[64];\ns[i] = i;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "a[i] = s[INDEX];"
    )
    assert _run_small(text.replace("INDEX", "i ^ 1"), seed).faults == []
    assert "RACE" in _run_small(text.replace("INDEX", "i ^ 32"), seed).kinds()


def test_two_readers_are_remembered() -> None:
    """A write conflicts with a reader although the writer itself was the last to read."""
    body = "uint v = a[0]; a[i + 1] = v; if (i == 31) a[0] = v + 1;"
    assert _run_small(_small(body), threads=32).kinds() == {"RACE"}


def test_read_before_write_is_seen() -> None:
    body = "threadgroup uint s[64];\ns[i] += 1;\na[i] = s[i];"
    assert _run_small(_small(body)).kinds() == {"UNINITIALISED"}


# ---- cells of several bytes

BYTES = (
    "device uchar *b = (device uchar *)a;\na[i] = i;\n"
    "threadgroup_barrier(mem_flags::mem_device);\nb[i] = (uchar)i;\n"
    "threadgroup_barrier(mem_flags::mem_device);\ndevice ushort *s = (device ushort *)a;\n"
    "s[i] = (ushort)i;"
)


def test_neighbouring_bytes_are_told_apart() -> None:
    """Accesses of four bytes, then of one, then of two, by different threads."""
    assert _run_small(_small(BYTES)).faults == []


@pytest.mark.parametrize("barrier", [0, 1])
@pytest.mark.parametrize("seed", cases.SEEDS)
def test_races_of_unlike_sizes(barrier: int, seed: int) -> None:
    parts = BYTES.split("threadgroup_barrier(mem_flags::mem_device);\n")
    parts[barrier] += parts.pop(barrier + 1)
    body = "threadgroup_barrier(mem_flags::mem_device);\n".join(parts)
    assert _run_small(_small(body), seed).kinds() == {"RACE"}


def test_usage_to_the_byte() -> None:
    """Ranges that begin, end and have gaps anywhere in the words that record them."""
    text = (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void f(device uchar *a [[buffer(0)]], device const uchar *use [[buffer(1)]],\n"
        "              uint i [[thread_position_in_grid]]) {\n    if (use[i]) a[i] = 1;\n}\n"
    )
    library, rng = Library(text), np.random.default_rng(4)
    for n, density in ((1, 1.0), (64, 1.0), (200, 0.5), (1000, 0.97), (1000, 0.02)):
        use, a = (rng.random(n) < density).astype(np.uint8), np.zeros(n, np.uint8)
        usage = library.run("f", (n,), (min(n, 64),), {0: a, 1: use}).usage
        edges = np.flatnonzero(np.diff(np.concatenate([[0], use, [0]])))
        want = list(zip(edges[::2].tolist(), edges[1::2].tolist()))
        assert usage[0].written == want and usage[1].read == [(0, n)]


@pytest.mark.parametrize("byte", range(4))
def test_smaller_cells_remember(byte: int) -> None:
    """A word's writer is remembered for each of its bytes once one of them is accessed alone."""
    body = (
        "a[i] = i;\nsimdgroup_barrier(mem_flags::mem_none);\n"
        f"if (((device uchar *)a)[4 * (i ^ 1) + {byte}] > 100) a[i] = 0;"
    )
    assert _run_small(_small(body), threads=32).kinds() == {"RACE"}

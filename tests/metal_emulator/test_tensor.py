"""Tensor operations of Metal 4: values, layouts that differ by seed, and the same checks on what an
operation reads and writes as on any other access."""

from __future__ import annotations

import functools

import cases
import numpy as np
import pytest
from emulator import Library, Report, front_end

KERNELS = {"gemm_group": 64, "gemm_registers": 32, "gemm_memory": 64}  # threads
SHAPES = [(16, 32, 16), (37, 50, 40), (16, 32, 100)]


def bfloat(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits and values of x cut to bfloat."""
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def library(checked: bool = True) -> Library:
    return Library(cases.source("tensor"), checked, language=400)


def run(
    lib: Library, kernel: str, seed: int, shape: tuple[int, int, int] = SHAPES[1]
) -> tuple[Report, float]:
    """The report and the largest error; NaN where nothing was written."""
    m, n, k = shape
    rng = np.random.default_rng(11)
    (a, left), (b, right) = (bfloat(rng.standard_normal(s)) for s in ((m, k), (n, k)))
    c = np.full((m, n), np.nan, np.float32)
    threads = KERNELS[kernel]
    grid = ((n + 31) // 32 * threads, (m + 15) // 16)
    buffers = {0: a, 1: b, 2: c, 3: np.array(shape, np.int32)}
    report = lib.run(kernel, grid, (threads, 1), buffers, seed)
    return report, float(np.abs(c - left @ right.T).max())


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_agrees_with_numpy(kernel: str, shape: tuple[int, int, int], checked: bool) -> None:
    for seed in cases.SEEDS:
        report, error = run(library(checked), kernel, seed, shape)
        assert [f.text for f in report.faults] == []
        assert error < 1e-4, f"seed {seed}"


def test_address_spaces() -> None:
    options = front_end.Options(language=400)
    text = cases.source("tensor")
    front_end.check_address_spaces(text, options)
    wrong = text.replace("(threadgroup bfloat *)staged, ext", "a, ext")
    assert wrong != text
    with pytest.raises(front_end.MslError, match="no matching constructor"):
        front_end.check_address_spaces(wrong, options)


FAULTS = {  # name: kernel, found once, put in its place, what is found
    "barrier after filling removed": (
        "gemm_group", "threadgroup_barrier(mem_flags::mem_threadgroup); // FILLED", "", "RACE"),
    "filling ordered in simdgroups only": (
        "gemm_group", "threadgroup_barrier(mem_flags::mem_threadgroup); // FILLED",
        "simdgroup_barrier(mem_flags::mem_threadgroup);", "RACE"),
    "barrier after use removed": (
        "gemm_group", "threadgroup_barrier(mem_flags::mem_threadgroup); // USED", "", "RACE"),
    "part of the tile filled": (
        "gemm_group", "i < TILE_N * TILE_K; i += 64", "i < TILE_N * TILE_K / 2; i += 64",
        "UNINITIALISED"),
    "edges not given": (
        "gemm_group", ".slice(n0, m0); // EDGES", ".slice<32, 16>(n0, m0);", "OUT_OF_BOUNDS RACE"),
    "results a row too wide": (
        "gemm_memory", ".slice((int)group.x * TILE_N, (int)group.y * TILE_M); // RESULT",
        ".slice<33, 16>((int)group.x * TILE_N, (int)group.y * TILE_M);", "OUT_OF_BOUNDS RACE"),
    "a simdgroup leaves before": (
        "gemm_group", "    sum.store(result);",
        "    if (thread_index < 32) return;\n    sum.store(result);", "BARRIER"),
    "lanes leave before": (
        "gemm_registers", "operation.run(left, right, sum); // RUN",
        "if (lane < 30) operation.run(left, right, sum);", "SIMD_PARTIAL"),
    "scope of another size": (
        "gemm_group", "tile, execution_simdgroups<2>", "tile, execution_simdgroups<4>", "THREADS"),
    "places that hold nothing used": (
        "gemm_registers", "if (!sum.is_valid_element(i)) continue; // VALID", "",
        "RACE VALUES"),
    "element beyond the capacity": (
        "gemm_registers", "if (!sum.is_valid_element(i)) continue; // VALID",
        "sum[sum.get_capacity()] = 0.0f;", "OUT_OF_BOUNDS"),
    "sums not cleared": (
        "gemm_group", "for (ushort i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f; // ZERO", "",
        "VALUES"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_found(name: str) -> None:
    """VALUES: the result is wrong, or not a number."""
    kernel, old, new, kinds = FAULTS[name]
    good = cases.source("tensor")
    assert good.count(old) == 1
    lib = Library(good.replace(old, new), language=400)
    for seed in cases.SEEDS:
        report, error = run(lib, kernel, seed)
        found = report.kinds() | (set() if error < 1e-4 else {"VALUES"})
        assert found & set(kinds.split()), f"seed {seed}: {[f.text for f in report.faults]}"
        assert all(f.line > 0 for f in report.faults)


ASSUMED = """int quad = (int)lane / 4; array<int, 2> at = {
    ((quad & 2) | ((int)lane & 1)) * 4 + i % 4 + i / 8 * 16,
    ((quad & 4) | ((int)lane / 2 % 4)) + i % 8 / 4 * 8};"""


def test_layout_is_not_to_be_assumed() -> None:
    """A kernel that knows where elements lie is right in order, and wrong with every other seed."""
    text = cases.source("tensor")
    old = "auto at = sum.get_multidimensional_index(i); // WHERE"
    assert text.count(old) == 1
    lib = Library(text.replace(old, ASSUMED).replace("continue; // VALID", "break;"), language=400)
    errors = [run(lib, "gemm_registers", seed)[1] for seed in cases.SEEDS]
    assert errors[0] < 1e-4
    assert all(not e < 1e-4 for e in errors[1:])


@pytest.mark.parametrize(
    "change, reason",
    [
        (("sum.store(result)", "sum.store(rows)"), "store does not convert"),
        (("operation.run(part, columns, sum)", "operation.run(rows.slice(k, 0), columns, sum)"),
         "no matching member function"),
        (("execution_simdgroup> operation", "execution_simdgroups<2>> operation"),
         "for a single simdgroup"),
        (("gemm_memory(device bfloat *a", "gemm_memory(device int *a"), "combination of types"),
    ],
)  # fmt: skip
def test_types(change: tuple[str, str], reason: str) -> None:
    text = cases.source("tensor").replace(*change)
    assert text != cases.source("tensor")
    with pytest.raises(front_end.MslError, match=reason):
        front_end.build(text, front_end.Options(language=400))


def test_language_3_has_no_tensors() -> None:
    with pytest.raises(front_end.MslError, match="expected language version 4.0"):
        front_end.build(cases.source("tensor"), front_end.Options(language=320))
    without = "".join(
        line for line in cases.source("tensor").splitlines(True) if not line.startswith("#include <")
    )
    with pytest.raises(front_end.MslError, match="'auto'"):
        front_end.build("#include <metal_stdlib>\n" + without, front_end.Options(language=320))
    with pytest.raises(front_end.MslError, match="mpp"):
        front_end.build("#include <metal_stdlib>\n" + without, front_end.Options(language=400))


LONE_WRITER = """
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
kernel void f(device float *c [[buffer(0)]], constant uint &writer [[buffer(1)]],
              device float *b [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float row[16];
    if (lane == writer)
        for (int i = 0; i < 16; i++) row[i] = 1.0f;
    auto left = tensor((threadgroup float *)row, dextents<int, 2>(16, 1));
    auto right = tensor(b, dextents<int, 2>(16, 16));
    auto out = tensor(c, dextents<int, 2>(16, 1));
    matmul2d<matmul2d_descriptor(16, 16, 16), execution_simdgroup> operation;
    operation.run(left, right, out);
}
"""


@pytest.mark.parametrize("seed", cases.SEEDS)
def test_whoever_wrote_without_a_barrier(seed: int) -> None:
    """No thread's own write is excused because it may be the one that reads it."""
    lib = Library(LONE_WRITER)
    for writer in range(32):
        buffers = {0: np.zeros(16, np.float32), 1: np.array([writer], np.uint32),
                   2: np.ones((16, 16), np.float32)}  # fmt: skip
        assert "RACE" in lib.run("f", (32,), (32,), buffers, seed).kinds(), writer

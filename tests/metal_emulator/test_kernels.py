"""Unchanged kernels against numpy: fast and checked, several orders of execution, no fault."""

from __future__ import annotations

from collections.abc import Callable

import cases
import numpy as np
import pytest
from emulator import Library, Report, front_end

CASES: dict[str, tuple[Callable[[Library, int], tuple[Report, float]], float]] = {
    "matvec": (cases.matvec, 1e-4),
    "softmax": (cases.softmax, 1e-6),
    "gemm": (cases.gemm, 1e-4),
    "routing": (cases.routing, 0.0),
}


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy(name: str, checked: bool) -> None:
    run, tolerance = CASES[name]
    library = Library(cases.source(name), checked)
    for seed in cases.SEEDS:
        report, error = run(library, seed)
        assert [f.text for f in report.faults] == []
        assert error <= tolerance, f"seed {seed}"


@pytest.mark.parametrize("name", ["matvec", "softmax", "gemm", "routing", "vectors", "lanes"])
def test_address_spaces(name: str) -> None:
    front_end.check_address_spaces(cases.source(name))


def test_contraction_changes_little() -> None:
    _, error = cases.gemm(Library(cases.source("gemm"), checked=False, contract=True), 0)
    assert error <= 1e-4


def test_vectors() -> None:
    n = 4
    packed = np.arange(3 * n, dtype=np.float32) + 0.25
    out, narrow = np.zeros((n, 4), np.float32), np.zeros(n, np.uint16)
    bits = np.zeros(n, np.uint32)
    library = Library(cases.source("vectors"))
    report = library.run("vectors", (n,), (n,), {0: packed, 1: out, 2: narrow, 3: bits})
    assert report.faults == []
    rows = packed.reshape(n, 3)
    assert np.array_equal(out[:, :3], rows * 2 + 1) and np.all(out[:, 3] == 2)
    x = (rows[:, 0] + np.float32(0.001)).view(np.uint32)
    assert np.array_equal(narrow, ((x + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint16))
    want = rows[:, 0].copy().view(np.uint32) ^ 3 ^ rows[:, 1].astype(np.uint32)
    assert np.array_equal(bits, want)


@pytest.mark.parametrize("seed", cases.SEEDS)
def test_lanes(seed: int) -> None:
    v = np.random.default_rng(3).integers(-9, 10, 32).astype(np.int32)
    out = np.zeros((12, 32), np.int32)
    report = Library(cases.source("lanes")).run("lanes", (32,), (32,), {0: v, 1: out}, seed)
    assert report.faults == []
    lane = np.arange(32)
    ballot = np.array([sum(1 << i for i in range(32) if v[i] > 0)], np.uint32).view(np.int32)[0]
    want = [
        np.full(32, v.sum()),
        np.full(32, v.max()),
        np.full(32, v.min()),
        v[lane ^ 5],
        np.where(lane + 3 < 32, v[(lane + 3) % 32], v),
        np.where(lane >= 3, v[lane - 3], v),
        np.cumsum(v) - v,
        np.cumsum(v),
        np.full(32, ballot),
        np.full(32, v[7]),
        v[31 - lane],
        np.full(32, int((v == 3).any())),
    ]
    assert np.array_equal(out, np.stack(want))


def test_reflection_and_usage() -> None:
    library = Library(cases.source("matvec"))
    info = library.kernel("matvec")
    bindings = info.bindings[: info.binding_count]
    assert [(b.name, b.index, b.kind, b.access, b.element_size) for b in bindings] == [
        (b"w", 0, 0, 1, 2),
        (b"x", 1, 0, 1, 4),
        (b"y", 2, 0, 3, 4),
        (b"shape", 3, 1, 1, 8),
    ]
    report, _ = cases.matvec(library, 1)
    assert report.usage[0].read == [(0, 10 * 200 * 2)] and report.usage[0].written == []
    assert report.usage[2].written == [(0, 40)] and report.usage[2].read == []
    assert report.usage[1].bytes_read == 3 * 800  # once for each threadgroup
    assert (report.groups, report.threads, report.tg_static) == (3, 384, 1024)
    assert report.group_barriers == 3


def test_ragged_grid() -> None:
    """A grid that is no multiple of the group: the last threadgroups are smaller."""
    text = (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void f(device uint4 *a [[buffer(0)]], uint2 p [[thread_position_in_grid]],\n"
        "              uint2 size [[threads_per_threadgroup]], uint2 grid [[threads_per_grid]],\n"
        "              uint2 full [[dispatch_threads_per_threadgroup]],\n"
        "              ushort2 groups [[threadgroups_per_grid]]) {\n"
        "    a[p.y * grid.x + p.x] = uint4(size, full.x, groups.x * 16 + groups.y);\n}\n"
    )
    a = np.zeros((3, 10, 4), np.uint32)
    report = Library(text).run("f", (10, 3), (4, 2), {0: a}, seed=5)
    assert report.faults == [] and (report.groups, report.threads) == (6, 30)
    y, x = np.mgrid[0:3, 0:10]
    assert np.array_equal(a[..., 0], np.where(x < 8, 4, 2))
    assert np.array_equal(a[..., 1], np.where(y < 2, 2, 1))
    assert np.all(a[..., 2] == 4) and np.all(a[..., 3] == 3 * 16 + 2)
    assert report.usage[0].written == [(0, 480)]


def test_order_follows_the_seed() -> None:
    """Places handed out by an atomic differ between seeds, and repeat with the same one."""
    text = cases.source("routing")
    library, places = Library(text, checked=False), []
    for seed in (0, 1, 1, 2):
        expert, out = np.zeros(512, np.uint32), np.zeros(512, np.uint32)
        buffers = {0: expert, 1: np.zeros(1, np.uint32), 2: out, 3: np.array([512], np.uint32)}
        library.run("route", (512,), (64,), buffers, seed)
        places.append(out)
    assert np.array_equal(places[0], np.arange(512))
    assert np.array_equal(places[1], places[2])
    assert not np.array_equal(places[1], places[0]) and not np.array_equal(places[1], places[3])

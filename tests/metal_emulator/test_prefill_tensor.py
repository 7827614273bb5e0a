"""The tensor-operation variants of the prompt's matrix kernels: the same cases, weights rounded to
bfloat as those kernels round them, then products exact up to the order of their sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import prefill_matrices as pm
import pytest
from emulator import ROOT, Library, front_end
from prefill_cases import (
    ADD_F32, MINI, REAL, STORE_BF16, STORE_F32, Experts, gemm, gemm_multi, gemm_silu, product,
    random_ids, random_x,
)  # fmt: skip

FILE, SUFFIX, FLOAT = "prefill_tensor", "_tensor", 2e-5
SHIM = ROOT / "tools/metal_emulator/shim/include/metal_tensor"
pytestmark = pytest.mark.skipif(
    not SHIM.exists(), reason="the emulator does not model tensor operations"
)


def rounded(m: pm.Matrix) -> pm.Matrix:
    """The values a tile holds: one float32 rounding, then one to bfloat."""
    return replace(m, values=pm.from_bf16(pm.to_bf16(m.values)).astype(np.float64))


def library(shape: str, checked: bool = True) -> Library:
    return pm.library(shape, FILE, checked)


@pytest.mark.parametrize("shape,n,cols", [(MINI, 1, 64), (MINI, 33, 256), (REAL, 40, 2048)])
@pytest.mark.parametrize("mode", [STORE_F32, STORE_BF16, ADD_F32])
def test_gemm(shape: str, n: int, cols: int, mode: int) -> None:
    rng = np.random.default_rng(n)
    x, w = random_x(rng, n, cols), rounded(pm.matrix(rng, 72, cols))
    y = np.ones((n, 72), np.uint16 if mode == STORE_BF16 else np.float32)
    pm.clean(gemm(library(shape), shape, x, w, mode, y, n, SUFFIX))
    if mode == STORE_BF16:
        assert pm.rounded(y, product(x, w))
    else:
        assert pm.relative(y, product(x, w) + (mode == ADD_F32)) < FLOAT


def test_gemm_multi() -> None:
    rng, n, modes = np.random.default_rng(8), 21, [STORE_F32, STORE_BF16, ADD_F32]
    x, parts = random_x(rng, n, 256), [pm.matrix(rng, r, 256) for r in (72, 128, 4)]
    kinds = [np.uint16 if m == STORE_BF16 else np.float32 for m in modes]
    outs = [np.ones((n, len(w.values)), k) for w, k in zip(parts, kinds)]
    pm.clean(gemm_multi(library(MINI), MINI, x, parts, modes, outs, 1, SUFFIX))
    for w, mode, out in zip(parts, modes, outs):
        alone = np.ones_like(out)
        pm.clean(gemm(library(MINI), MINI, x, w, mode, alone, 0, SUFFIX))
        assert np.array_equal(out, alone)


@pytest.mark.parametrize("shape", [MINI, REAL])
def test_gemm_silu(shape: str) -> None:
    rng, c = np.random.default_rng(9), pm.constants(shape)
    x = random_x(rng, 35, c["SHAPE_HIDDEN"])
    gate, up = (rounded(pm.matrix(rng, 64, c["SHAPE_HIDDEN"])) for _ in range(2))
    y = np.zeros((35, 64), np.uint16)
    pm.clean(gemm_silu(library(shape), shape, x, gate, up, y, 2, SUFFIX))
    assert pm.rounded(y, pm.silu(product(x, gate)) * product(x, up), 1e-4)


@pytest.mark.parametrize("shape,n,checked", [(MINI, 24, True), (REAL, 1, False)])
def test_experts(shape: str, n: int, checked: bool) -> None:
    experts = 32 if shape == MINI else 9
    ids = random_ids(np.random.default_rng(12), n, experts, 1.0)
    case = Experts(shape, ids, used=experts, suffix=SUFFIX)
    case.w = {k: rounded(m) for k, m in case.w.items()}
    pairs = np.arange(0, 8 * n, 3)
    pm.clean(case.up(library(shape, checked), 1))
    case.check_up(pairs)
    pm.clean(case.down(library(shape, checked), 2))
    case.check_down(pairs)


@pytest.mark.parametrize("n", [1, 8, 9])
def test_a_row_is_the_same_beside_others(n: int) -> None:
    rng = np.random.default_rng(7)
    x, w = random_x(rng, 41, 256), pm.matrix(rng, 64, 256)
    whole, part = np.zeros((41, 64), np.float32), np.zeros((n, 64), np.float32)
    gemm(library(MINI, False), MINI, x, w, STORE_F32, whole, 0, SUFFIX)
    gemm(library(MINI, False), MINI, np.ascontiguousarray(x[-n:]), w, STORE_F32, part, 0, SUFFIX)
    assert np.array_equal(whole[-n:], part) and part.any()


@pytest.mark.parametrize("shape", [MINI, REAL])
def test_address_spaces(shape: str) -> None:
    front_end.check_address_spaces(pm.source(shape, FILE))


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
RUN, STORE = "operation.run(x, w, totals);", "totals.store(stage);"
FAULTS = {
    "no barrier after filling": (f"{BARRIER} /* FILLED */\n        {RUN}", RUN, True),
    "no barrier after use": (f"{RUN}\n        {BARRIER} /* USED */", RUN, True),
    "no barrier after storing": (f"{STORE}\n    {BARRIER} /* STAGED */", STORE, True),
    "scales and biases exchanged": ("float scale = even ? mine : other;",
                                    "float scale = even ? other : mine;", False),
    "sums not cleared": ("totals[i] = 0.0f;", "totals[i] = 1.0f;", False),
    "rows of x not beside each other": ("t.x[at + 8] = f.x1;", "t.x[at + 16] = f.x1;", True),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    old, new, reported = FAULTS[name]
    lib = Library(pm.source(MINI, FILE, {old: new}))
    rng = np.random.default_rng(20)
    x, w = random_x(rng, 41, 256), rounded(pm.matrix(rng, 72, 256))
    y = np.zeros((41, 72), np.float32)
    report = gemm(lib, MINI, x, w, STORE_F32, y, 1, SUFFIX)
    wrong = pm.relative(y, product(x, w)) > FLOAT
    assert bool(report.faults) if reported else wrong, [f.text for f in report.faults]

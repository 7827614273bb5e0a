"""The prompt's matrix kernels at the stand-in's and at the real shape, against numpy: values, every
height of tile bit for bit, several orders of execution, and faults that must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import prefill_matrices as pm
import pytest
from emulator import Library, Report, front_end
from prefill_cases import (
    ADD_F32, MINI, REAL, STORE_BF16, STORE_F32, Combination, Experts, Routing, bind, gemm,
    gemm_multi, gemm_silu, product, random_ids, random_x, route, run,
)  # fmt: skip

BOTH = pytest.mark.parametrize("shape", [MINI, REAL])
FILES = [f"prefill_{n}" for n in "embed norm gemm router route experts combine".split()]
SEEDS = (0, 1, 2)

FLOAT = 2e-5  # sums of float32, relative to the root mean square; bfloat: pm.rounded


# ---- embedding, norm, combination: exact or float32


@BOTH
def test_embed(shape: str) -> None:
    h_dim, vocab = pm.constants(shape)["SHAPE_HIDDEN"], 50
    rng = np.random.default_rng(1)
    table = pm.matrix(rng, vocab, h_dim)
    ids = np.array([7, 0, 49, 7, 12], np.int32)
    h = np.zeros((5, h_dim), np.float32)
    grid = pm.grids().c_prefill_row_grid(5, h_dim)
    lib = pm.library(shape, "prefill_embed")
    pm.clean(run(lib, shape, "prefill_embed", "PREFILL_EMBED", grid, 3, ids=ids,
                 **bind("", table), h=h, args=pm.uints(5)))  # fmt: skip
    # A code times a bfloat scale is exact in float32, so only the last addition rounds.
    assert np.array_equal(h, table.values[ids].astype(np.float32))


@BOTH
def test_norm(shape: str) -> None:
    h_dim, n = pm.constants(shape)["SHAPE_HIDDEN"], 5
    rng = np.random.default_rng(2)
    h = (rng.standard_normal((n, h_dim)) * 4).astype(np.float32)
    h[3] *= 1e-4  # where eps matters
    weight = rng.uniform(0.5, 2, h_dim).astype(np.float32)
    want, want_r = pm.rms_norm(h, weight)
    for seed in SEEDS:
        x, r = np.zeros((n, h_dim), np.uint16), np.zeros(n, np.float32)
        grid = pm.grids().c_prefill_row_grid(n, h_dim)
        pm.clean(run(pm.library(shape, "prefill_norm"), shape, "prefill_norm", "PREFILL_NORM",
                     grid, seed, h=h, weight=weight, x=x, r=r, args=pm.uints(n)))  # fmt: skip
        assert np.allclose(r, want_r, rtol=1e-6)
        assert pm.rounded(x, want)


@BOTH
def test_combine(shape: str) -> None:
    for seed in SEEDS:
        case = Combination(shape)
        pm.clean(run(pm.library(shape, "prefill_combine"), shape, "prefill_combine",
                     "PREFILL_COMBINE", case.grid(), seed, **case.arrays))  # fmt: skip
        assert pm.relative(case.arrays["h"], case.want) < 1e-6


@BOTH
def test_combine_norm_is_combine_then_norm(shape: str) -> None:
    plain, fused = Combination(shape), Combination(shape)
    lib, n, h_dim = pm.library(shape, "prefill_combine"), plain.n, plain.want.shape[1]
    weight = np.random.default_rng(4).uniform(0.5, 2, h_dim).astype(np.float32)
    outs = [(np.zeros((n, h_dim), np.uint16), np.zeros(n, np.float32)) for _ in range(2)]
    pm.clean(run(lib, shape, "prefill_combine", "PREFILL_COMBINE", plain.grid(), 0,
                 **plain.arrays))  # fmt: skip
    pm.clean(run(pm.library(shape, "prefill_norm"), shape, "prefill_norm", "PREFILL_NORM",
                 plain.grid(), 0, h=plain.arrays["h"], weight=weight, x=outs[0][0], r=outs[0][1],
                 args=pm.uints(n)))  # fmt: skip
    pm.clean(run(lib, shape, "prefill_combine_norm", "PREFILL_COMBINE", fused.grid(), 1,
                 **fused.arrays, weight=weight, x=outs[1][0], r=outs[1][1]))  # fmt: skip
    assert np.array_equal(plain.arrays["h"], fused.arrays["h"])
    for a, b in zip(*outs):
        assert np.array_equal(a, b) and np.any(a != 0)


# ---- products


@pytest.mark.parametrize("n", [1, 8, 9, 17, 33, 70])
@pytest.mark.parametrize("mode", [STORE_F32, STORE_BF16, ADD_F32])
def test_gemm(n: int, mode: int) -> None:
    """Ragged rows, and outputs that are no multiple of the tile's."""
    rng = np.random.default_rng(n)
    x, w = random_x(rng, n, 256), pm.matrix(rng, 72, 256)
    want = product(x, w)
    before = rng.standard_normal(want.shape).astype(np.float32)
    y = before.copy() if mode != STORE_BF16 else np.zeros(want.shape, np.uint16)
    pm.clean(gemm(pm.library(MINI, "prefill_gemm"), MINI, x, w, mode, y, seed=n))
    if mode == STORE_BF16:
        assert pm.rounded(y, want)
    else:
        assert pm.relative(y, want + before * (mode == ADD_F32)) < FLOAT


@pytest.mark.parametrize("cols", [2048, 4096, 512])
def test_gemm_real_columns(cols: int) -> None:
    """Rows of the real projections; outputs by a slice."""
    rng = np.random.default_rng(cols)
    x, w = random_x(rng, 40, cols), pm.matrix(rng, 128, cols)
    y = np.zeros((40, 128), np.float32)
    pm.clean(gemm(pm.library(REAL, "prefill_gemm"), REAL, x, w, STORE_F32, y, seed=2))
    assert pm.relative(y, product(x, w)) < FLOAT


def test_gemm_bands_cover_every_tile() -> None:
    """More tiles of rows than a band has, the last band ragged."""
    n = 32 * 9 + 5
    rng = np.random.default_rng(5)
    x, w = random_x(rng, n, 64), pm.matrix(rng, 64, 64)
    y = np.full((n, 64), np.nan, np.float32)
    report = gemm(pm.library(MINI, "prefill_gemm"), MINI, x, w, STORE_F32, y, seed=1)
    pm.clean(report)
    assert report.usage[pm.constants(MINI)["PREFILL_GEMM_Y"]].written == [(0, y.nbytes)]
    assert pm.relative(y, product(x, w)) < FLOAT


@pytest.mark.parametrize("shape,cols", [(MINI, 512), (REAL, 2048), (REAL, 4096)])
def test_gemm_contracted(shape: str, cols: int) -> None:
    rng = np.random.default_rng(6)
    x, w = random_x(rng, 33, cols), pm.matrix(rng, 64, cols)
    y = np.zeros((33, 64), np.float32)
    lib = pm.library(shape, "prefill_gemm", checked=False, contract=True)
    gemm(lib, shape, x, w, STORE_F32, y)
    assert pm.relative(y, product(x, w)) < FLOAT


def heights(total: int) -> Iterator[list[int]]:
    yield [total]
    yield [1] * total
    yield [8] * (total // 8) + [total % 8] * (total % 8 > 0)
    yield [9, 16, total - 25]
    yield [17, total - 17]


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_a_row_is_the_same_in_every_tile(checked: bool) -> None:
    """Cut into chunks of any size, so in small and large tiles and any place: the same bits."""
    rng = np.random.default_rng(7)
    x, w = random_x(rng, 41, 512), pm.matrix(rng, 64, 512)
    lib, results = pm.library(MINI, "prefill_gemm", checked), []
    for sizes in heights(41):
        y, at = np.zeros((41, 64), np.float32), 0
        for n in sizes:
            part = np.zeros((n, 64), np.float32)
            gemm(lib, MINI, np.ascontiguousarray(x[at : at + n]), w, STORE_F32, part)
            y[at : at + n] = part
            at += n
        results.append(y.view(np.uint32))
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize("rows", [[1024, 512, 4, 4], [32, 128, 64], [200]])
def test_gemm_multi(rows: list[int]) -> None:
    """Each part as prefill_gemm makes it, with a mode of its own."""
    rng, n, cols = np.random.default_rng(8), 21, 256
    x = random_x(rng, n, cols)
    parts = [pm.matrix(rng, r, cols) for r in rows]
    modes = [(STORE_F32, STORE_BF16, ADD_F32, STORE_F32)[p] for p in range(len(rows))]
    kinds = [np.uint16 if m == STORE_BF16 else np.float32 for m in modes]
    outs = [np.ones((n, r), k) for r, k in zip(rows, kinds)]
    alone = [np.ones((n, r), k) for r, k in zip(rows, kinds)]
    lib = pm.library(MINI, "prefill_gemm")
    pm.clean(gemm_multi(lib, MINI, x, parts, modes, outs, 4))
    for p, w in enumerate(parts):
        pm.clean(gemm(lib, MINI, x, w, modes[p], alone[p]))
        assert np.array_equal(outs[p], alone[p])


@BOTH
@pytest.mark.parametrize("n", [3, 45])
def test_gemm_silu(shape: str, n: int) -> None:
    c, rng = pm.constants(shape), np.random.default_rng(9)
    cols, out = c["SHAPE_HIDDEN"], c["SHAPE_SHARED_WIDTH"] if shape == MINI else 96
    x, gate, up = random_x(rng, n, cols), pm.matrix(rng, out, cols), pm.matrix(rng, out, cols)
    y = np.zeros((n, out), np.uint16)
    pm.clean(gemm_silu(pm.library(shape, "prefill_gemm"), shape, x, gate, up, y, 5))
    want = pm.silu(product(x, gate)) * product(x, up)
    assert pm.rounded(y, want, 1e-4)


# ---- router and routing


@BOTH
@pytest.mark.parametrize("flat", [False, True], ids=["distinct", "ties"])
def test_router(shape: str, flat: bool) -> None:
    for seed, n in zip(SEEDS, (1, 8, 11)):
        case = Routing(shape, n, flat)
        if not flat:
            top = -np.sort(-case.logits, axis=1)[:, :9]
            assert np.diff(-top, axis=1).min() > 1e-5, "another seed: a near tie proves nothing"
        pm.clean(case.run(pm.library(shape, "prefill_router"), seed))
        case.check()


def test_router_minus_zero_is_zero() -> None:
    """All logits 0, half of them negative zeros: the first eight experts."""
    case = Routing(MINI, 2)
    case.arrays["codes"][:] = 0
    for name in ("scales", "biases"):
        case.arrays[name][0::2], case.arrays[name][1::2] = 0x8000, 0
    pm.clean(case.run(pm.library(MINI, "prefill_router"), 1))
    assert np.array_equal(case.arrays["ids"], [list(range(8))] * 2)
    assert np.all(case.arrays["weights"] == 0.125)


def test_router_without_numbers_still_names_eight_experts() -> None:
    case = Routing(MINI, 1)
    case.arrays["h"][:] = np.nan
    pm.clean(case.run(pm.library(MINI, "prefill_router"), 0))
    assert len(set(case.arrays["ids"][0])) == 8 and case.arrays["ids"].max() < 32


@BOTH
@pytest.mark.parametrize("n,skew", [(1, 0), (33, 0), (300, 0.9), (520, 9)])
def test_route(shape: str, n: int, skew: float) -> None:
    experts = pm.constants(shape)["SHAPE_EXPERTS"]
    ids = random_ids(np.random.default_rng(n), n, experts, skew)
    order, _, blocks = pm.sort_pairs(ids, experts)
    for seed in SEEDS:
        report, placed, table = route(pm.library(shape, "prefill_route"), shape, ids, seed)
        pm.clean(report)
        assert np.array_equal(placed, order)
        assert np.array_equal(table[: len(blocks)], blocks) and not table[len(blocks) :].any()


# ---- experts


@pytest.mark.parametrize("n,skew", [(2, 0), (48, 1.0)])
def test_experts(n: int, skew: float) -> None:
    """Blocks of 1 to 32 pairs, experts without any, experts with several blocks."""
    case = Experts(MINI, random_ids(np.random.default_rng(12), n, 32, skew))
    assert n == 2 or (case.counts.max() > 32 and 0 < case.counts[case.counts > 0].min() <= 8)
    lib, pairs = pm.library(MINI, "prefill_experts"), np.arange(8 * n)
    for seed in SEEDS[:2]:
        case.act[:], case.out[:] = 0, 0
        pm.clean(case.up(lib, seed))
        case.check_up(pairs)
        pm.clean(case.down(lib, seed))
        case.check_down(pairs)


@pytest.mark.parametrize("checked,contract", [(False, False), (True, False), (False, True)],
                         ids=["fast", "checked", "contracted"])
def test_experts_real(checked: bool, contract: bool) -> None:
    """Blocks of 7 to 9 pairs at the real widths; checked: all eight of one row."""
    ids = np.argsort(np.random.default_rng(13).random((1 if checked else 9, 9)), axis=1)
    ids = ids[:, :8].astype(np.uint16)
    case = Experts(REAL, ids, used=9)
    for kernel in (case.up, case.down):
        pm.clean(kernel(pm.library(REAL, "prefill_experts", checked, contract), 1))
    pairs = np.arange(0, 8 * len(ids), 5)
    case.check_up(pairs)
    case.check_down(pairs)


def test_an_expert_row_is_the_same_in_every_block() -> None:
    """The same rows alone (small tiles) and among others (large ones): the same bits."""
    lib = pm.library(MINI, "prefill_experts", checked=False)
    ids = np.tile(np.arange(8, dtype=np.uint16), (30, 1))
    many = Experts(MINI, ids)
    many.up(lib, 0)
    many.down(lib, 0)
    for n in (5, 12):
        few = Experts(MINI, ids[:n])
        few.x[:], few.weights[:], few.w = many.x[-n:], many.weights[-n:], many.w
        few.up(lib, 0)
        few.down(lib, 0)
        assert np.array_equal(many.out[-n:], few.out) and few.out.any()


# ---- bytes that each kernel touches: what the header promises to the recorded graph


def touched(report: Report, prefix: str, shape: str) -> tuple[dict[str, int], dict[str, int]]:
    """Unique bytes read and written, by binding."""
    c = pm.constants(shape)
    names = {i: k for k, i in c.items() if k.startswith(f"{prefix}_")}
    sums = ({}, {})
    for index, usage in report.usage.items():
        name = names[index].removeprefix(f"{prefix}_").lower()
        for total, ranges in zip(sums, (usage.read, usage.written)):
            if ranges:
                total[name] = sum(end - begin for begin, end in ranges)
    return sums


def whole(arrays: dict[str, np.ndarray], *names: str) -> dict[str, int]:
    return {n: arrays[n].nbytes for n in names}


def test_bytes_of_router_and_route() -> None:
    case = Routing(MINI, 11)
    reads, writes = touched(case.run(pm.library(MINI, "prefill_router"), 0), "PREFILL_ROUTER", MINI)
    outputs = ("ids", "weights", "gate")
    assert reads == whole(case.arrays, *(k for k in case.arrays if k not in outputs))
    assert writes == whole(case.arrays, *outputs)
    ids = random_ids(np.random.default_rng(1), 40, 32, 0)
    report, placed, table = route(pm.library(MINI, "prefill_route"), MINI, ids)
    reads, writes = touched(report, "PREFILL_ROUTE", MINI)
    assert reads == {"ids": ids.nbytes, "args": 8}
    assert writes == {"sorted": placed.nbytes, "blocks": table.nbytes}


def test_bytes_of_experts() -> None:
    """Weights of used experts only, each once or more; everything else whole."""
    case = Experts(MINI, random_ids(np.random.default_rng(14), 3, 32, 1.0))
    used = int((case.counts > 0).sum())
    assert 8 <= used < 32
    lib = pm.library(MINI, "prefill_experts")
    reads, writes = touched(case.up(lib, 0), "PREFILL_UP", MINI)
    want = {"x": case.x.nbytes, "sorted": case.sorted.nbytes, "blocks": case.blocks.nbytes}
    want["args"] = 4
    for name in ("gate", "up"):
        for part, array in zip(("codes", "scales", "biases"), case.w[name].parts()):
            want[f"{name}_{part}"] = used * array[0].nbytes
    assert reads == want and writes == {"act": case.act.nbytes}
    reads, writes = touched(case.down(lib, 0), "PREFILL_DOWN", MINI)
    want = {"act": case.act.nbytes, "sorted": case.sorted.nbytes, "blocks": case.blocks.nbytes}
    want |= {"args": 4, "weights": case.weights.nbytes}
    for part, array in zip(("codes", "scales", "biases"), case.w["down"].parts()):
        want[part] = used * array[0].nbytes
    assert reads == want and writes == {"out": case.out.nbytes}


def test_bytes_of_gemm() -> None:
    rng, n = np.random.default_rng(15), 41
    x, w = random_x(rng, n, 256), pm.matrix(rng, 72, 256)
    matrix = dict(zip(("codes", "scales", "biases"), (p.nbytes for p in w.parts())))
    for mode in (STORE_F32, STORE_BF16, ADD_F32):
        y = np.zeros((n, 72), np.uint16 if mode == STORE_BF16 else np.float32)
        report = gemm(pm.library(MINI, "prefill_gemm"), MINI, x, w, mode, y)
        reads, writes = touched(report, "PREFILL_GEMM", MINI)
        added = {"y": y.nbytes} if mode == ADD_F32 else {}
        assert reads == {"x": x.nbytes, **matrix, "args": 16, **added}
        assert writes == {"y": y.nbytes}
        # Traffic: W once for each tile of rows, x once for each tile of outputs.
        c = pm.constants(MINI)
        assert report.usage[c["PREFILL_GEMM_CODES"]].bytes_read == 2 * matrix["codes"]
        assert report.usage[c["PREFILL_GEMM_X"]].bytes_read == 2 * x.nbytes


# ---- all files, and faults


@BOTH
@pytest.mark.parametrize("file", FILES)
def test_address_spaces(shape: str, file: str) -> None:
    front_end.check_address_spaces(pm.source(shape, file))


def fault_gemm(lib: Library, seed: int) -> tuple[Report, bool]:
    rng = np.random.default_rng(20)
    x, w = random_x(rng, 41, 256), pm.matrix(rng, 72, 256)
    y = np.zeros((41, 72), np.float32)
    report = gemm(lib, MINI, x, w, STORE_F32, y, seed)
    return report, pm.relative(y, product(x, w)) < FLOAT


def fault_experts(lib: Library, seed: int) -> tuple[Report, bool]:
    case = Experts(MINI, random_ids(np.random.default_rng(12), 20, 32, 0.5))
    report = case.up(lib, seed)
    try:
        case.check_up(np.arange(160))
    except AssertionError:
        return report, False
    return report, True


def fault_router(lib: Library, seed: int) -> tuple[Report, bool]:
    case = Routing(MINI, 11, flat=True)
    report = case.run(lib, seed)
    try:
        case.check()
    except AssertionError:
        return report, False
    return report, True


def fault_route(lib: Library, seed: int) -> tuple[Report, bool]:
    ids = random_ids(np.random.default_rng(33), 300, 32, 0.9)
    report, placed, table = route(lib, MINI, ids, seed)
    order, _, blocks = pm.sort_pairs(ids, 32)
    return report, np.array_equal(placed, order) and np.array_equal(table[: len(blocks)], blocks)


def fault_norm(lib: Library, seed: int) -> tuple[Report, bool]:
    rng = np.random.default_rng(2)
    h, weight = rng.standard_normal((3, 2048)).astype(np.float32), np.ones(2048, np.float32)
    x, r = np.zeros((3, 2048), np.uint16), np.zeros(3, np.float32)
    report = run(lib, REAL, "prefill_norm", "PREFILL_NORM", pm.grids().c_prefill_row_grid(3, 2048),
                 seed, h=h, weight=weight, x=x, r=r, args=pm.uints(3))  # fmt: skip
    return report, bool(np.allclose(r, pm.rms_norm(h, weight)[1], rtol=1e-6))


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    run: Callable[[Library, int], tuple[Report, bool]]
    old: str
    new: str
    kinds: str  # what the checks call it; WRONG: only the values tell
    shape: str = MINI


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS = [
    Fault("no barrier after filling", "prefill_gemm", fault_gemm, f"{BARRIER} /* FILLED */", "",
          "RACE UNINITIALISED"),
    Fault("no barrier after use", "prefill_gemm", fault_gemm, f"{BARRIER} /* USED */", "", "RACE"),
    Fault("no barrier before storing", "prefill_gemm", fault_gemm, f"{BARRIER} /* STAGED */", "",
          "RACE"),
    Fault("rows unguarded", "prefill_gemm", fault_gemm, "s.has_x1 = m + 1 < rows;",
          "s.has_x1 = true;", "OUT_OF_BOUNDS"),
    Fault("outputs unguarded", "prefill_gemm", fault_gemm,
          "if (column >= row_pieces) continue; /* EDGE */", "", "RACE OUT_OF_BOUNDS"),
    Fault("weights unguarded", "prefill_gemm", fault_gemm, "s.has_w = row < out_rows;",
          "s.has_w = true;", "OUT_OF_BOUNDS"),
    Fault("wrong stride of the tile", "prefill_gemm", fault_gemm,
          "words_x[pair * TILE_X_WORDS + k * 8 + column]",
          "words_x[pair * (TILE_X_WORDS - 8) + k * 8 + column]", "UNINITIALISED WRONG"),
    Fault("columns in another order", "prefill_gemm", fault_gemm,
          "const uint column = p.row / 2 + p.row % 2 * 4;", "const uint column = p.row;", "WRONG"),
    Fault("threads return before a barrier", "prefill_gemm", fault_gemm,
          "const gemm_part part = {quantised_of(codes, scales",
          "if (group.y * 64 + thread_index / 2 >= args.out_rows) return;\n"
          "    const gemm_part part = {quantised_of(codes, scales", "BARRIER SIMD_PARTIAL"),
    Fault("scales and biases exchanged", "prefill_gemm", fault_gemm,
          "(thread_index % 2 == 0 ? m.scales : m.biases)",
          "(thread_index % 2 == 0 ? m.biases : m.scales)",
          "WRONG"),
    Fault("offset of codes forgotten", "prefill_gemm", fault_gemm, "fma(-128.0f, scale,",
          "fma(-127.0f, scale,", "WRONG"),
    Fault("gate and up of the same matrix", "prefill_experts", fault_experts,
          "is_up ? quantised_of(up_codes, up_scales, up_biases)",
          "is_up ? quantised_of(gate_codes, up_scales, up_biases)", "WRONG"),
    Fault("stride of another layout", "prefill_experts", fault_experts,
          "block.x * args.expert_stride), n,", "block.x * args.expert_stride / 2), n,", "WRONG"),
    Fault("empty blocks run", "prefill_experts", fault_experts,
          "const uint rows = block.z;\n    if (rows == 0) return; /* the whole threadgroup */\n"
          "    const uint n0 = group.x * (PREFILL_TILE_N / 2)",
          "const uint rows = max(block.z, 1u);\n"
          "    const uint n0 = group.x * (PREFILL_TILE_N / 2)", "RACE"),
    Fault("rows not gathered", "prefill_experts", fault_experts,
          "const uint row1 = source.has_x1 ? sorted[block.y + m + 1] / SHAPE_TOP_K : 0;",
          "const uint row1 = source.has_x1 ? sorted[block.y + m + 1] : 0;", "OUT_OF_BOUNDS WRONG"),
    Fault("ties to the higher expert", "prefill_router", fault_router,
          "simd_min(best == largest ? at * 32 + lane : (uint)SHAPE_EXPERTS)",
          "simd_max(best == largest ? at * 32 + lane : 0u)", "WRONG"),
    Fault("logits read too early", "prefill_router", fault_router, f"{BARRIER} /* LOGITS */", "",
          "RACE"),
    Fault("row of the last tile unguarded", "prefill_router", fault_router,
          "const bool exists = in.row0 + m < in.rows;", "const bool exists = true;", "OUT_OF_BOUNDS"),
    Fault("counts not cleared first", "prefill_route", fault_route, f"{BARRIER} /* CLEARED */", "",
          "RACE UNINITIALISED"),
    Fault("scatter before counting", "prefill_route", fault_route, f"{BARRIER} /* COUNTED */", "",
          "RACE"),
    Fault("place within 32 rows forgotten", "prefill_route", fault_route,
          "sorted[at + popcount(votes & ((1u << lane) - 1))]", "sorted[at]", "RACE"),
    Fault("parts added too early", "prefill_norm", fault_norm, f"{BARRIER} /* PARTS */", "",
          "RACE UNINITIALISED", REAL),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault_is_found(fault: Fault) -> None:
    lib = Library(pm.source(fault.shape, fault.file, {fault.old: fault.new}))
    for seed in SEEDS[:2]:
        report, right = fault.run(lib, seed)
        found = report.kinds() & set(fault.kinds.split())
        assert found or ("WRONG" in fault.kinds and not right), [f.text for f in report.faults]

"""Every kernel at the real shape's dimensions with a * b + c left as two roundings, and fused wherever
the compiler likes: both must be right, so that what Metal's compiler makes of the text, which lies
between them, is right too. Slices: some rows, some outputs, some experts. `--full` (make metal-full)
runs larger ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

import decode_cases
import numpy as np
import prefill_cases as pc
import prefill_matrices as pm
import prefill_mix as mix
import pytest
from decode_kernels import Case
from decode_kernels import library as decode_library
from emulator import Library
from library_text import KERNELS
from prefill_cases import ADD_F32, REAL, STORE_BF16, STORE_F32
from test_decode_kernels import CASES, kernels
from test_decode_sample import SETTINGS, case_of, scene
from test_prefill_mix import assert_right, attn_errors, gdn_errors
from test_prefill_tensor import rounded

Results = list[np.ndarray]
FLOAT = 2e-5  # of sums of float32, relative to the root mean square
RAN: set[str] = set()


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the name of each kernel that runs into RAN."""
    run = Library.run

    def recording(self: Library, kernel: str, *args: object, **more: object) -> object:
        RAN.add(kernel)
        return run(self, kernel, *args, **more)

    monkeypatch.setattr(Library, "run", recording)
    RAN.clear()
    yield


@cache
def library(file: str, contract: bool) -> Library:
    return pm.library(REAL, file, checked=False, contract=contract)


# ---- decode: the cases of test_decode_kernels.py, whole matrices


def decoded(case: Case, contract: bool) -> Results:
    report, after = case.run(decode_library(kernels()[case.kernel][1], "real", False, contract))
    errors = case.errors(after)
    assert report.faults == [] and max(errors.values()) <= case.tolerance, errors
    return list(after.values())


def decode(name: str) -> Callable[[bool, bool], Results]:
    return lambda contract, full: decoded(CASES[name]("real"), contract)


def head(contract: bool, full: bool) -> Results:
    return decoded(decode_cases.head("real", repetition=1.3, frequency=0.2), contract)


def sample(contract: bool, full: bool) -> Results:
    results = []
    for i, p in enumerate(SETTINGS if full else SETTINGS[4:6]):
        logits, counts, allowed = scene("real", 40 + i, "plain")
        case = case_of("real", logits, counts, allowed, {**p, "stream": 77 + i}, i)
        results += decoded(case, contract)
    return results


# ---- products of a prompt


def gemm(suffix: str) -> Callable[[bool, bool], Results]:
    def run(contract: bool, full: bool) -> Results:
        lib, results = library("prefill_tensor" if suffix else "prefill_gemm", contract), []
        for cols, mode in ((2048, STORE_F32), (4096, ADD_F32), (512, STORE_BF16)):
            rng, n = np.random.default_rng(cols), 100 if full else 40
            x, w = pc.random_x(rng, n, cols), pm.matrix(rng, 136 if full else 72, cols)
            y = np.ones((n, len(w.values)), np.uint16 if mode == STORE_BF16 else np.float32)
            pm.clean(pc.gemm(lib, REAL, x, w, mode, y, 0, suffix))
            want = pc.product(x, rounded(w) if suffix else w)
            if mode == STORE_BF16:
                assert pm.rounded(y, want)
            else:
                assert pm.relative(y, want + (mode == ADD_F32)) < FLOAT
            results.append(y)
        return results

    return run


def gemm_multi(suffix: str) -> Callable[[bool, bool], Results]:
    def run(contract: bool, full: bool) -> Results:
        rng, n = np.random.default_rng(8), 70 if full else 21
        x = pc.random_x(rng, n, 2048)
        parts = [pm.matrix(rng, rows, 2048) for rows in ((512, 256, 32) if full else (72, 64, 32))]
        outs = [np.zeros((n, len(w.values)), np.float32) for w in parts]
        lib = library("prefill_tensor" if suffix else "prefill_gemm", contract)
        pm.clean(pc.gemm_multi(lib, REAL, x, parts, [STORE_F32] * 3, outs, 0, suffix))
        for w, out in zip(parts, outs):
            assert pm.relative(out, pc.product(x, rounded(w) if suffix else w)) < FLOAT
        return outs

    return run


def gemm_silu(suffix: str) -> Callable[[bool, bool], Results]:
    def run(contract: bool, full: bool) -> Results:
        rng, n, out = np.random.default_rng(9), 45, 512 if full else 64
        x, gate, up = pc.random_x(rng, n, 2048), pm.matrix(rng, out, 2048), pm.matrix(rng, out, 2048)
        y = np.zeros((n, out), np.uint16)
        lib = library("prefill_tensor" if suffix else "prefill_gemm", contract)
        pm.clean(pc.gemm_silu(lib, REAL, x, gate, up, y, 0, suffix))
        g, u = (pc.product(x, rounded(m) if suffix else m) for m in (gate, up))
        assert pm.rounded(y, pm.silu(g) * u, 1e-4)
        return [y]

    return run


def experts(suffix: str) -> Callable[[bool, bool], Results]:
    """Blocks of one pair, and with --full of up to 40."""

    def run(contract: bool, full: bool) -> Results:
        ids = pc.random_ids(np.random.default_rng(12), 40 if full else 1, 9, 1.0)
        case = pc.Experts(REAL, ids, used=9, suffix=suffix)
        if suffix:
            case.w = {k: rounded(m) for k, m in case.w.items()}
        lib = library("prefill_tensor" if suffix else "prefill_experts", contract)
        pm.clean(case.up(lib, 0))
        pm.clean(case.down(lib, 0))
        pairs = np.arange(0, ids.size, 3)
        case.check_up(pairs)
        case.check_down(pairs)
        return [case.act, case.out]

    return run


# ---- the rest of a prompt


def embed(contract: bool, full: bool) -> Results:
    table, ids = pm.matrix(np.random.default_rng(1), 50, 2048), np.array([7, 0, 49, 12], np.int32)
    h = np.zeros((4, 2048), np.float32)
    pm.clean(pc.run(library("prefill_embed", contract), REAL, "prefill_embed", "PREFILL_EMBED",
                    pm.grids().c_prefill_row_grid(4, 2048), 0, ids=ids, **pc.bind("", table), h=h,
                    args=pm.uints(4)))  # fmt: skip
    assert np.array_equal(h, table.values[ids].astype(np.float32))
    return [h]


def norm(contract: bool, full: bool) -> Results:
    rng = np.random.default_rng(2)
    h, weight = rng.standard_normal((5, 2048)).astype(np.float32) * 4, rng.uniform(0.5, 2, 2048)
    x, r, weight = np.zeros((5, 2048), np.uint16), np.zeros(5, np.float32), weight.astype(np.float32)
    pm.clean(pc.run(library("prefill_norm", contract), REAL, "prefill_norm", "PREFILL_NORM",
                    pm.grids().c_prefill_row_grid(5, 2048), 0, h=h, weight=weight, x=x, r=r,
                    args=pm.uints(5)))  # fmt: skip
    want, want_r = pm.rms_norm(h, weight)
    assert np.allclose(r, want_r, rtol=1e-6) and pm.rounded(x, want)
    return [x, r]


def combine(contract: bool, full: bool) -> Results:
    case, lib = pc.Combination(REAL), library("prefill_combine", contract)
    pm.clean(pc.run(lib, REAL, "prefill_combine", "PREFILL_COMBINE", case.grid(), 0,
                    **case.arrays))  # fmt: skip
    assert pm.relative(case.arrays["h"], case.want) < 1e-6
    return [case.arrays["h"]]


def combine_norm(contract: bool, full: bool) -> Results:
    case, lib = pc.Combination(REAL), library("prefill_combine", contract)
    weight = np.random.default_rng(4).uniform(0.5, 2, 2048).astype(np.float32)
    x, r = np.zeros((case.n, 2048), np.uint16), np.zeros(case.n, np.float32)
    pm.clean(pc.run(lib, REAL, "prefill_combine_norm", "PREFILL_COMBINE", case.grid(), 0,
                    **case.arrays, weight=weight, x=x, r=r))  # fmt: skip
    assert pm.relative(case.arrays["h"], case.want) < 1e-6
    assert pm.rounded(x, pm.rms_norm(case.want.astype(np.float32), weight)[0])
    return [case.arrays["h"], x, r]


def router(contract: bool, full: bool) -> Results:
    case = pc.Routing(REAL, 40 if full else 9)
    pm.clean(case.run(library("prefill_router", contract), 0))
    case.check()
    return [case.arrays[name] for name in ("ids", "weights", "gate")]


def route(contract: bool, full: bool) -> Results:
    ids = pc.random_ids(np.random.default_rng(5), 300, 256, 0.9)
    report, placed, table = pc.route(library("prefill_route", contract), REAL, ids)
    pm.clean(report)
    order, _, blocks = pm.sort_pairs(ids, 256)
    assert np.array_equal(placed, order) and np.array_equal(table[: len(blocks)], blocks)
    return [placed, table]


@cache
def mixer(contract: bool, tensor: bool = False) -> mix.Kernels:
    return mix.Kernels("real", contract=contract, tensor=tensor)


def deltanet(contract: bool, full: bool) -> Results:
    """And still one result, however it is cut."""
    k, n = mixer(contract), 130 if full else 20
    x = mix.gdn_input(k, n)
    got = mix.gdn_run(k, x, [n])
    assert_right(k, gdn_errors(k, x, got))
    assert np.array_equal(mix.gdn_run(k, x, [7, n - 7]).state, got.state)
    return [got.channels, got.gates, got.delta, got.normed, got.state]


def attention(tensor: bool) -> Callable[[bool, bool], Results]:
    """Whole and split, in the first span and in the second; with --full in the third too."""

    def run(contract: bool, full: bool) -> Results:
        k, results = mixer(contract, tensor), []
        for pos, n in ((62, 11), (mix.E["PREFILL_ATTN_SPAN"] - 4, 9), (6100, 35))[: 3 if full else 2]:
            x = mix.attn_input(k, pos, n)
            whole, split = (mix.attn_run(k, x, cuts, s) for cuts, s in (([n], False), ([2, n - 2], True)))
            assert_right(k, attn_errors(k, x, whole))
            assert np.array_equal(split.out, whole.out)
            results += [whole.query, whole.keys[pos:], whole.out]
        return results

    return run


RUNS: dict[str, tuple[str, Callable[[bool, bool], Results]]] = {  # the kernels, and how they run
    "embed": ("decode_embed", decode("embed")),
    "gdn in": ("decode_gdn_in", decode("gdn_in")),
    "gdn delta": ("decode_gdn_delta", decode("gdn_delta")),
    "gdn out": ("decode_gdn_out", decode("gdn_out")),
    "attention in": ("decode_attn_in", decode("attn_in")),
    "attention": ("decode_attn_short", decode("attn, large blocks")),
    "long attention": ("decode_attn_long", decode("attn_long")),
    "attention merged": ("decode_attn_merge", decode("attn_merge, more blocks than threads")),
    "attention out": ("decode_attn_out", decode("attn_out")),
    "router": ("decode_router", decode("router")),
    "experts up": ("decode_experts_up", decode("experts_up")),
    "experts down": ("decode_experts_down", decode("experts_down")),
    "head": ("decode_head", head),
    "sample": ("decode_sample", sample),
    "prompt embed": ("prefill_embed", embed),
    "prompt norm": ("prefill_norm", norm),
    "prompt gemm": ("prefill_gemm", gemm("")),
    "prompt gemm multi": ("prefill_gemm_multi", gemm_multi("")),
    "prompt gemm silu": ("prefill_gemm_silu", gemm_silu("")),
    "prompt experts": ("prefill_experts_up prefill_experts_down", experts("")),
    "prompt router": ("prefill_router", router),
    "prompt route": ("prefill_route", route),
    "prompt combine": ("prefill_combine", combine),
    "prompt combine norm": ("prefill_combine_norm", combine_norm),
    "prompt deltanet": ("prefill_gdn_conv prefill_gdn_scan prefill_gdn_norm", deltanet),
    "prompt attention": ("prefill_attn_prep prefill_attn prefill_attn_split prefill_attn_merge",
                         attention(False)),
    "tensor gemm": ("prefill_gemm_tensor", gemm("_tensor")),
    "tensor gemm multi": ("prefill_gemm_multi_tensor", gemm_multi("_tensor")),
    "tensor gemm silu": ("prefill_gemm_silu_tensor", gemm_silu("_tensor")),
    "tensor experts": ("prefill_experts_up_tensor prefill_experts_down_tensor", experts("_tensor")),
    "tensor attention": ("prefill_attn_prep_tensor prefill_attn_tensor prefill_attn_split_tensor"
                         " prefill_attn_merge", attention(True)),
}  # fmt: skip
# Whose results are the same bits: copies, choices and counts, a product of codes that is exact, and
# text that says fma wherever it adds a product.
EXACT = {"embed", "prompt embed", "prompt route", "sample"}
# Others' are not, or the two builds would be one.
APART = {"gdn delta", "long attention", "prompt deltanet", "prompt attention"}


@pytest.mark.parametrize("name", RUNS)
def test_bracket(name: str, request: pytest.FixtureRequest) -> None:
    named, run = RUNS[name]
    apart, fused = (run(contract, request.config.getoption("--full")) for contract in (False, True))
    assert set(named.split()) == RAN
    same = all(np.array_equal(a, b) for a, b in zip(apart, fused, strict=True))
    assert (same or name not in EXACT) and not (same and name in APART)


def test_every_kernel_is_in_it() -> None:
    texts = [p.read_text(encoding="utf-8") for p in KERNELS.glob("*.metal")]
    found = {k for t in texts for k in re.findall(r"^kernel void (\w+)\(", t, re.M)}
    renamed = {new for t in texts for _, new in re.findall(r"^#define (\w+) +(\w+_tensor)$", t, re.M)}
    made = set(kernels()) | {k for k in found if k.startswith("prefill")} | renamed
    assert {k for named, _ in RUNS.values() for k in named.split()} == made

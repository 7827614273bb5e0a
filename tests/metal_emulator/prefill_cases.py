"""One kernel of the prompt's matrix products at a time: its arguments, its run, its check."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import prefill_matrices as pm
from emulator import Library, Report

MINI, REAL = "mini", "qwen36_35b_a3b"
STORE_F32, STORE_BF16, ADD_F32 = 0, 1, 2


def run(lib: Library, shape: str, kernel: str, prefix: str, grid: pm.Grid, seed: int,
        **arrays: np.ndarray) -> Report:
    """Binds each array to the enumerator prefix_NAME of the arguments header."""
    c = pm.constants(shape)
    buffers = {c[f"{prefix}_{name.upper()}"]: a for name, a in arrays.items()}
    return lib.run(kernel, *grid.run(), buffers, seed)  # fmt: skip


def bind(prefix: str, m: pm.Matrix) -> dict[str, np.ndarray]:
    names = (f"{prefix}codes", f"{prefix}scales", f"{prefix}biases")
    return dict(zip(names, m.parts()))


def gemm(lib: Library, shape: str, x: np.ndarray, w: pm.Matrix, mode: int, y: np.ndarray,
         seed: int = 0, suffix: str = "") -> Report:
    n, cols = x.shape
    out = w.values.shape[0]
    grid = pm.grids().c_prefill_gemm_grid(n, pm.uints(out).ctypes.data_as(pm.c.c_void_p), 1)
    args = pm.uints(n, cols, out, mode)
    return run(lib, shape, f"prefill_gemm{suffix}", "PREFILL_GEMM", grid, seed, x=x,
               **bind("", w), y=y, args=args)  # fmt: skip


def random_x(rng: np.random.Generator, n: int, cols: int) -> np.ndarray:
    return pm.to_bf16(rng.standard_normal((n, cols)) + 0.3)


def product(x: np.ndarray, w: pm.Matrix) -> np.ndarray:
    return pm.from_bf16(x).astype(np.float64) @ w.values.T


def gemm_multi(lib: Library, shape: str, x: np.ndarray, parts: list[pm.Matrix], modes: list[int],
               outs: list[np.ndarray], seed: int = 0, suffix: str = "") -> Report:
    (n, cols), c, rows = x.shape, pm.constants(shape), [w.values.shape[0] for w in parts]
    buffers: dict[int, np.ndarray] = {c["PREFILL_MULTI_X"]: x}
    for p in range(4):
        used = p if p < len(rows) else 0
        for i, array in enumerate((*parts[used].parts(), outs[used])):
            buffers[c["PREFILL_MULTI_CODES"] + 4 * p + i] = array
    pad = [0] * (4 - len(rows))
    buffers[c["PREFILL_MULTI_ARGS"]] = pm.uints(n, cols, len(rows), *rows, *pad, *modes, *pad)
    sizes = pm.uints(*rows).ctypes.data_as(pm.c.c_void_p)
    grid = pm.grids().c_prefill_gemm_grid(n, sizes, len(rows))
    return lib.run(f"prefill_gemm_multi{suffix}", *grid.run(), buffers, seed)


def gemm_silu(lib: Library, shape: str, x: np.ndarray, gate: pm.Matrix, up: pm.Matrix,
              y: np.ndarray, seed: int = 0, suffix: str = "") -> Report:
    (n, cols), out = x.shape, gate.values.shape[0]
    grid = pm.grids().c_prefill_silu_grid(n, out)
    return run(lib, shape, f"prefill_gemm_silu{suffix}", "PREFILL_SILU", grid, seed, x=x,
               **bind("gate_", gate), **bind("up_", up), y=y, args=pm.uints(n, cols, out))


@dataclass
class Combination:
    shape: str
    n: int = 3
    arrays: dict[str, np.ndarray] = field(init=False)
    want: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng, h_dim = np.random.default_rng(3), pm.constants(self.shape)["SHAPE_HIDDEN"]
        pairs = pm.to_bf16(rng.standard_normal((self.n, 8, h_dim)))
        shared = pm.to_bf16(rng.standard_normal((self.n, h_dim)))
        gate = rng.random(self.n).astype(np.float32)
        h = rng.standard_normal((self.n, h_dim)).astype(np.float32)
        self.want = h + pm.from_bf16(pairs).astype(np.float64).sum(axis=1)
        self.want += gate[:, None].astype(np.float64) * pm.from_bf16(shared)
        self.arrays = {"pairs": pairs, "shared": shared, "gate": gate, "h": h}
        self.arrays["args"] = pm.uints(self.n)

    def grid(self) -> pm.Grid:
        return pm.grids().c_prefill_row_grid(self.n, self.want.shape[1])


@dataclass
class Routing:
    """A router's input with room for its output; every logit gap that matters is wide."""

    shape: str
    n: int
    flat: bool = False  # experts 2e and 2e + 1 are equal: every choice has ties

    def __post_init__(self) -> None:
        c, rng, n = pm.constants(self.shape), np.random.default_rng(10), self.n
        h_dim, experts = c["SHAPE_HIDDEN"], c["SHAPE_EXPERTS"]
        self.w = pm.matrix(rng, experts, h_dim, bits=8)
        self.shared = pm.matrix(rng, 1, h_dim, bits=8)
        if self.flat:
            for part in (*self.w.parts(), self.w.values):
                part[1::2] = part[0::2]
        h = (rng.standard_normal((n, h_dim)) * 3).astype(np.float32)
        weight = rng.uniform(0.5, 2, h_dim).astype(np.float32)
        x, r = pm.rms_norm(h, weight)
        self.logits, self.gate = x @ self.w.values.T, 1 / (1 + np.exp(-(x @ self.shared.values[0])))
        self.arrays = {
            "h": h, "r": r.astype(np.float32), "weight": weight, "args": pm.uints(n),
            "ids": np.zeros((n, 8), np.uint16), "weights": np.zeros((n, 8), np.float32),
            "gate": np.zeros(n, np.float32), **bind("", self.w), **bind("gate_", self.shared),
        }  # fmt: skip

    def run(self, lib: Library, seed: int) -> Report:
        grid = pm.grids().c_prefill_router_grid(self.n, self.logits.shape[1])
        return run(lib, self.shape, "prefill_router", "PREFILL_ROUTER", grid, seed, **self.arrays)

    def check(self) -> None:
        ids, weights = pm.choose(self.logits)
        assert np.array_equal(self.arrays["ids"], ids)
        assert np.allclose(self.arrays["weights"], weights, atol=2e-6)
        assert np.allclose(self.arrays["gate"], self.gate, atol=2e-6)


def random_ids(rng: np.random.Generator, n: int, experts: int, skew: float) -> np.ndarray:
    """Distinct experts in each row; with skew most rows share their first ones."""
    scores = rng.random((n, experts)) - skew * np.arange(experts) / experts
    return np.argsort(-scores, axis=1)[:, :8].astype(np.uint16)


def route(lib: Library, shape: str, ids: np.ndarray, seed: int = 0
          ) -> tuple[Report, np.ndarray, np.ndarray]:
    experts, n = pm.constants(shape)["SHAPE_EXPERTS"], len(ids)
    blocks = pm.grids().c_prefill_max_blocks(n, experts, 8)
    placed = np.full(8 * n, 0xFFFFFFFF, np.uint32)
    table = np.full((blocks, 4), 0xFFFFFFFF, np.uint32)
    report = run(lib, shape, "prefill_route", "PREFILL_ROUTE", pm.grids().c_prefill_route_grid(
        experts), seed, ids=ids, sorted=placed, blocks=table, args=pm.uints(n, blocks))
    return report, placed, table  # fmt: skip


@dataclass
class Experts:
    """Routed rows with the weights of all experts, laid out as in a packed file."""

    shape: str
    ids: np.ndarray
    used: int | None = None  # only so many experts have weights (the real shape has 400 MB)
    suffix: str = ""  # of the kernels' names

    def __post_init__(self) -> None:
        c, rng, n = pm.constants(self.shape), np.random.default_rng(11), len(self.ids)
        self.experts, self.h_dim = c["SHAPE_EXPERTS"], c["SHAPE_HIDDEN"]
        self.width = c["SHAPE_EXPERT_WIDTH"]
        self.x = random_x(rng, n, self.h_dim)
        self.weights = rng.random((n, 8)).astype(np.float32)
        order, self.counts, blocks = pm.sort_pairs(self.ids, self.experts)
        self.sorted = order
        self.blocks = np.zeros(
            (pm.grids().c_prefill_max_blocks(n, self.experts, 8), 4), np.uint32)
        self.blocks[: len(blocks)] = blocks
        e = self.used or self.experts
        shapes = {"gate": (self.width, self.h_dim), "up": (self.width, self.h_dim),
                  "down": (self.h_dim, self.width)}
        self.w = {k: pm.matrix(rng, e, *s) for k, s in shapes.items()}
        self.act = np.zeros((8 * n, self.width), np.uint16)
        self.out = np.zeros((n, 8, self.h_dim), np.uint16)  # fmt: skip

    def bound(self, name: str) -> tuple[list[np.ndarray], int]:
        """Three arrays and their stride: all of an expert's parts lie together."""
        m = self.w[name]
        sizes = [p[0].nbytes for p in m.parts()]
        stride = (sum(sizes) + 127) // 128 * 128
        block, parts, at = np.zeros((len(m.codes), stride), np.uint8), [], 0
        for part, size in zip(m.parts(), sizes):
            block[:, at : at + size] = part.reshape(len(part), -1).view(np.uint8)
            parts.append(at)
            at += size
        flat = block.reshape(-1)
        return [flat[p:].copy() for p in parts], stride  # copies: bytes are told apart by address

    def up(self, lib: Library, seed: int) -> Report:
        gate, stride = self.bound("gate")
        up, _ = self.bound("up")
        names = ("codes", "scales", "biases")
        arrays = {f"gate_{k}": a for k, a in zip(names, gate)}
        arrays |= {f"up_{k}": a for k, a in zip(names, up)}
        grid = pm.grids().c_prefill_up_grid(len(self.blocks), self.width)
        return run(lib, self.shape, f"prefill_experts_up{self.suffix}", "PREFILL_UP", grid, seed,
                   x=self.x, **arrays, sorted=self.sorted, blocks=self.blocks, act=self.act,
                   args=pm.uints(stride))  # fmt: skip

    def down(self, lib: Library, seed: int) -> Report:
        down, stride = self.bound("down")
        arrays = dict(zip(("codes", "scales", "biases"), down))
        grid = pm.grids().c_prefill_down_grid(len(self.blocks), self.h_dim)
        return run(lib, self.shape, f"prefill_experts_down{self.suffix}", "PREFILL_DOWN", grid,
                   seed, act=self.act, **arrays, sorted=self.sorted, blocks=self.blocks,
                   weights=self.weights, out=self.out, args=pm.uints(stride))  # fmt: skip

    def check_up(self, pairs: np.ndarray) -> None:
        for place in pairs:
            row, e = self.sorted[place] // 8, self.ids.reshape(-1)[self.sorted[place]]
            x = pm.from_bf16(self.x[row]).astype(np.float64)
            want = pm.silu(self.w["gate"].values[e] @ x) * (self.w["up"].values[e] @ x)
            assert pm.rounded(self.act[place], want, 1e-4)

    def check_down(self, pairs: np.ndarray) -> None:
        """Against the act that the kernel read, so that only its own rounding counts."""
        for place in pairs:
            pair = self.sorted[place]
            act = pm.from_bf16(self.act[place]).astype(np.float64)
            want = self.w["down"].values[self.ids.reshape(-1)[pair]] @ act
            want *= self.weights.reshape(-1)[pair]
            got = self.out.reshape(-1, self.h_dim)[pair]
            assert pm.rounded(got, want)

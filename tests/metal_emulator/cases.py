"""Each kernel with its arguments, its reference, and how to run it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from emulator import Library, Report

KERNELS = Path(__file__).parent / "kernels"
SEEDS = (0, 1, 2, 3)


def source(name: str) -> str:
    return (KERNELS / f"{name}.metal").read_text(encoding="utf-8")


def matvec(library: Library, seed: int, rows: int = 10, columns: int = 200) -> tuple[Report, float]:
    """The report, and the largest error; rows is no multiple of the four of a threadgroup."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((rows, columns)).astype(np.float16)
    x = rng.standard_normal(columns).astype(np.float32)
    y = np.zeros(rows, np.float32)
    shape = np.array([rows, columns], np.uint32)
    threads = (rows + 3) // 4 * 128
    report = library.run("matvec", (threads,), (128,), {0: w, 1: x, 2: y, 3: shape}, seed)
    return report, float(np.abs(y - w.astype(np.float32) @ x).max())


def softmax(library: Library, seed: int, rows: int = 3, columns: int = 150) -> tuple[Report, float]:
    rng = np.random.default_rng(8)
    values = (rng.standard_normal((rows, columns)) * 3).astype(np.float32)
    e = np.exp(0.5 * values - (0.5 * values).max(axis=1, keepdims=True))
    want = e / e.sum(axis=1, keepdims=True)
    constants = {"COLUMNS": np.uint32(columns), "SCALE": np.float32(0.5)}
    report = library.run(
        "softmax", (rows * 128,), (128,), {0: values}, seed, constants=constants
    )
    return report, float(np.abs(values - want).max())


def gemm(library: Library, seed: int) -> tuple[Report, float]:
    m, n, k = 20, 37, 29  # none a multiple of the tile's side
    rng = np.random.default_rng(9)
    a = rng.standard_normal((m, k)).astype(np.float16)
    b = rng.standard_normal((k, n)).astype(np.float16)
    c = np.zeros((m, n), np.float32)
    shape = np.array([m, n, k], np.uint32)
    grid = ((n + 15) // 16 * 128, (m + 15) // 16)
    buffers = {0: a, 1: b, 2: c, 3: shape}
    report = library.run("gemm_half", grid, (128, 1), buffers, seed, tg={0: 1024})
    return report, float(np.abs(c - a.astype(np.float32) @ b.astype(np.float32)).max())


def routing(library: Library, seed: int, tokens: int = 100) -> tuple[Report, float]:
    """The error is the number of experts whose places are not 0, 1, 2, ... in some order."""
    expert = np.random.default_rng(10).integers(0, 8, tokens).astype(np.uint32)
    counts, places = np.zeros(8, np.uint32), np.zeros(tokens, np.uint32)
    buffers = {0: expert, 1: counts, 2: places, 3: np.array([tokens], np.uint32)}
    report = library.run("route", (128,), (64,), buffers, seed)
    wrong = sum(
        sorted(places[expert == e]) != list(range(counts[e])) or counts[e] != (expert == e).sum()
        for e in range(8)
    )
    return report, float(wrong)

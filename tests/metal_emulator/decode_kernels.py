"""The decode kernels as the host sees them (bindings and grids of decode_args.h, by the C
compiler), random weights, and the model's formulas in numpy, which know nothing of kernels."""

from __future__ import annotations

import ctypes as c
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from emulator import Library, Report
from library_text import KERNELS, ROOT, SHAPES, library_text, shape

HEADER = KERNELS / "decode_args.h"
Array = np.ndarray
Buffers = dict[str, Array]
EPS = 1e-6


# ---- the header ------------------------------------------------------------------------------


@cache
def bindings() -> dict[str, int]:
    """DECODE_GDN_IN_QKV and the like."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
    values: dict[str, int] = {}
    for body in re.findall(r"enum decode_\w+_binding \{(.*?)\}", text, re.S):
        at = 0
        for item in filter(None, (i.strip() for i in body.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            at = eval(value, {}, values) if value else at  # noqa: S307
            values[name] = at
            at += 1
    return values


@cache
def kernels() -> dict[str, tuple[int, str, int]]:
    """Name: number, file, threads of a threadgroup."""
    text = HEADER.read_text(encoding="utf-8")
    found = re.findall(r'XX\(DECODE_\w+, (\w+), "(\w+\.metal)", (\d+)\)', text)
    return {name: (i, file, int(threads)) for i, (name, file, threads) in enumerate(found)}


@cache
def _host() -> c.CDLL:
    """The header's own functions, compiled as the host compiles them."""
    text = (
        '#include "backend/metal/kernels/decode_args.h"\n'
        "uint32_t groups(int k, const struct shape *s);\n"
        "uint32_t groups(int k, const struct shape *s) { return decode_groups(k, s); }\n"
        "int layout(uint32_t position, struct decode_attn_args *args);\n"
        "int layout(uint32_t position, struct decode_attn_args *args)\n"
        "{ return decode_attn_layout(position, args); }\n"
        "uint32_t most(uint32_t context);\n"
        "uint32_t most(uint32_t context) { return decode_attn_max_blocks(context); }\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        unit, target = Path(folder) / "host.c", Path(folder) / "host.so"
        unit.write_text(text, encoding="utf-8")
        shapes = [str(ROOT / f"src/model/shapes/{name}.c") for name in SHAPES.values()]
        flags = ["-std=c11", "-fPIC", "-shared", f"-I{ROOT}/src", f"-I{ROOT}/include"]
        subprocess.run(["cc", *flags, str(unit), *shapes, "-o", str(target)], check=True)
        return c.CDLL(str(target))


def groups(kernel: str, shape_name: str) -> int:
    table = c.c_char.in_dll(_host(), f"shape_{SHAPES[shape_name]}")
    return int(_host().groups(kernels()[kernel][0], c.byref(table)))


def attn_layout(position: int) -> tuple[str, int, int]:
    """Kernel, rows of a block, blocks."""
    args = (c.c_uint32 * 3)()
    number = _host().layout(c.c_uint32(position), args)
    name = next(n for n, (i, _, _) in kernels().items() if i == number)
    return name, int(args[1]), int(args[2])


def attn_max_blocks(context: int) -> int:
    return int(_host().most(c.c_uint32(context)))


# ---- weights ---------------------------------------------------------------------------------


def to_bf16(values: Array) -> Array:
    """As uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Matrix:
    codes: Array  # uint8 [rows, cols * bits / 8]
    scales: Array  # uint16 [rows, cols / 64]
    biases: Array
    bits: int

    def values(self, rows: slice = slice(None)) -> Array:
        """float64 [rows, cols], by the definition of docs/packed-format.md."""
        codes = self.codes[rows]
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        scales, biases = (from_bf16(a[rows]).astype(np.float64) for a in (self.scales, self.biases))
        return codes * np.repeat(scales, 64, 1) + np.repeat(biases, 64, 1)

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.codes, self.scales, self.biases


def matrix(rng: np.random.Generator, rows: int, cols: int, bits: int = 4) -> Matrix:
    """Values of about 1 / sqrt(cols); scales of both signs."""
    top = 2**bits - 1
    scales = rng.uniform(0.5, 1.5, (rows, cols // 64)) * rng.choice([-1, 1], (rows, cols // 64))
    scales *= 4 / (top * cols**0.5)
    biases = -scales * top / 2 + rng.normal(0, 0.1, scales.shape) / cols**0.5
    codes = rng.integers(0, 256, (rows, cols * bits // 8), np.uint8)
    return Matrix(codes, to_bf16(scales), to_bf16(biases), bits)


class Experts:
    """The chosen experts of a layer as the packed file has them: gate, up, down of one expert lie
    together. The others are zeros that nobody touches."""

    def __init__(self, rng: np.random.Generator, shape_name: str, chosen: list[int]) -> None:
        s = shape(shape_name)
        h, width, count = s["HIDDEN"], s["EXPERT_WIDTH"], s["EXPERTS"]
        dims = {"gate": (width, h), "up": (width, h), "down": (h, width)}
        sizes = [n for r, k in dims.values() for n in (r * k // 2, r * k // 32, r * k // 32)]
        self.at = np.cumsum([0, *sizes])
        self.stride = (int(self.at[-1]) + 4095) // 4096 * 4096
        self.data = np.zeros(self.stride * (count - 1) + int(self.at[-1]), np.uint8)
        self.matrices: dict[str, dict[int, Matrix]] = {name: {} for name in dims}
        for e in chosen:
            for i, (name, (rows, cols)) in enumerate(dims.items()):
                m = self.matrices[name][e] = matrix(rng, rows, cols)
                for j, part in enumerate(m.arrays()):
                    begin = e * self.stride + self.at[3 * i + j]
                    self.data[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)

    def bound(self, name: str) -> list[Bound]:
        first = 3 * list(self.matrices).index(name)
        return [Bound(self.data, int(self.at[first + j])) for j in range(3)]


# ---- running ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """An array bound from a byte on."""

    array: Array
    offset: int


Value = Array | Matrix | list[Bound]


@cache
def library(file: str, shape_name: str, checked: bool, contract: bool = False) -> Library:
    return Library(library_text(file, shape_name), checked, contract)


@dataclass(frozen=True)
class Case:
    """One dispatch: buffers by the header's names without the kernel's, what it must leave in some
    of them, and how far from that it may end up, as a part of the largest value."""

    kernel: str
    shape: str
    groups: int
    buffers: dict[str, Value]
    want: Buffers
    tolerance: float = 2e-6

    def index(self, name: str) -> int:
        prefix = self.kernel.upper().removesuffix("_SHORT").removesuffix("_LONG")
        return bindings()[f"{prefix}_{name}"]

    def run(self, lib: Library, seed: int = 0) -> tuple[Report, Buffers]:
        """The report, and the results; the buffers of the case stay as they are."""
        after = {name: self.buffers[name].copy() for name in self.want}  # type: ignore[union-attr]
        arrays: dict[int, Array] = {}
        offsets: dict[int, int] = {}
        for name, value in (self.buffers | after).items():
            at = self.index(name)
            if isinstance(value, Matrix):
                arrays |= {at + i: a for i, a in enumerate(value.arrays())}
            elif isinstance(value, list):
                arrays |= {at + i: b.array for i, b in enumerate(value)}
                offsets |= {at + i: b.offset for i, b in enumerate(value)}
            else:
                arrays[at] = value
        threads = kernels()[self.kernel][2]
        grid = (self.groups * threads,)
        report = lib.run(self.kernel, grid, (threads,), arrays, seed, offsets=offsets)
        return report, after

    def errors(self, after: Buffers) -> dict[str, float]:
        """Of each result: numbers that differ, or the largest error as a part of the largest."""
        return {name: _error(after[name], want) for name, want in self.want.items()}

    def check(self, lib: Library, seed: int = 0) -> Report:
        report, after = self.run(lib, seed)
        assert [f.text for f in report.faults] == []
        assert report.tg_static <= 32768
        errors = self.errors(after)
        assert max(errors.values()) <= self.tolerance, f"{self.kernel} seed {seed}: {errors}"
        return report


def _error(got: Array, want: Array) -> float:
    assert got.shape == want.shape
    if got.dtype.kind in "iu":
        return float((got != want).sum())
    scale = float(np.abs(want).max()) or 1.0
    error = np.abs(got.astype(np.float64) - want).max() / scale
    return float(error) if np.isfinite(error) else np.inf


# ---- formulas of docs/model.md ---------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS) * weight

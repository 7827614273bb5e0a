"""What the tests of the prompt's matrix kernels share: their text, bindings and grids as the engine
has them, random quantised matrices, and formulas in numpy that know nothing of tiles."""

from __future__ import annotations

import ctypes as c
import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emulator import ROOT, Library, Report

KERNELS = ROOT / "src/backend/metal/kernels"
SHAPES = ROOT / "src/model/shapes"
ARGS_HEADER = KERNELS / "prefill_gemm_args.h"
MAX_THREADGROUP_BYTES = 32768


# ---- the kernels' text, bindings and grids


def _flatten(text: str, seen: set[str]) -> list[str]:
    """Quoted includes are put into the text, once each; the device's compiler has no folders."""
    lines = []
    for line in text.splitlines():
        match = re.match(r'#include "(?:.*/)?([^/"]*)"', line)
        if not match:
            lines.append(line)
        elif match[1] not in seen:
            seen.add(match[1])
            path = next(p for p in (KERNELS / match[1], SHAPES / match[1]) if p.exists())
            lines += _flatten(path.read_text(encoding="utf-8"), seen)
    return lines


def source(shape: str, file: str, changes: dict[str, str] | None = None) -> str:
    """One .metal file for one shape. Each text of `changes` is found exactly once and replaced."""
    texts = [(SHAPES / f"{shape}.h"), KERNELS / f"{file}.metal"]
    text = "\n".join(_flatten("\n".join(p.read_text(encoding="utf-8") for p in texts), set()))
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, f"{text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


@functools.cache
def library(shape: str, file: str, checked: bool = True, contract: bool = False) -> Library:
    return Library(source(shape, file), checked, contract)


@functools.cache
def enumerators() -> tuple[str, ...]:
    """Those of the arguments header, as it spells them."""
    text = re.sub(r"/\*.*?\*/", "", ARGS_HEADER.read_text(encoding="utf-8"), flags=re.S)
    bodies = re.findall(r"enum \w+ \{(.*?)\}", text, flags=re.S)
    items = (item for body in bodies for item in body.split(","))
    return tuple(item.split("=")[0].strip() for item in items if item.strip())


@functools.cache
def constants(shape: str) -> dict[str, int]:
    """Numbers of the shape and enumerators of the header, by their C names."""
    names = [f"SHAPE_{n}" for n in ("HIDDEN", "EXPERTS", "EXPERT_WIDTH", "SHARED_WIDTH")]
    lines = "".join(f'printf("{n} %d\\n", (int)({n}));' for n in [*names, *enumerators()])
    program = (
        f'#include "{SHAPES / shape}.h"\n#include "{ARGS_HEADER}"\n#include <stdio.h>\n'
        f"int main(void) {{ {lines} return 0; }}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        unit, binary = Path(folder) / "c.c", Path(folder) / "c"
        unit.write_text(program, encoding="utf-8")
        subprocess.run(["cc", "-std=c11", str(unit), "-o", str(binary)], check=True)
        out = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    values = {name: int(value) for name, value in (line.split() for line in out.splitlines())}
    for name in [n for n in values if n.endswith("CODES")]:  # scales and biases follow unnamed
        values |= {name[:-5] + part: values[name] + i for i, part in ((1, "SCALES"), (2, "BIASES"))}
    return values


class Grid(c.Structure):
    _fields_ = [(n, c.c_uint32) for n in ("x", "y", "z", "threads")]

    def run(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Threads of the grid and of a threadgroup."""
        return (self.x * self.threads, self.y, self.z), (self.threads, 1, 1)


@functools.cache
def grids() -> c.CDLL:
    """The header's own grid functions, exported under the same names with a leading c_."""
    unit = f'#include "{ARGS_HEADER}"\n' + "\n".join(
        f"struct prefill_grid c_{name}({parameters}) {{ return {name}({arguments}); }}"
        for name, parameters, arguments in (
            ("prefill_row_grid", "uint32_t n, uint32_t h", "n, h"),
            ("prefill_gemm_grid", "uint32_t n, const uint32_t *r, uint32_t p", "n, r, p"),
            ("prefill_silu_grid", "uint32_t n, uint32_t r", "n, r"),
            ("prefill_router_grid", "uint32_t n, uint32_t e", "n, e"),
            ("prefill_route_grid", "uint32_t e", "e"),
            ("prefill_up_grid", "uint32_t b, uint32_t w", "b, w"),
            ("prefill_down_grid", "uint32_t b, uint32_t h", "b, h"),
        )
    )
    unit += "\nuint32_t c_prefill_max_blocks(uint32_t n, uint32_t e, uint32_t k)"
    unit += " { return prefill_max_blocks(n, e, k); }\n"
    with tempfile.TemporaryDirectory() as folder:
        text, target = Path(folder) / "g.c", Path(folder) / "g.so"
        text.write_text(unit, encoding="utf-8")
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-shared"]
        subprocess.run([*command, "-fPIC", str(text), "-o", str(target)], check=True)
        lib = c.CDLL(str(target))
    for name in ("row", "gemm", "silu", "router", "route", "up", "down"):
        getattr(lib, f"c_prefill_{name}_grid").restype = Grid
    return lib


def uints(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


# ---- numbers


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Matrix:
    codes: np.ndarray  # uint8 [..., rows, cols * bits / 8]
    scales: np.ndarray  # bf16 bits [..., rows, cols / 64]
    biases: np.ndarray
    values: np.ndarray  # float64 [..., rows, cols]

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.codes, self.scales, self.biases


def matrix(rng: np.random.Generator, *shape: int, bits: int = 4) -> Matrix:
    """Values of about unit row norm; some scales are negative."""
    rows_shape, cols = shape[:-1], shape[-1]
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    groups = (*rows_shape, cols // 64)
    step = 3.5 / (1 << bits) / np.sqrt(cols)
    sign = np.where(rng.random(groups) < 0.3, -1.0, 1.0)
    scales = to_bf16(rng.uniform(0.5, 1.5, groups) * step * sign)
    centre = -from_bf16(scales).astype(np.float64) * ((1 << bits) - 1) / 2
    biases = to_bf16(centre + rng.normal(0, step, groups))
    values = codes.reshape(*groups, 64) * from_bf16(scales)[..., None].astype(np.float64)
    values = (values + from_bf16(biases)[..., None]).reshape(shape)
    packed = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
    return Matrix(np.ascontiguousarray(packed), scales, biases, values)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def rms_norm(h: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and r in double."""
    wide = h.astype(np.float64)
    r = 1.0 / np.sqrt((wide**2).mean(axis=1) + 1e-6)
    return wide * r[:, None] * weight, r


def choose(logits: np.ndarray, top_k: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Ids by descending logit with ties to the lower id, and the softmax of the chosen."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    e = np.exp(np.take_along_axis(logits, ids, axis=1) - logits.max(axis=1, keepdims=True))
    return ids, e / e.sum(axis=1, keepdims=True)


def sort_pairs(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs by expert, rows ascending; counts; blocks of at most 32."""
    flat = ids.reshape(-1).astype(np.int64)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    blocks, first = [], 0
    for e in range(experts):
        for done in range(0, counts[e], 32):
            blocks.append((e, first + done, min(32, counts[e] - done), 0))
        first += counts[e]
    return order.astype(np.uint32), counts, np.array(blocks, np.uint32).reshape(-1, 4)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the root mean square of what is wanted."""
    scale = np.sqrt(np.mean(np.square(want, dtype=np.float64))) + 1e-30
    return float(np.abs(got.astype(np.float64) - want).max() / scale)


def rounded(bits: np.ndarray, want: np.ndarray, slack: float = 2e-5) -> bool:
    """Whether bfloat bits are `want` rounded once, after float32 arithmetic in any order, which may
    be off by `slack` of the root mean square. (1e-4 for a product of two sums: the error of the
    one grows with the other.)"""
    got = from_bf16(bits).astype(np.float64)
    slack *= np.sqrt(np.mean(np.square(want)))
    return bool((np.abs(got - want) <= np.abs(want) / 255 + slack).all())


def clean(report: Report) -> None:
    assert [f.text for f in report.faults] == []
    assert report.tg_static <= MAX_THREADGROUP_BYTES

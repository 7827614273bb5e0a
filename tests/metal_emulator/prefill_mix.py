"""Runs the mixers' prefill kernels over chunks of a prompt, and says what they must compute.

The references are numpy formulas in float64 from the model's definition (docs/model.md), written
without regard to how the kernels or the C reference go about it.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from emulator import Library, Report
from library_text import KERNELS, ROOT, enumerators, library_text, shape

E = enumerators("prefill_mix_args.h")
NAN_BF16 = 0x7FC1  # what no kernel may read
TENSOR_KERNELS = {"prefill_attn_prep", "prefill_attn", "prefill_attn_split"}


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def compiled(sources: list[Path | str], *flags: str) -> ctypes.CDLL:
    """C sources, or texts, as a shared object."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, source in enumerate(sources):
            if isinstance(source, str):
                files.append(Path(folder) / f"{i}.c")
                files[-1].write_text(source, encoding="utf-8")
            else:
                files.append(source)
        target = Path(folder) / "compiled.so"
        command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared"]
        command += [*flags, "-o", str(target), *map(str, files), "-lm"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(target))


class Grid(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("x", "y", "z", "threads")]


@cache
def _header() -> ctypes.CDLL:
    """The header's own functions, which are static inline: each behind one of another name."""
    names = {"prefill_gdn_conv_grid": 3, "prefill_gdn_scan_grid": 1, "prefill_gdn_norm_grid": 2,
             "prefill_attn_prep_grid": 2, "prefill_attn_grid": 2, "prefill_attn_split_grid": 3,
             "prefill_attn_merge_grid": 2, "prefill_attn_spans": 2,
             "prefill_attn_splits": 3}  # fmt: skip
    text = '#include "prefill_mix_args.h"\n'
    for name, count in names.items():
        kind = "struct prefill_grid" if name.endswith("grid") else "uint32_t"
        parameters = ", ".join(f"uint32_t p{i}" for i in range(count))
        values = ", ".join(f"p{i}" for i in range(count))
        call = f"{name}({values})" if kind[0] == "s" else f"(uint32_t){name}({values})"
        text += f"{kind} t_{name}({parameters}) {{ return {call}; }}\n"
    lib = compiled([text], f"-I{KERNELS}", "-Wall", "-Wextra", "-Wconversion", "-Werror")
    for name in names:
        function = getattr(lib, f"t_{name}")
        function.restype = Grid if name.endswith("grid") else ctypes.c_uint32
    return lib


def header(name: str, *values: int) -> int:
    return int(getattr(_header(), f"t_{name}")(*values))


def grid(kernel: str, *values: int) -> Grid:
    return getattr(_header(), f"t_{kernel}_grid")(*values)


@cache
def ref() -> ctypes.CDLL:
    """Functions of the reference backend that stand alone, without the projections around them."""
    folder = ROOT / "src/backend/ref"
    files = [folder / f"{name}.c" for name in ("norm", "rope", "deltanet")]
    return compiled([*files, "void mat_vec(void);\nvoid mat_vec(void) {}\n"], f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}")


@dataclass
class Kernels:
    """The five libraries of one shape; `patch` (file, old, new) changes the text of one file."""

    shape_name: str
    checked: bool = False
    contract: bool = False
    patch: tuple[str, str, str] | None = None
    seed: int = 0
    tensor: bool = False  # attention by tensor operations
    faults: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    _libraries: dict[str, Library] = field(default_factory=dict)

    @cached_property
    def s(self) -> dict[str, int]:
        d = dict(shape(self.shape_name))
        d["CONV_DIM"] = 128 * (2 * d["GDN_K_HEADS"] + d["GDN_V_HEADS"])
        d["V_DIM"] = 128 * d["GDN_V_HEADS"]
        d["Q_DIM"], d["KV_DIM"] = 256 * d["Q_HEADS"], 256 * d["KV_HEADS"]
        return d

    def text(self, file: str) -> str:
        text = library_text(file + ".metal", self.shape_name)
        if self.patch and self.patch[0] == file:
            assert text.count(self.patch[1]) == 1, self.patch
            text = text.replace(self.patch[1], self.patch[2])
        return text

    def library(self, file: str) -> Library:
        if file not in self._libraries:
            self._libraries[file] = Library(self.text(file), self.checked, self.contract)
        return self._libraries[file]

    def run(
        self,
        kernel: str,
        grid_of: tuple[int, ...],
        buffers: dict[str, np.ndarray],
        file: str | None = None,
    ) -> Report:
        """grid_of: what the kernel's grid depends on. Buffers by the name of their binding without
        the kernel's prefix."""
        bound = {E[f"{kernel.upper()}_{name}"]: array for name, array in buffers.items()}
        g = grid(kernel, *grid_of)
        threads = (g.x * g.threads, g.y, g.z)
        if self.tensor and kernel in TENSOR_KERNELS:
            file, kernel = "prefill_attn_tensor", kernel + "_tensor"
        report = self.library(file or kernel).run(kernel, threads, (g.threads,), bound, self.seed)
        self.faults += [f.text for f in report.faults]
        self.kinds |= report.kinds()
        return report


# ---- Gated DeltaNet


@dataclass
class GdnInput:
    """What the projections and the weights of one layer would be, for a whole prompt."""

    qkv: np.ndarray  # [tokens][conv_dim]
    z: np.ndarray
    b: np.ndarray
    a: np.ndarray
    taps: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    weight: np.ndarray
    history: np.ndarray  # [3][conv_dim] before the prompt
    state: np.ndarray  # [v_heads][128 values][128 keys]


def gdn_input(k: Kernels, tokens: int, seed: int = 1) -> GdnInput:
    rng = np.random.default_rng(seed)

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size) * scale).astype(np.float32)

    conv, v, heads = k.s["CONV_DIM"], k.s["V_DIM"], k.s["GDN_V_HEADS"]
    a = normal(tokens, heads, scale=3)
    a[0, 0] = 25.0  # softplus is x from 20 on
    return GdnInput(
        qkv=normal(tokens, conv), z=normal(tokens, v, scale=2), b=normal(tokens, heads, scale=2),
        a=a, taps=normal(conv, 4, scale=0.6), a_log=normal(heads), dt_bias=normal(heads),
        weight=normal(128) + 1, history=normal(3, conv),
        state=normal(heads, 128, 128, scale=0.1),
    )  # fmt: skip


@dataclass
class GdnOutput:
    channels: np.ndarray
    gates: np.ndarray
    delta: np.ndarray
    normed: np.ndarray  # bf16 bits
    history: np.ndarray
    state: np.ndarray


def wide(rows: np.ndarray, padding: int) -> np.ndarray:
    """Rows with NaN after them, as a stride wider than the row leaves."""
    out = np.full((rows.shape[0], rows.shape[1] + padding), np.nan, np.float32)
    out[:, : rows.shape[1]] = rows
    return out


def gdn_run(k: Kernels, x: GdnInput, cuts: Iterable[int]) -> GdnOutput:
    """The three kernels over chunks of so many tokens each."""
    s, at, parts = k.s, 0, []
    history, state = x.history.copy(), x.state.copy()
    for n in cuts:
        rows = slice(at, at + n)
        qkv, z = wide(x.qkv[rows], 8), wide(x.z[rows], 4)
        b, a = wide(x.b[rows], 3), wide(x.a[rows], 3)
        args = np.array([n, qkv.shape[1], z.shape[1], b.shape[1]], np.uint32)
        channels = np.zeros((n, s["CONV_DIM"]), np.float32)
        gates = np.zeros((n, 2, s["GDN_V_HEADS"]), np.float32)
        delta = np.zeros((n, s["V_DIM"]), np.float32)
        normed = np.zeros((n, s["V_DIM"]), np.uint16)
        history_out, state_out = np.zeros_like(history), np.zeros_like(state)
        k.run("prefill_gdn_conv", (n, s["CONV_DIM"], s["GDN_V_HEADS"]),
              {"ARGS": args, "QKV": qkv, "B": b, "A": a, "TAPS": x.taps, "A_LOG": x.a_log,
               "DT_BIAS": x.dt_bias, "HISTORY_IN": history, "HISTORY_OUT": history_out,
               "CHANNELS": channels, "GATES": gates})  # fmt: skip
        k.run("prefill_gdn_scan", (s["GDN_V_HEADS"],),
              {"ARGS": args, "CHANNELS": channels, "GATES": gates, "STATE_IN": state,
               "STATE_OUT": state_out, "DELTA": delta})  # fmt: skip
        k.run("prefill_gdn_norm", (n, s["GDN_V_HEADS"]),
              {"ARGS": args, "DELTA": delta, "Z": z, "WEIGHT": x.weight, "OUT": normed})
        parts.append((channels, gates, delta, normed))
        history, state, at = history_out, state_out, at + n
    joined = [np.concatenate(p) for p in zip(*parts)]
    return GdnOutput(*joined, history, state)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gdn_reference(k: Kernels, x: GdnInput) -> GdnOutput:
    """The definition, one token after another, in float64."""
    tokens, heads, keys = x.qkv.shape[0], k.s["GDN_V_HEADS"], k.s["GDN_K_HEADS"]
    u = np.concatenate([x.history, x.qkv]).astype(np.float64)
    c = sum(u[j : j + tokens] * x.taps[:, j] for j in range(4))
    c = c * sigmoid(c)
    q, key, v = np.split(c, [keys * 128, 2 * keys * 128], axis=1)
    unit = [
        m / np.sqrt((m**2).sum(-1, keepdims=True) + 1e-6)
        for m in (q.reshape(tokens, keys, 128), key.reshape(tokens, keys, 128))
    ]
    q, key = unit[0] / np.sqrt(128), unit[1]
    v = v.reshape(tokens, heads, 128)
    beta = sigmoid(x.b.astype(np.float64))
    decay = np.exp(
        -np.exp(x.a_log.astype(np.float64)) * np.logaddexp(0, x.a.astype(np.float64) + x.dt_bias)
    )
    state = x.state.astype(np.float64)  # [head][value][key]
    delta = np.zeros((tokens, heads, 128))
    of_head = np.arange(heads) // (heads // keys)
    for t in range(tokens):
        kt, qt = key[t][of_head], q[t][of_head]
        state = state * decay[t][:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, kt))
        state = state + d[:, :, None] * kt[:, None, :]
        delta[t] = np.einsum("hvk,hk->hv", state, qt)
    z = x.z.astype(np.float64).reshape(tokens, heads, 128)
    normed = delta / np.sqrt((delta**2).mean(-1, keepdims=True) + 1e-6) * x.weight
    normed = normed * z * sigmoid(z)
    channels = np.concatenate(
        [q.reshape(tokens, -1), key.reshape(tokens, -1), v.reshape(tokens, -1)], axis=1
    )
    return GdnOutput(channels, np.stack([beta, decay], 1), delta.reshape(tokens, -1),
                     normed.reshape(tokens, -1), u[-3:], state)  # fmt: skip


# ---- full attention


@dataclass
class AttnInput:
    pos: int  # of the first row; the cache before it is `keys` and `values`
    qg: np.ndarray  # [tokens][q_heads][2][256]
    k: np.ndarray  # [tokens][kv_dim]
    v: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    inv_freq: np.ndarray
    keys: np.ndarray  # bf16 bits [pos + tokens][kv_heads][256], rows from pos on are unwritten
    values: np.ndarray


def inv_freq() -> np.ndarray:
    power = np.float64(1e7) ** (2.0 * np.arange(32) / 64)
    return np.float32(1) / power.astype(np.float32)


def attn_input(k: Kernels, pos: int, tokens: int, seed: int = 2) -> AttnInput:
    rng = np.random.default_rng(seed)
    heads, kv = k.s["Q_HEADS"], k.s["KV_HEADS"]

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32)

    cache = np.full((2, pos + tokens, kv, 256), NAN_BF16, np.uint16)
    cache[:, :pos] = to_bf16(normal(2, pos, kv, 256))
    # The weights let scores reach about 8, so that the softmax has something to choose from.
    return AttnInput(
        pos, normal(tokens, heads, 2, 256) * 2, normal(tokens, kv * 256), normal(tokens, kv * 256),
        1.5 + 0.2 * normal(256), 1.2 + 0.2 * normal(256), inv_freq(), cache[0], cache[1],
    )  # fmt: skip


@dataclass
class AttnOutput:
    query: np.ndarray  # bf16 bits [tokens][kv_heads][256][8]
    keys: np.ndarray
    values: np.ndarray
    out: np.ndarray  # bf16 bits [tokens][q_heads][256]
    reports: dict[str, Report]  # of the last chunk


def attn_run(
    k: Kernels, x: AttnInput, cuts: Iterable[int], split: bool = False, by_head: bool = False
) -> AttnOutput:
    """Preparation and attention over chunks of so many tokens each. by_head: the cache as
    [kv_heads][context][256]; the output has it by position all the same."""
    s, at, parts, reports = k.s, 0, [], {}
    heads, kv = s["Q_HEADS"], s["KV_HEADS"]
    order = (1, 0, 2) if by_head else (0, 1, 2)
    keys, values = (np.ascontiguousarray(a.transpose(order)) for a in (x.keys, x.values))
    for n in cuts:
        pos, rows = x.pos + at, slice(at, at + n)
        qg = wide(x.qg[rows].reshape(n, -1), 8)
        kk, v = wide(x.k[rows], 4), wide(x.v[rows], 4)
        step = (256, keys.shape[1] * 256) if by_head else (kv * 256, 256)
        args = np.array([n, pos, qg.shape[1], kk.shape[1], *step], np.uint32)
        query = np.zeros((kv, n, 8, 256) if k.tensor else (n, kv, 256, 8), np.uint16)
        out = np.full((n, heads, 256), NAN_BF16, np.uint16)
        reports["prep"] = k.run(
            "prefill_attn_prep", (n, kv),
            {"ARGS": args, "QG": qg, "K": kk, "V": v, "Q_NORM": x.q_norm, "K_NORM": x.k_norm,
             "INV_FREQ": x.inv_freq, "QUERY": query, "KEYS": keys, "VALUES": values},
        )  # fmt: skip
        # Exactly the rows that exist by now: one more is out of bounds.
        seen = (keys, values) if by_head else (keys[: pos + n].copy(), values[: pos + n].copy())
        common = {"ARGS": args, "QUERY": query, "KEYS": seen[0], "VALUES": seen[1]}
        if split:
            spans = header("prefill_attn_spans", n, pos)
            total = np.full((spans, n, heads, 256), np.nan, np.float32)
            stats = np.full((spans, n, heads, 2), np.nan, np.float32)
            reports["split"] = k.run(
                "prefill_attn_split", (n, pos, kv),
                {**common, "TOTAL": total, "STATS": stats}, "prefill_attn",
            )  # fmt: skip
            reports["merge"] = k.run(
                "prefill_attn_merge", (n, kv),
                {"ARGS": args, "TOTAL": total, "STATS": stats, "QG": qg, "OUT": out},
                "prefill_attn",
            )  # fmt: skip
        else:
            total = np.full((n, heads, 256), np.nan, np.float32)
            reports["attn"] = k.run(
                "prefill_attn", (n, kv),
                {**common, "QG": qg, "OUT": out, "TOTAL": total},
            )  # fmt: skip
        parts.append((query.transpose(1, 0, 3, 2) if k.tensor else query, out))
        at += n
    query, out = (np.concatenate(p) for p in zip(*parts))
    return AttnOutput(query, keys.transpose(order), values.transpose(order), out, reports)


def prep_reference(k: Kernels, x: AttnInput) -> tuple[np.ndarray, np.ndarray]:
    """Queries [tokens][q_heads][256] and keys [tokens][kv_heads][256] after norm and RoPE. The
    angle is a float32 product, as the model was trained; the rest is float64."""

    def turned(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.float64)
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * weight
        position = np.arange(x.pos, x.pos + rows.shape[0]).astype(np.float32)
        angle = (position[:, None] * x.inv_freq).astype(np.float64)[:, None, :]
        a, b = rows[..., :32].copy(), rows[..., 32:64].copy()
        rows[..., :32] = a * np.cos(angle) - b * np.sin(angle)
        rows[..., 32:64] = b * np.cos(angle) + a * np.sin(angle)
        return rows

    kv = k.s["KV_HEADS"]
    return turned(x.qg[:, :, 0], x.q_norm), turned(x.k.reshape(-1, kv, 256), x.k_norm)


def attn_reference(
    k: Kernels, x: AttnInput, got: AttnOutput
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention over the rounded queries, keys and values that the kernel was given, float64; and
    how far rounded weights take it from there, at most and in the mean, in units of that rounding:
    w' = w (1 + e), each |e| <= u, gives sum w' v / sum w' - o = sum w e (v - o) / sum w'."""
    tokens, heads = x.qg.shape[:2]
    query = from_bf16(got.query).astype(np.float64)  # [tokens][kv][256][8], already / 16
    keys = from_bf16(got.keys).astype(np.float64)
    values = from_bf16(got.values).astype(np.float64)
    out, most, mean = np.zeros((3, tokens, heads, 256))
    for h in range(heads):
        kv = h // 8
        scores = query[:, kv, :, h % 8] @ keys[:, kv].T
        position = np.arange(keys.shape[0])
        scores[position[None, :] > x.pos + np.arange(tokens)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[:, h] = weights @ values[:, kv]
        for t in range(tokens if k.tensor else 0):
            away = np.abs(values[:, kv] - out[t, h])
            most[t, h], mean[t, h] = weights[t] @ away, np.sqrt(weights[t] ** 2 @ away**2)
    gate = sigmoid(x.qg[:, :, 1].astype(np.float64))
    return out * gate, most * gate, mean * gate

"""The mixers of a prompt chunk: DeltaNet and full attention, against numpy and against the
reference backend's own functions; cut anywhere, to the bit; with faults put in."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import attention_counts as counts
import numpy as np
import prefill_mix as mix
import pytest
from emulator import Library, front_end
from library_text import ROOT, library_text, shape
from prefill_mix import AttnInput, AttnOutput, GdnInput, GdnOutput, Kernels, from_bf16

FILES = ("prefill_gdn_conv", "prefill_gdn_scan", "prefill_gdn_norm", "prefill_attn_prep",
         "prefill_attn")  # fmt: skip
SHAPES = ("mini", "real")
BF16 = 2.0**-8  # of a value: half a unit of its eighth bit
SPAN, BLOCK = mix.E["PREFILL_ATTN_SPAN"], mix.E["PREFILL_ATTN_BLOCK"]


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference against the largest value; NaN counts as infinite."""
    error = np.abs(got - want).max() / np.abs(want).max()
    return float(error) if np.isfinite(error) else float("inf")


def bf16_error(
    got: np.ndarray, want: np.ndarray, more: np.ndarray | float = 0.0
) -> float:
    """Difference of bf16 bits from exact values, in units of what rounding permits, and `more`."""
    allowed = BF16 * (np.abs(want) + more) + more + 2e-6 * np.abs(want).max() + 1e-30
    error = np.abs(from_bf16(got) - want)
    return float((error / allowed).max()) if np.isfinite(error).all() else float("inf")


def gdn_errors(k: Kernels, x: GdnInput, got: GdnOutput) -> dict[str, float]:
    """Each output's error against what it may be: 1 is the limit."""
    want = mix.gdn_reference(k, x)
    errors = {
        name: relative(getattr(got, name), getattr(want, name)) / 2e-6
        for name in ("channels", "gates", "delta", "state")
    }
    # The norm magnifies what cancellation left of a small result.
    z = x.z.astype(np.float64)
    o = got.delta.astype(np.float64).reshape(*z.shape[:1], -1, 128)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-6) * x.weight
    errors["normed"] = bf16_error(got.normed, o.reshape(z.shape) * z * mix.sigmoid(z))
    errors["history"] = 0.0 if np.array_equal(got.history, want.history) else float("inf")
    return errors


def attn_errors(k: Kernels, x: AttnInput, got: AttnOutput) -> dict[str, float]:
    query, key = mix.prep_reference(k, x)
    want, most, mean = mix.attn_reference(k, x, got)
    tokens = x.qg.shape[0]
    got_query = got.query.transpose(0, 1, 3, 2).reshape(query.shape)
    values = mix.to_bf16(x.v).reshape(tokens, -1, 256)
    untouched = all(
        np.array_equal(a[: x.pos], b[: x.pos])
        for a, b in ((got.keys, x.keys), (got.values, x.values))
    )
    return {
        "query": bf16_error(got_query, query / 16),
        "key": bf16_error(got.keys[x.pos :], key),
        "value": 0.0 if np.array_equal(got.values[x.pos :], values) else float("inf"),
        "cache": 0.0 if untouched else float("inf"),
        "out": bf16_error(got.out, want, most * BF16 / (1 - BF16)),
        # Errors spread evenly up to their limits have a third of the square in the mean; limits are
        # 2^-8 of a value at most, and 0.74 of that in the root of the mean square: 0.8 is allowed.
        "mean": float(np.sqrt(((from_bf16(got.out) - want) ** 2).sum() * 3
                              / (want**2 + mean**2).sum()) / BF16 / 0.8),
    }  # fmt: skip


def assert_right(k: Kernels, errors: dict[str, float]) -> None:
    assert k.faults == []
    assert {name: e for name, e in errors.items() if not e <= 1} == {}


@cache
def kernels(
    shape_name: str, checked: bool = False, contract: bool = False, tensor: bool = False
) -> Kernels:
    return Kernels(shape_name, checked, contract, tensor=tensor)


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("file", FILES)
def test_address_spaces(file: str, shape_name: str) -> None:
    front_end.check_address_spaces(library_text(file + ".metal", shape_name))


# ---- Gated DeltaNet


@pytest.mark.parametrize("n", [1, 2, 3, 4, 15, 16, 17, 70])
@pytest.mark.parametrize("shape_name", SHAPES)
def test_deltanet(shape_name: str, n: int) -> None:
    k = kernels(shape_name)
    x = mix.gdn_input(k, n, seed=n)
    assert_right(k, gdn_errors(k, x, mix.gdn_run(k, x, [n])))


@pytest.mark.parametrize("shape_name,n", [("mini", 1), ("mini", 2), ("mini", 33), ("real", 9)])
def test_deltanet_checked(shape_name: str, n: int) -> None:
    k = kernels(shape_name, checked=True)
    x = mix.gdn_input(k, n, seed=n)
    for k.seed in range(3 if shape_name == "mini" else 1):
        assert_right(k, gdn_errors(k, x, mix.gdn_run(k, x, [n])))


def test_deltanet_long() -> None:
    """Rounding does not grow with the text: the state forgets its errors as it forgets the rest."""
    k = kernels("mini")
    x = mix.gdn_input(k, 2100)
    assert_right(k, gdn_errors(k, x, mix.gdn_run(k, x, [2100])))


@pytest.mark.parametrize("shape_name,tokens", [("mini", 83), ("real", 30)])
def test_deltanet_cut(shape_name: str, tokens: int) -> None:
    k = kernels(shape_name)
    x = mix.gdn_input(k, tokens)
    whole = mix.gdn_run(k, x, [tokens])
    for first in ([1], [2, 1], [3, 16], [7, 1, 8], [1] * 9):
        cut = mix.gdn_run(k, x, [*first, tokens - sum(first)])
        for name, value in vars(whole).items():
            assert np.array_equal(getattr(cut, name), value), f"{name} after {first}"


def test_delta_rule_of_ref() -> None:
    """The scan against ref_delta_rule, fed with the kernel's own channels and gates."""
    k = kernels("mini")
    n, heads = 12, k.s["GDN_V_HEADS"]
    x = mix.gdn_input(k, n)
    got = mix.gdn_run(k, x, [n])
    state = np.ascontiguousarray(x.state.transpose(0, 2, 1))  # ref's is [key][value]
    q, key, v = np.split(got.channels, [k.s["GDN_K_HEADS"] * 128, k.s["GDN_K_HEADS"] * 256], 1)
    pointer, number = ctypes.c_void_p, ctypes.c_float
    for t in range(n):
        for h in range(heads):
            rows = [np.ascontiguousarray(r[t].reshape(-1, 128)[i])
                    for r, i in ((q, h // 2), (key, h // 2), (v, h))]  # fmt: skip
            out = np.zeros(128, np.float32)
            mix.ref().ref_delta_rule(
                pointer(state[h].ctypes.data), *(pointer(r.ctypes.data) for r in rows),
                number(got.gates[t, 0, h]), number(got.gates[t, 1, h]), pointer(out.ctypes.data),
                128,
            )  # fmt: skip
            assert relative(got.delta[t].reshape(-1, 128)[h], out) < 2e-6
    assert relative(got.state, state.transpose(0, 2, 1)) < 2e-6


def test_weak_gates() -> None:
    """softplus far below 0, where 1 + e^x rounds to 1: the decay's distance from 1 survives."""
    k = kernels("mini")
    x = mix.gdn_input(k, 64)
    x.a[:] = np.linspace(-30, 30, x.a.size).reshape(x.a.shape)
    x.a_log[:], x.dt_bias[:] = np.log(16), 0
    got, want = mix.gdn_run(k, x, [64]).gates[:, 1], mix.gdn_reference(k, x).gates[:, 1]
    assert k.faults == [] and np.abs(got - want).max() < 1.3e-7


# ---- full attention, in both forms

FORMS = pytest.mark.parametrize("tensor", [False, True], ids=["matrix", "tensor"])


@FORMS
@pytest.mark.parametrize("pos,n", [(0, 1), (0, 8), (0, 65), (1, 3), (63, 2), (64, 9), (700, 17)])
@pytest.mark.parametrize("shape_name", SHAPES)
def test_attention(shape_name: str, pos: int, n: int, tensor: bool) -> None:
    k = kernels(shape_name, tensor=tensor)
    x = mix.attn_input(k, pos, n, seed=pos + n)
    for k.seed in (0, 1):
        assert_right(k, attn_errors(k, x, mix.attn_run(k, x, [n])))


@FORMS
@pytest.mark.parametrize("shape_name,pos,n", [("mini", 0, 1), ("mini", 60, 11), ("real", 70, 9)])
def test_attention_checked(shape_name: str, pos: int, n: int, tensor: bool) -> None:
    k = kernels(shape_name, checked=True, tensor=tensor)
    x = mix.attn_input(k, pos, n)
    for k.seed in range(3 if shape_name == "mini" else 1):
        assert_right(k, attn_errors(k, x, mix.attn_run(k, x, [n])))


@FORMS
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_attention_spans_checked(split: bool, tensor: bool) -> None:
    """A tile whose tokens lie on both sides of a span's end."""
    k = kernels("mini", checked=True, tensor=tensor)
    x = mix.attn_input(k, SPAN - 2, 5)
    for k.seed in range(2):
        assert_right(k, attn_errors(k, x, mix.attn_run(k, x, [5], split)))


@FORMS
@pytest.mark.parametrize("shape_name,pos", [("mini", 3 * SPAN - 7), ("real", 2 * SPAN - 3)])
def test_attention_deep(shape_name: str, pos: int, tensor: bool) -> None:
    """Several spans: right, and the same bits whole and split."""
    k = kernels(shape_name, tensor=tensor)
    x = mix.attn_input(k, pos, 11)
    whole, split = (mix.attn_run(k, x, [11], s) for s in (False, True))
    assert_right(k, attn_errors(k, x, whole))
    assert np.array_equal(whole.out, split.out)


@FORMS
@pytest.mark.parametrize("shape_name,pos,tokens", [("mini", 0, 150), ("mini", SPAN - 12, 34),
                                                   ("real", 40, 40)])  # fmt: skip
def test_attention_cut(shape_name: str, pos: int, tokens: int, tensor: bool) -> None:
    k = kernels(shape_name, tensor=tensor)
    x = mix.attn_input(k, pos, tokens)
    whole = mix.attn_run(k, x, [tokens])
    for i, first in enumerate(([1], [3, 8], [24, 1, 7], [1] * 6)):
        cut = mix.attn_run(k, x, [*first, tokens - sum(first)], split=i % 2 == 1)
        for name in ("query", "keys", "values", "out"):
            assert np.array_equal(getattr(cut, name), getattr(whole, name)), f"{name} after {first}"


@FORMS
def test_cache_by_head(tensor: bool) -> None:
    """The cache's strides are arguments: one head after another gives the same bits."""
    k = kernels("real", tensor=tensor)
    x = mix.attn_input(k, 70, 13)
    usual, other = (mix.attn_run(k, x, [5, 8], by_head=b) for b in (False, True))
    assert k.faults == []
    for name in ("keys", "values", "out"):
        assert np.array_equal(getattr(usual, name), getattr(other, name))


def test_large_scores() -> None:
    """Scores of some hundreds, far apart: no overflow, and the largest wins wherever it stands."""
    k = kernels("mini")
    x = mix.attn_input(k, 130, 9)
    x.q_norm[:] *= 40
    got = mix.attn_run(k, x, [9])
    assert_right(k, attn_errors(k, x, got))


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_angles(checked: bool) -> None:
    """RoPE's directions at every kind of position against the reference's cosf and sinf."""
    tail = (
        "\nkernel void directions(device const float *a [[buffer(0)]],"
        " device float2 *o [[buffer(1)]], uint i [[thread_position_in_grid]]) {"
        " o[i] = rope_direction(a[i]); }\n"
    )
    near = np.arange(0, 300)
    far = np.arange(262_143 - 300, 262_144)
    between = np.random.default_rng(4).integers(0, 262_144, 600)
    positions = np.unique(np.concatenate([near, far, between]))
    frequencies = np.zeros(32, np.float32)
    want = np.zeros((positions.size, 2, 32), np.float32)
    pointer = ctypes.c_void_p
    for i, position in enumerate(positions):
        frequencies[:] = mix.inv_freq()
        mix.ref().ref_rope_angles(pointer(frequencies.ctypes.data), int(position), 32,
                                  pointer(want[i, 0].ctypes.data),
                                  pointer(want[i, 1].ctypes.data))  # fmt: skip
    angles = positions.astype(np.float32)[:, None] * frequencies
    got = np.zeros((angles.size, 2), np.float32)
    library = Library(library_text("prefill_attn_prep.metal", "mini") + tail, checked)
    report = library.run("directions", (angles.size,), (256,), {0: angles.ravel().copy(), 1: got})
    assert report.faults == []
    assert np.abs(got.reshape(-1, 32, 2) - want.transpose(0, 2, 1)).max() < 1.3e-7


def test_last_position() -> None:
    """A key at 262,143: the cache's last row of the largest context, turned as the reference does.
    The binding begins near it, so that no cache of that size is needed."""
    k = kernels("mini")
    pos = k.s["MAX_CONTEXT"] - 1
    x = mix.attn_input(k, 0, 1)
    row = 256 * k.s["KV_HEADS"]
    keys = np.full(row, mix.NAN_BF16, np.uint16)
    args = np.array([1, pos, x.qg.size, row, 0, 256], np.uint32)  # every position at the same row
    query, values = np.zeros((1, 1, 256, 8), np.uint16), keys.copy()
    k.run("prefill_attn_prep", (1, 1),
          {"ARGS": args, "QG": x.qg, "K": x.k, "V": x.v, "Q_NORM": x.q_norm, "K_NORM": x.k_norm,
           "INV_FREQ": x.inv_freq, "QUERY": query, "KEYS": keys, "VALUES": values})  # fmt: skip
    head, angles = np.zeros(256, np.float32), np.zeros((2, 32), np.float32)
    pointer, lib = ctypes.c_void_p, mix.ref()
    lib.ref_rms_norm(pointer(x.k.ctypes.data), pointer(x.k_norm.ctypes.data),
                     pointer(head.ctypes.data), 256, ctypes.c_float(1e-6))  # fmt: skip
    lib.ref_rope_angles(pointer(x.inv_freq.ctypes.data), pos, 32, pointer(angles.ctypes.data),
                        pointer(angles[1:].ctypes.data))  # fmt: skip
    lib.ref_rope(pointer(head.ctypes.data), pointer(angles.ctypes.data),
                 pointer(angles[1:].ctypes.data), 32)  # fmt: skip
    assert k.faults == [] and bf16_error(keys, head) <= 1


def test_when_to_split() -> None:
    rows = 2048
    assert not mix.header("prefill_attn_splits", 1, SPAN - 1, rows)  # one span
    assert mix.header("prefill_attn_splits", 1, SPAN, rows)
    assert mix.header("prefill_attn_splits", 16, 262_128, rows)  # 128 spans of 16
    assert not mix.header("prefill_attn_splits", 17, 262_127, rows)
    assert not mix.header("prefill_attn_splits", 2048, 8192, rows)


# ---- both


@pytest.mark.parametrize("shape_name", SHAPES)
def test_contraction(shape_name: str) -> None:
    """With a * b + c fused where the compiler likes: still right, and still one result."""
    k = kernels(shape_name, contract=True)
    x = mix.gdn_input(k, 20)
    got = mix.gdn_run(k, x, [20])
    assert_right(k, gdn_errors(k, x, got))
    assert np.array_equal(mix.gdn_run(k, x, [7, 13]).state, got.state)
    y = mix.attn_input(k, SPAN - 4, 9)
    whole = mix.attn_run(k, y, [9])
    assert_right(k, attn_errors(k, y, whole))
    assert np.array_equal(mix.attn_run(k, y, [2, 7], split=True).out, whole.out)


def test_bytes_touched() -> None:
    """What the header tells the host to record is what the kernels do."""
    k = kernels("real", checked=True)
    k.seed, pos, n = 1, 66, 3
    x = mix.attn_input(k, pos, n)
    got = mix.attn_run(k, x, [n])
    prep, attn = got.reports["prep"].usage, got.reports["attn"].usage
    row = 2 * 512
    e = mix.E
    for name in ("KEYS", "VALUES"):
        new = prep[e[f"PREFILL_ATTN_PREP_{name}"]]
        assert new.written == [(pos * row, (pos + n) * row)] and new.read == []
        assert attn[e[f"PREFILL_ATTN_{name}"]].read == [(0, (pos + n) * row)]
        # One tile: every row once for each kv head, whatever its query rows.
        assert attn[e[f"PREFILL_ATTN_{name}"]].bytes_read == (pos + n) * row
    assert prep[e["PREFILL_ATTN_PREP_QUERY"]].written == [(0, n * 16 * 512)]
    assert attn[e["PREFILL_ATTN_OUT"]].written == [(0, n * 16 * 512)]
    assert attn[e["PREFILL_ATTN_TOTAL"]].written == attn[e["PREFILL_ATTN_TOTAL"]].read == []
    stride = 4 * (16 * 512 + 8)
    halves = [[(t * stride + h * 2048 + at, t * stride + h * 2048 + at + 1024)
               for t in range(n) for h in range(16)] for at in (0, 1024)]  # fmt: skip
    assert prep[e["PREFILL_ATTN_PREP_QG"]].read == halves[0]
    assert attn[e["PREFILL_ATTN_QG"]].read == halves[1]


@pytest.mark.parametrize("shape_name,pos,n", [("real", 66, 11), ("mini", SPAN - 2, 5)])
def test_counted(shape_name: str, pos: int, n: int) -> None:
    """Products, exchanges and bytes of the documented count are those that are carried out."""
    k = kernels(shape_name, checked=True)
    k.seed, x = 1, mix.attn_input(k, pos, n)
    report = mix.attn_run(k, x, [n]).reports["attn"]
    assert k.faults == []
    c = counts.chunk(n, pos, k.s["KV_HEADS"])
    use = {name: report.usage[mix.E[f"PREFILL_ATTN_{name}"]]
           for name in ("KEYS", "VALUES", "QUERY", "TOTAL")}  # fmt: skip
    assert report.simd_operations == c.products + c.exchanges
    assert use["KEYS"].bytes_read == use["VALUES"].bytes_read == c.kv / 2
    assert use["QUERY"].bytes_read == c.query
    assert use["TOTAL"].bytes_read == use["TOTAL"].bytes_written == c.totals / 2


def test_document_tells_the_counts() -> None:
    text = (ROOT / "docs/metal-attention.md").read_text(encoding="utf-8")
    heads = shape("real")["KV_HEADS"]
    for table in (counts.prompt_table, counts.speed_table, counts.split_table):
        assert table(heads) in text


# ---- faults


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    kind: str  # of the checked build, or WRONG: the numbers show it


def _barrier(mark: str) -> str:
    return f"threadgroup_barrier(mem_flags::mem_threadgroup); /* {mark} */"


FAULTS = [
    Fault("conv: every block writes the history", "prefill_gdn_conv",
          "if (last == args.rows) { /* LAST TOKENS */", "{", "RACE"),
    Fault("conv: last chunk rows unguarded", "prefill_gdn_conv",
          "min(first + PREFILL_GDN_CONV_TOKENS, args.rows)", "first + PREFILL_GDN_CONV_TOKENS",
          "OUT_OF_BOUNDS"),
    Fault("conv: history one row late", "prefill_gdn_conv", "u.history[(uint)(t + 3) * GDN_ROW]",
          "u.history[(uint)(t + 3) % 3 * GDN_ROW + GDN_ROW - GDN_ROW * (uint)(t == -1)]", "WRONG OUT_OF_BOUNDS"),
    Fault("conv: taps in the wrong order", "prefill_gdn_conv", "by_time[j][i] = w[j]",
          "by_time[3 - j][i] = w[j]", "WRONG"),
    Fault("conv: gates of a head too many", "prefill_gdn_conv",
          "if (head >= SHAPE_GDN_V_HEADS) return;", "if (head > SHAPE_GDN_V_HEADS) return;",
          "OUT_OF_BOUNDS RACE"),
    Fault("scan: staged without a barrier", "prefill_gdn_scan", _barrier("STAGED"), "", "RACE"),
    Fault("scan: restaged without a barrier", "prefill_gdn_scan", _barrier("USED"), "", "RACE"),
    Fault("scan: every lane writes", "prefill_gdn_scan", "if (part == 0) ((", "((", "RACE"),
    Fault("scan: key head of the tiled order", "prefill_gdn_scan", "head / GDN_VALUES_PER_KEY * GDN_HEAD4",
          "head % SHAPE_GDN_K_HEADS * GDN_HEAD4", "WRONG"),
    Fault("scan: output before the update", "prefill_gdn_scan", "out0 = fma(s0[i], query, out0);",
          "out0 = fma(s0[i] - key[i] * d.x, query, out0);", "WRONG"),
    Fault("scan: decay after the recall", "prefill_gdn_scan",
          "recall0 = fma(s0[i], key[i], recall0);",
          "recall0 = fma(s0[i] / decay, key[i], recall0);", "WRONG"),
    Fault("norm: grid unguarded", "prefill_gdn_norm",
          "if (pair >= args.rows * SHAPE_GDN_V_HEADS) return;", "", "OUT_OF_BOUNDS"),
    Fault("norm: gate before the norm", "prefill_gdn_norm", "simd_sum(dot(o, o))",
          "simd_sum(dot(o * silu(gate), o * silu(gate)))", "WRONG"),
    Fault("prep: read before it is whole", "prefill_attn_prep", _barrier("TRANSPOSED"), "",
          "RACE"),
    Fault("prep: neighbours paired", "prefill_attn_prep", "const float b = x[1];",
          "const float b = simd_shuffle_xor(x[0], 1);", "WRONG"),
    Fault("prep: one position late", "prefill_attn_prep", "(float)row * inv_freq[lane]",
          "(float)(row + 1) * inv_freq[lane]", "WRONG"),
    Fault("prep: value heads in key rows", "prefill_attn_prep", "(is_key ? keys : values)[cache",
          "(is_key ? values : keys)[cache", "WRONG"),
    Fault("attention: first piece without a barrier", "prefill_attn", _barrier("FIRST PIECE"), "",
          "RACE"),
    Fault("attention: no barrier between pieces", "prefill_attn", _barrier("NEXT PIECE"), "",
          "RACE"),
    Fault("attention: one buffer for two pieces", "prefill_attn",
          "attn_put(pieces + next % 2 * ATTN_PIECE, fetched",
          "attn_put(pieces + part % 2 * ATTN_PIECE, fetched",
          "RACE UNINITIALISED"),
    Fault("attention: a row beyond the end", "prefill_attn", "if (position < cache.end) { /* GUARD */",
          "if (position <= cache.end) {", "OUT_OF_BOUNDS"),
    Fault("attention: absent tokens leave early", "prefill_attn", "    attn_rows rows;\n",
          "    if (!active) return;\n    attn_rows rows;\n", "BARRIER"),
    Fault("attention: sees the next token", "prefill_attn", "const float a = at <= position ?",
          "const float a = at <= position + 1 ?", "WRONG"),
    Fault("attention: does not see itself", "prefill_attn",
          "const float b = at + 1 <= position ?", "const float b = at + 1 < position ?", "WRONG"),
    Fault("attention: old sum kept too large", "prefill_attn", "r.sum = fma(r.sum, keep, sum);",
          "r.sum = r.sum + sum;", "WRONG"),
    Fault("attention: padding forgotten by the reader", "prefill_attn",
          "piece + p.row * (ATTN_KEY_ROW * 4)", "piece + p.row * (ATTN_KEY_ROW * 4 - 4)",
          "WRONG UNINITIALISED"),
    Fault("attention: keys and values exchanged", "prefill_attn",
          "(key ? cache.keys : cache.values)", "(key ? cache.values : cache.keys)", "WRONG"),
    Fault("attention: gate of the query's half", "prefill_attn",
          "to.gate[(p.row * 2 * ATTN_DIM + ATTN_DIM + c * 8",
          "to.gate[(p.row * 2 * ATTN_DIM + c * 8", "WRONG"),
]  # fmt: skip


def found(k: Kernels, errors: dict[str, float]) -> set[str]:
    return k.kinds | ({"WRONG"} if any(not e <= 1 for e in errors.values()) else set())


def assert_found(k: Kernels, fault: Fault, *cases: tuple[int, int]) -> None:
    """In one of the cases (position, tokens) of attention, or in the first one with scores that
    grow so that sums are rescaled."""
    for i, (pos, n) in enumerate((*cases, cases[0])):
        x = mix.attn_input(k, pos, n)
        x.q_norm[:] *= 6 if i == len(cases) else 1
        errors = attn_errors(k, x, mix.attn_run(k, x, [n]))
        if set(fault.kind.split()) & found(k, errors):
            return
    pytest.fail(f"{k.faults[:3]} {errors}")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_found(fault: Fault) -> None:
    k = Kernels("mini", checked=True, patch=(fault.file, fault.old, fault.new), seed=2)
    if "gdn" in fault.file:
        x = mix.gdn_input(k, 21)
        errors = gdn_errors(k, x, mix.gdn_run(k, x, [21]))
        assert set(fault.kind.split()) & found(k, errors), f"{k.faults[:3]} {errors}"
    else:
        assert_found(k, fault, (126, 5))


JOINS = [
    Fault("join: first span not scaled", "prefill_attn", "return fma(before, j.keep, span * j.add);",
          "return fma(before, 1.0f, span * j.add);", "WRONG"),
    Fault("join: a span forgotten", "prefill_attn", "o = float2(attn_joined(j, before.x, o.x),",
          "o = float2(o.x,", "WRONG"),
    Fault("join: records of another token", "prefill_attn",
          "const uint from = span * args.rows * SHAPE_Q_HEADS + at;",
          "const uint from = span * SHAPE_Q_HEADS + at;", "WRONG UNEQUAL"),
]  # fmt: skip


@pytest.mark.parametrize("fault", JOINS, ids=lambda f: f.name)
def test_joins_found(fault: Fault) -> None:
    k = Kernels("mini", patch=(fault.file, fault.old, fault.new))
    x = mix.attn_input(k, SPAN - 2, 5)
    whole, split = (mix.attn_run(k, x, [5], s) for s in (False, True))
    found = set() if np.array_equal(whole.out, split.out) else {"UNEQUAL"}
    if any(not e <= 1 for e in attn_errors(k, x, whole).values()):
        found.add("WRONG")
    assert set(fault.kind.split()) & found

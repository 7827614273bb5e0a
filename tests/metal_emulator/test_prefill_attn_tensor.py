"""Attention of a prompt by tensor operations, beside the cases of test_prefill_mix.py: scores of all
kinds, and faults put in. What weights of bf16 must cost is allowed beside the limits of the other
form: at most 2^-8 of each weight, so of an output at most 2^-8 of the mean distance of the values
from it."""

from __future__ import annotations

from functools import partial

import attention_counts as counts
import numpy as np
import prefill_mix as mix
import pytest
from emulator import front_end
from library_text import library_text
from prefill_mix import Kernels
from test_prefill_mix import BLOCK, SPAN, Fault, assert_found, assert_right, attn_errors
from test_prefill_mix import kernels as all_kernels

FILE = "prefill_attn_tensor"
SHAPES = ("mini", "real")
kernels = partial(all_kernels, tensor=True)


@pytest.mark.parametrize("shape_name", SHAPES)
def test_address_spaces(shape_name: str) -> None:
    front_end.check_address_spaces(library_text(FILE + ".metal", shape_name))


@pytest.mark.parametrize("scale", [0.01, 40])
def test_other_scores(scale: float) -> None:
    """Nearly equal ones, and some hundreds far apart: no overflow, the largest wins anywhere."""
    k = kernels("mini")
    x = mix.attn_input(k, 130, 9)
    x.q_norm[:] *= scale
    assert_right(k, attn_errors(k, x, mix.attn_run(k, x, [9])))


@pytest.mark.parametrize("tensor", [False, True], ids=["matrix", "tensor"])
@pytest.mark.parametrize("slope", [2.0, 7.9, 8.1, 40.0, -40.0])
def test_growing_scores(slope: float, tensor: bool) -> None:
    """Scores that grow by so much a block: sums are rescaled in each block, in some, or never."""
    k = Kernels("mini", tensor=tensor)
    pos, n = 8 * BLOCK, 9
    x = mix.attn_input(k, pos, n)
    x.qg[:, :, 0] = np.sign(x.qg[:, :, 0])
    x.qg[:, :, 0, 64:] = 1.0  # not turned by a position
    x.q_norm[:] = np.arange(256) >= 64
    level = slope * (np.arange(pos) // BLOCK) * 16 / 192
    x.keys[:pos, 0] = mix.to_bf16(np.where(np.arange(256) >= 64, level[:, None], 0))
    assert_right(k, attn_errors(k, x, mix.attn_run(k, x, [n])))


def test_not_a_number_is_seen() -> None:
    """A damaged key reaches the result of every token that sees it, and no other."""
    k = kernels("mini")
    x = mix.attn_input(k, 70, 3)
    x.keys[68, 0, 5] = 0x7FC0
    x.k[1, 7] = np.nan
    out = mix.from_bf16(mix.attn_run(k, x, [3]).out)
    assert np.isnan(out).all()
    y = mix.attn_input(k, 70, 3)
    y.k[1, 7] = np.nan
    out = mix.from_bf16(mix.attn_run(k, y, [3]).out)
    assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all()


def test_counted() -> None:
    """Barriers, exchanges and bytes of the documented count are those that are carried out. The
    emulator has two threads read each row of an operand, as any thread may."""
    for shape_name, pos, n in (("real", 66, 11), ("mini", SPAN - 2, 5)):
        k = kernels(shape_name, checked=True)
        k.seed, x = 1, mix.attn_input(k, pos, n)
        report = mix.attn_run(k, x, [n]).reports["attn"]
        assert k.faults == []
        c = counts.tensor_chunk(n, pos, k.s["KV_HEADS"])
        use = {name: report.usage[mix.E[f"PREFILL_ATTN_{name}"]]
               for name in ("KEYS", "VALUES", "QUERY", "TOTAL")}  # fmt: skip
        assert report.simd_operations == c.exchanges
        assert report.group_barriers == c.barriers
        assert report.tg_static == counts.TENSOR_MEMORY
        assert use["KEYS"].bytes_read == use["VALUES"].bytes_read == c.kv
        assert use["QUERY"].bytes_read == 2 * c.query
        assert use["TOTAL"].bytes_read == use["TOTAL"].bytes_written == c.totals / 2


def test_bytes_touched() -> None:
    """Those that the host records, and no others."""
    k = kernels("real", checked=True)
    k.seed, pos, n = 1, 66, 3
    got = mix.attn_run(k, mix.attn_input(k, pos, n), [n])
    prep, attn, row, e = got.reports["prep"].usage, got.reports["attn"].usage, 1024, mix.E
    assert prep[e["PREFILL_ATTN_PREP_QUERY"]].written == [(0, n * 16 * 512)]
    assert attn[e["PREFILL_ATTN_QUERY"]].read == [(0, n * 16 * 512)]
    for name in ("KEYS", "VALUES"):
        assert prep[e[f"PREFILL_ATTN_PREP_{name}"]].written == [(pos * row, (pos + n) * row)]
        assert attn[e[f"PREFILL_ATTN_{name}"]].read == [(0, (pos + n) * row)]
        assert attn[e[f"PREFILL_ATTN_{name}"]].written == []
    assert attn[e["PREFILL_ATTN_OUT"]].written == [(0, n * 16 * 512)]
    assert attn[e["PREFILL_ATTN_TOTAL"]].written == attn[e["PREFILL_ATTN_TOTAL"]].read == []


# ---- faults


def _barrier(mark: str) -> str:
    return f"threadgroup_barrier(mem_flags::mem_threadgroup); /* {mark} */"


FAULTS = [
    Fault("scores stored over weights in use", FILE, _barrier("WEIGHTS USED"), "", "RACE"),
    Fault("scores read before they are there", FILE, _barrier("SCORES STORED"), "", "RACE"),
    Fault("weights used before they are there", FILE, _barrier("WEIGHTS STORED"), "", "RACE"),
    Fault("weights over scores of other lanes", FILE,
          "simdgroup_barrier(mem_flags::mem_threadgroup); /* READ */", "", "RACE"),
    Fault("queries read before they are whole", FILE, _barrier("TRANSPOSED"), "", "RACE"),
    Fault("absent tokens leave early", FILE, "    attn_score score;\n",
          "    if (simdgroup >= t.tokens) return;\n    attn_score score;\n", "BARRIER"),
    Fault("rows of other tokens", FILE, "args.rows - first);", "(uint)ATTN_TOKENS);",
          "OUT_OF_BOUNDS RACE WRONG"),
    Fault("a row beyond the end of the cache", FILE, "(int)(t.end - at)", "(int)(t.end - at) + 1",
          "OUT_OF_BOUNDS"),
    Fault("keys of the next position", FILE, "const uint at = block * ATTN_BLOCK;\n    return",
          "const uint at = block * ATTN_BLOCK + 1;\n    return", "WRONG"),
    Fault("sees the next token", FILE, "at + 2 <= position", "at + 1 <= position", "WRONG"),
    Fault("does not see itself", FILE, "s[i].y = at + 1 <= position", "s[i].y = at + 1 < position",
          "WRONG"),
    Fault("weights with the stride of scores", FILE, "array<int32_t, 2>({1, 2 * ATTN_STAGE})",
          "array<int32_t, 2>({1, ATTN_STAGE})", "WRONG UNINITIALISED"),
    Fault("places that hold nothing are written", FILE,
          "if (!sums.is_valid_element(i)) continue; /* VALID */", "", "RACE WRONG"),
    Fault("row and column exchanged", FILE, "const uint row = (uint)at[1];",
          "const uint row = (uint)at[0] % ATTN_ROWS;", "RACE WRONG"),
    Fault("old sum kept too large", FILE, "r.sum = fma(r.sum, keep, sum);", "r.sum = r.sum + sum;",
          "WRONG"),
    Fault("sums not rescaled", FILE, "    attn_rescale(sums, m);\n", "", "WRONG"),
    Fault("only the first token's rows rescale", FILE, "any |= m.lifted[i];",
          "any |= m.lifted[0];", "WRONG"),
    Fault("factor of another row", FILE, "sums[i] *= m.keep[sums.get_multidimensional_index(i)[1]];",
          "sums[i] *= m.keep[sums.get_multidimensional_index(i)[1] ^ 8];", "WRONG"),
    Fault("sums begin with what was there", FILE, "i++) sums[i] = 0.0f;", "i++) sums[i] += 0.0f;",
          "WRONG"),
    Fault("queries in the other layout", FILE, "#define PREFILL_QUERIES_BY_HEAD", "", "WRONG"),
    Fault("keys transposed", FILE, "ATTN_DIM, false, true)", "ATTN_DIM, false, false)",
          "WRONG OUT_OF_BOUNDS"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_found(fault: Fault) -> None:
    k = Kernels("mini", checked=True, patch=(fault.file, fault.old, fault.new), seed=2, tensor=True)
    assert_found(k, fault, (126, 11), (0, 4))


JOINS = [
    Fault("total of earlier spans forgotten", FILE, "value = attn_joined(j, t.total[at], value);",
          "", "WRONG"),
    Fault("a span not begun anew", FILE, "    r.top = ATTN_NONE;\n", "", "WRONG UNEQUAL"),
    Fault("records of another token", FILE, "t.stats[simdgroup * SHAPE_Q_HEADS + head]",
          "t.stats[simdgroup * SHAPE_Q_HEADS + (head ^ 1)]", "UNEQUAL"),
    Fault("spans end a block late", FILE, "(block + 1) % ATTN_SPAN_BLOCKS == 0));",
          "block % ATTN_SPAN_BLOCKS == 0));", "WRONG UNEQUAL"),
]  # fmt: skip


@pytest.mark.parametrize("fault", JOINS, ids=lambda f: f.name)
def test_joins_found(fault: Fault) -> None:
    k = Kernels("mini", patch=(fault.file, fault.old, fault.new), tensor=True)
    x = mix.attn_input(k, SPAN - 2, 5)
    whole, split = (mix.attn_run(k, x, [5], s) for s in (False, True))
    found = set() if np.array_equal(whole.out, split.out) else {"UNEQUAL"}
    if any(not e <= 1 for e in attn_errors(k, x, whole).values()):
        found.add("WRONG")
    assert set(fault.kind.split()) & found

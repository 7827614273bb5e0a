"""The kernels of one decoded token against the model's formulas in numpy: at both shapes'
dimensions, in the checked build (races, bounds, uninitialised memory), in several orders of
execution."""

from __future__ import annotations

from collections.abc import Callable

import decode_cases as cases
import numpy as np
import pytest
from decode_kernels import Case, attn_layout, attn_max_blocks, groups, kernels, library
from emulator import Library, front_end
from library_text import library_text

SHAPES = ("mini", "real")
FILES = sorted({file for _, file, _ in kernels().values()})


def lib(case: Case, checked: bool = True, contract: bool = False) -> Library:
    return library(kernels()[case.kernel][1], case.shape, checked, contract)


def attn(position: int, rows: int, kernel: str = "decode_attn_short") -> Callable[[str], Case]:
    return lambda shape_name: cases.attn(shape_name, kernel, position, rows)


CASES: dict[str, Callable[[str], Case]] = {
    "embed": cases.embed,
    "embed, the slot's token": lambda s: cases.embed(s, 7, host=False),
    "embed, not counted": lambda s: cases.embed(s, 3, count=0),
    "gdn_in": cases.gdn_in,
    "gdn_delta": cases.gdn_delta,
    "gdn_out": cases.gdn_out,
    "attn_in": cases.attn_in,
    "attn, first token": attn(0, 64),
    "attn, two blocks": attn(101, 64),
    "attn, full blocks": attn(127, 64),
    "attn, large blocks": attn(300, 256),
    "attn_long": attn(700, 512, "decode_attn_long"),
    "attn_long, one row in the last": attn(512, 512, "decode_attn_long"),
    "attn_merge": cases.attn_merge,
    "attn_merge, more blocks than threads": lambda s: cases.attn_merge(s, 300),
    "attn_out": cases.attn_out,
    "attn_out, merged before": lambda s: cases.attn_out(s, 1),
    "router": cases.router,
    "experts_up": cases.experts_up,
    "experts_up, ties": lambda s: cases.experts_up(s, "ties"),
    "experts_up, all negative": lambda s: cases.experts_up(s, "negative"),
    "experts_down": cases.experts_down,
    "experts_down, ties": lambda s: cases.experts_down(s, "ties"),
}


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_formula(name: str, shape_name: str) -> None:
    case = CASES[name](shape_name)
    for seed in (0, 1, 2) if shape_name == "mini" else (1,):
        case.check(lib(case), seed)


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("contract", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("name", CASES)
def test_contraction_in_the_fast_build(name: str, contract: bool, shape_name: str) -> None:
    case = CASES[name](shape_name)
    case.check(lib(case, checked=False, contract=contract))


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("file", FILES)
def test_address_spaces(file: str, shape_name: str) -> None:
    front_end.check_address_spaces(library_text(file, shape_name))


# ---- what the cases above do not reach ---------------------------------------------------------


@pytest.mark.parametrize("position", [5, 255, 1500, 32767 + 600])
def test_attention_of_a_whole_context(position: int) -> None:
    """Blocks as the host lays them out, merged, against one softmax over all rows."""
    kernel, block_rows, blocks = attn_layout(position)
    case = cases.attn("mini", kernel, position, block_rows)
    report, after = case.run(lib(case, checked=False))
    assert report.faults == []
    want = cases.attn_whole("mini", case.buffers, after["KEYS"], after["VALUES"])
    merge = cases.attn_merge("mini", blocks)
    merge.buffers["PARTIAL"], merge.buffers["STATS"] = after["PARTIAL"], after["STATS"]
    _, merged = merge.run(lib(merge, checked=False))
    assert np.abs(merged["MERGED"] - want).max() <= 4e-6 * np.abs(want).max()


def test_token_without_a_row() -> None:
    """Whatever stands in the slot, no byte outside the embedding is read."""
    case = cases.embed("mini", 7, host=False, count=0)
    table = case.buffers["CODES"]
    rows = cases.dims("mini")["VOCAB"]
    whole = [np.resize(a, (rows, a.shape[1])) for a in table.arrays()]
    case.buffers["CODES"] = type(table)(*whole, 4)
    case.buffers["TOKEN"][0] = 0xFFFFFFFF
    case.check(lib(case))  # row 4095 is row 7 of eight, repeated


@pytest.mark.parametrize("name", ["experts_up", "experts_down"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_experts_of_logits_that_are_not_finite(name: str, bad: float) -> None:
    """The choice stays within the experts."""
    case = CASES[name]("mini")
    case.buffers["LOGITS"][:] = bad
    report, _ = case.run(lib(case))
    assert report.faults == []


# ---- bytes -----------------------------------------------------------------------------------

WEIGHTS = {
    "gdn_in": "QKV Z B A", "gdn_out": "PROJ", "attn_in": "Q K V", "attn_out": "PROJ",
    "router": "LOGITS_W SHARED_GATE GATE UP", "head": "PROJ",
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_read_once(name: str) -> None:
    """Every byte of every matrix, and none of them twice, at the real shape."""
    case = cases.head("real") if name == "head" else CASES[name]("real")
    report, _ = case.run(lib(case))
    for matrix in WEIGHTS[name].split():
        for i, array in enumerate(case.buffers[matrix].arrays()):
            usage = report.usage[case.index(matrix) + i]
            assert usage.read == [(0, array.nbytes)]
            # Two lanes share a scale and a bias (four of 8 bits), in one read of the simdgroup.
            sharing = 1 if i == 0 else 4 if case.buffers[matrix].bits == 8 else 2
            assert usage.bytes_read <= sharing * array.nbytes


VECTORS = {
    "gdn_in": "H NORM", "gdn_out": "GATED", "attn_in": "H NORM", "attn_out": "PARTIAL",
    "experts_up": "X", "experts_down": "INNER SHARED",
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_read_once_by_each_threadgroup(name: str) -> None:
    """What decode_args.h calls "per group"."""
    case = CASES[name]("real")
    report, _ = case.run(lib(case))
    for vector in VECTORS[name].split():
        nbytes = case.buffers[vector].nbytes
        assert report.usage[case.index(vector)].bytes_read == case.groups * nbytes


@pytest.mark.parametrize("name, matrices", [("experts_up", 2), ("experts_down", 1)])
def test_experts_are_read_once(name: str, matrices: int) -> None:
    """The eight chosen ones and no byte of the others; all arrays are one buffer here."""
    case = CASES[name]("real")
    report, _ = case.run(lib(case))
    usage = report.usage[case.index("UP" if name == "experts_up" else "DOWN")]
    codes = matrices * 8 * 512 * 2048 // 2
    assert sum(end - begin for begin, end in usage.read) == codes + codes // 8
    assert usage.bytes_read == codes + 2 * (codes // 8)  # two lanes share a scale and a bias


def test_kv_rows_are_read_once() -> None:
    """Eight heads share a row, and no byte of another is touched: 1 KB a row and KV head."""
    case = cases.attn("real", "decode_attn_long", 1023, 512)
    report, _ = case.run(lib(case))
    for name in ("KEYS", "VALUES"):
        usage = report.usage[case.index(name)]
        assert usage.read == [(0, 1024 * 2 * 512)] and usage.bytes_read == 1024 * 2 * 512
        assert usage.written == [(1023 * 2 * 512, 1024 * 2 * 512)]


def test_delta_moves_state_once() -> None:
    case = cases.gdn_delta("real")
    report, _ = case.run(lib(case))
    read, written = (report.usage[case.index(f"STATE_{n}")] for n in ("IN", "OUT"))
    assert read.bytes_read == written.bytes_written == 32 * 128 * 128 * 4
    assert read.read == written.written == [(0, 32 * 128 * 128 * 4)]


def test_attention_layout() -> None:
    """Blocks cover every row, short ones fit their memory, long ones lie on an absolute grid."""
    for position in [*range(0, 3000, 7), *range(3000, 262144, 997), 32766, 32767, 262143]:
        kernel, rows, blocks = attn_layout(position)
        assert rows % 16 == 0 and (blocks - 1) * rows < position + 1 <= blocks * rows
        assert blocks <= attn_max_blocks(position + 1)
        assert kernel == ("decode_attn_long" if position + 1 >= 32768 else "decode_attn_short")
        assert rows == 512 if kernel == "decode_attn_long" else 64 <= rows <= 256


def test_grids_fill_a_large_gpu() -> None:
    """Every kernel between the model's ends has threadgroups for 40 cores at the real shape."""
    for name in kernels():
        if name.startswith(("decode_gdn", "decode_router", "decode_experts", "decode_head")):
            assert groups(name, "real") >= 97, name


# ---- logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("penalties", [{}, {"repetition": 1.3, "frequency": 0.2, "presence": 0.7}],
                         ids=["plain", "penalties"])  # fmt: skip
def test_head(shape_name: str, penalties: dict[str, float]) -> None:
    case = cases.head(shape_name, **penalties)
    report, after = case.run(lib(case), 1)
    assert report.faults == [] and case.errors(after)["LOGITS"] <= 2e-6
    allowed = np.unpackbits(case.buffers["MASK"].view(np.uint8), bitorder="little").astype(bool)
    seen = cases.penalised(after["LOGITS"], case.buffers["COUNTS"], allowed, penalties)
    best = cases.ordered(seen).reshape(-1, 128).max(1)
    assert np.array_equal(case.buffers["BEST"], best)
    assert bool(report.usage[case.index("COUNTS")].read) == bool(penalties)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_head_tells_what_is_not_finite(bad: float) -> None:
    """A scale that is no number spoils one row, a padding row too, and its group says so."""
    case = cases.head("mini")
    matrix = case.buffers["PROJ"]
    matrix.scales[1000] = cases.to_bf16(np.array([bad], np.float32))
    matrix.codes[1000] = 0x11
    case.buffers["H"][:] = np.abs(case.buffers["H"])
    case.run(lib(case))
    assert [i for i, b in enumerate(case.buffers["BEST"]) if b == 0xFFFFFFFF] == [7]

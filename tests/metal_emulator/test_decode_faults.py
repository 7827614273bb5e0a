"""Faults put into the text of the decode kernels: the checked build names each, in every order of
execution, or, where only a number can tell ("VALUE"), the comparison with the formula does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import decode_cases as cases
import pytest
from decode_kernels import Case, kernels
from emulator import Library
from library_text import library_text
from test_decode_sample import SETTINGS, case_of, scene


def sample() -> Case:
    return case_of("mini", *scene("mini", 4, "ties"), {**SETTINGS[5], "stream": 5}, 3)


def attn_real() -> Case:
    return cases.attn("real", "decode_attn_short", 101, 64)


def attn_long() -> Case:
    return cases.attn("mini", "decode_attn_long", 700, 512)


def mini(make: Callable[..., Case], *more: object) -> Callable[[], Case]:
    return lambda: make("mini", *more)


@dataclass(frozen=True)
class Fault:
    name: str
    case: Callable[[], Case]
    old: str
    new: str
    kind: str  # one of these words, whatever the order of execution


TG = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD = "simdgroup_barrier(mem_flags::mem_threadgroup);"
BOTH = "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);"
FAULTS = [
    Fault("every thread counts", mini(cases.embed), "octet == 0 && args.count", "args.count",
          "RACE"),
    Fault("norm not awaited", mini(cases.gdn_in), f"{TG} /* STAGED */\n    float total",
          "float total", "RACE UNINITIALISED"),
    Fault("rows beyond the matrix", mini(cases.gdn_in), "mine < R && row < rows", "mine < R",
          "RACE OUT_OF_BOUNDS"),
    Fault("query and key not awaited", mini(cases.gdn_delta), f"{TG} /* QUERY_KEY */", "",
          "RACE UNINITIALISED"),
    Fault("every slice moves the history on", mini(cases.gdn_delta), "slice == 0 && head % 2 == 0",
          "true", "RACE"),
    Fault("column stride of the new state", mini(cases.gdn_delta),
          "state_out[place + i * (N / 4)]", "state_out[place + i * (N / 8)]", "RACE"),
    Fault("a head too far in the squares", mini(cases.gdn_out),
          "squares[octet / (SHAPE_GDN_HEAD_DIM / 8)]",
          "squares[octet / (SHAPE_GDN_HEAD_DIM / 8) + 1]", "OUT_OF_BOUNDS"),
    Fault("keys and values swapped", mini(cases.attn_in),
          "m = quantised_of(k, k_scales, k_biases)",
          "m = quantised_of(v, v_scales, v_biases)", "VALUE"),
    Fault("bindings of cache swapped", attn_real,
          "inv_freq, keys, values, partial, stats,      \\",
          "inv_freq, values, keys, partial, stats,      \\", "VALUE"),
    Fault("queries overwritten before they are taken", attn_real, f"{TG} /* TAKEN */", "", "RACE"),
    Fault("new KV row not awaited", attn_real, BOTH, TG, "RACE"),
    Fault("head stride in the cache", attn_real, "b.kv_head * (ATTN_DIM / 8) + b.lane",
          "b.kv_head * (ATTN_DIM / 4) + b.lane", "OUT_OF_BOUNDS"),
    Fault("head stride of the results", attn_real, "block * SHAPE_Q_HEADS + b.kv_head * ATTN_HEADS",
          "block * SHAPE_Q_HEADS + b.kv_head * 4", "RACE"),
    Fault("rows after the last", attn_real, "min(row, b.rows - 1)", "row", "OUT_OF_BOUNDS"),
    Fault("rows after the last have scores", attn_real,
          "if (mine >= b.rows) score = -INFINITY;", "", "VALUE"),
    Fault("sums gathered too early", attn_long, f"{TG} /* GATHERED */", "", "RACE"),
    Fault("memory of the scores not free", attn_long, f"{TG} /* FREE */", "", "RACE"),
    Fault("a thread leaves the merge", mini(cases.attn_merge), f"{TG} /* SUMS */",
          f"if (thread_index >= args.blocks) return; {TG}", "BARRIER"),
    Fault("logits beyond the last", mini(cases.router),
          "&& row <= SHAPE_EXPERTS) logits", ") logits", "OUT_OF_BOUNDS RACE"),
    Fault("ties to the higher id", mini(cases.experts_up, "ties"),
          "simd_min(best == largest ? id : (uint)SHAPE_EXPERTS - 1)",
          "simd_max(best == largest ? id : 0u)", "VALUE"),
    Fault("expert stride", mini(cases.experts_up), "chosen[rank] * args.expert_stride",
          "chosen[rank] * (args.expert_stride - 16)", "VALUE"),
    Fault("choice not awaited", mini(cases.experts_down),
          f"{TG} /* STAGED */\n\n    const uint first = group * DECODE_DOWN_ROWS",
          "const uint first = group * DECODE_DOWN_ROWS", "RACE UNINITIALISED"),
    Fault("largest of the group not awaited", mini(cases.head), f"{TG} /* LARGEST */", "",
          "RACE UNINITIALISED"),
    Fault("one half of the tally", sample, "t.turn = 1 - t.turn;", "", "RACE"),
    Fault("return before the candidates", sample,
          f"{TG} /* CANDIDATES */\n    if (simdgroup != 0) return;",
          f"if (simdgroup != 0) return;\n    {TG}", "BARRIER"),
    Fault("weights not awaited", sample, f"{SIMD} /* WEIGHTS */", "", "RACE"),
    Fault("ranks not awaited", sample, f"{SIMD} /* SORTED */", "", "RACE UNINITIALISED"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_found(fault: Fault) -> None:
    case = fault.case()
    text = library_text(kernels()[case.kernel][1], case.shape)
    assert text.count(fault.old) == 1
    library = Library(text.replace(fault.old, fault.new))
    for seed in (0, 1, 2):
        report, after = case.run(library, seed)
        wrong = max(case.errors(after).values()) > 100 * case.tolerance
        found = report.kinds() | ({"VALUE"} if wrong else set())
        assert set(fault.kind.split()) & found, f"seed {seed}: {found}"

"""The token that decode_sample picks: bit for bit that of the reference backend, and that of
engine/sampler.c's rules written down once more in float64."""

from __future__ import annotations

import ctypes as c
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from decode_cases import mask_words, ordered, penalised, sampling_args, vocabulary
from decode_kernels import Case, library
from emulator import Report
from library_text import ROOT, shape

Array = np.ndarray
Parameters = dict[str, float]
SETTINGS: list[Parameters] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition": 1.4, "frequency": 0.3, "presence": 0.5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence": 1.5},
    {"temperature": 1.3, "top_k": 64, "min_p": 0.05},
    {"temperature": 2.5, "top_k": 64, "top_p": 0.9, "min_p": 0.1, "repetition": 1.1},
    {"temperature": 0.9, "top_k": 33, "top_p": 0.5, "frequency": -0.4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.0},
    {"temperature": 5.0, "top_k": 40, "min_p": 1.0},
]


class Sampling(c.Structure):
    """struct backend_sampling"""

    _fields_ = [
        *((n, c.c_float) for n in "temperature top_p min_p repetition frequency presence".split()),
        ("top_k", c.c_int32),
        ("stream", c.c_uint64),
    ]


@cache
def _reference() -> c.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ref.so"
        flags = ["-std=c11", "-O1", "-fPIC", "-shared", "-ffp-contract=off"]
        paths = [f"-I{ROOT}/src", f"-I{ROOT}/include", str(ROOT / "src/backend/ref/sample.c")]
        subprocess.run(["cc", *flags, *paths, "-o", str(target), "-lm"], check=True)
        return c.CDLL(str(target))


def by_reference(logits: Array, counts: Array, mask: Array, p: Parameters, pick: int) -> int:
    full = {"top_p": 1.0, "repetition": 1.0, "top_k": 20, **p}
    sampling = Sampling(**full)
    x = np.zeros_like(logits)
    pointers = [c.c_void_p(a.ctypes.data) for a in (logits, counts, mask)]
    return int(
        _reference().ref_sample(
            c.byref(sampling), c.c_uint64(pick), *pointers, len(logits), c.c_void_p(x.ctypes.data)
        )
    )


def by_formula(x: Array, p: Parameters, pick: int) -> int:
    """x: after penalties, -infinity where nothing may be sampled."""
    temperature = p["temperature"]
    if temperature < 1e-5:
        return int(x.argmax())
    order = sorted(np.flatnonzero(x >= np.sort(x)[-64]), key=lambda i: (-x[i], i))
    order = order[: int(p.get("top_k", 20))]
    w = np.exp((x[order].astype(np.float64) - x[order[0]]) / np.float32(temperature))
    if (top_p := np.float64(np.float32(p.get("top_p", 1)))) < 1:
        n = max(1, int(np.searchsorted(np.cumsum(w), top_p * w.sum())) + 1)
        order, w = order[:n], w[:n]
    keep = w >= np.float32(p.get("min_p", 0))
    ids, w = np.array(order)[keep], w[keep]
    by_id = np.argsort(ids)
    z = (int(p.get("stream", 0)) + (pick + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    u = ((z ^ z >> 31) >> 40) / 2**24
    reached = np.flatnonzero(np.cumsum(w[by_id]) > u * w.sum())
    return int(ids[by_id][reached[0] if len(reached) else -1])


def scene(shape_name: str, seed: int, kind: str = "plain") -> tuple[Array, Array, Array]:
    """Logits, counts, and which tokens may be sampled."""
    rng = np.random.default_rng(seed)
    n = shape(shape_name)["VOCAB"]
    allowed, counts = vocabulary(rng, n)
    logits = (rng.standard_normal(n) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits).astype(np.float32)
    if kind == "one group":
        logits[256:384] += 50
    if kind == "few allowed":
        allowed[:] = False
        allowed[rng.choice(n - 40, 5, replace=False)] = True
    if kind == "huge":
        logits *= np.float32(1e37)
    return logits, counts, allowed


def case_of(shape_name: str, logits: Array, counts: Array, allowed: Array, p: Parameters,
            pick: int) -> Case:  # fmt: skip
    x = penalised(logits, counts, allowed, p)
    buffers = {
        "ARGS": sampling_args(**p, pick=pick), "LOGITS": logits, "COUNTS": counts,
        "BEST": ordered(x).reshape(-1, 128).max(1), "MASK": mask_words(allowed),
        "TOKEN": np.full(1, 99, np.uint32), "RESULT": np.full(2, 99, np.uint32),
    }  # fmt: skip
    want = by_reference(logits, counts, buffers["MASK"], p, pick)
    wanted = {"TOKEN": np.array([want]), "RESULT": np.array([want, 1])}
    return Case("decode_sample", shape_name, 1, buffers, wanted, 0.0)


def check(shape_name: str, seed: int, kind: str, p: Parameters, checked: bool) -> Report:
    logits, counts, allowed = scene(shape_name, seed, kind)
    p = {**p, "stream": 0x9F00000000000000 + seed * 0x1234567}
    pick = seed * 0x100000001
    case = case_of(shape_name, logits, counts, allowed, p, pick)
    if kind != "huge":
        assert case.want["TOKEN"][0] == by_formula(penalised(logits, counts, allowed, p), p, pick)
    assert allowed[case.want["TOKEN"][0]]
    return case.check(library("decode_sample.metal", shape_name, checked), seed)


@pytest.mark.parametrize("kind", ["plain", "ties", "one group", "few allowed", "huge"])
@pytest.mark.parametrize("p", SETTINGS, ids=range(len(SETTINGS)))
def test_picks(p: Parameters, kind: str) -> None:
    for seed in range(1, 9):
        check("mini", seed, kind, p, checked=False)
    check("mini", 9, kind, p, checked=True)


@pytest.mark.parametrize("p", SETTINGS, ids=range(len(SETTINGS)))
def test_picks_at_the_real_vocabulary(p: Parameters) -> None:
    for seed, kind in enumerate(("plain", "ties", "one group"), 20):
        check("real", seed, kind, p, checked=False)


def test_real_vocabulary_checked() -> None:
    """At most 64 groups of 128 logits are read, whatever the vocabulary."""
    report = check("real", 30, "ties", SETTINGS[5], checked=True)
    assert sum(end - begin for begin, end in report.usage[1].read) == 64 * 128 * 4


def test_draws_follow_the_weights() -> None:
    """1,500 picks of one stream over four tokens: within five standard deviations."""
    n = shape("mini")["VOCAB"]
    logits = np.full(n, -30, np.float32)
    tokens, shares = [3, 700, 701, 4000], np.array([0.5, 0.25, 0.2, 0.05])
    logits[tokens] = np.log(shares)
    allowed, counts = np.ones(n, bool), np.zeros(n, np.uint32)
    p, drawn = {"temperature": 1.0, "top_k": 4, "stream": 77}, []
    lib = library("decode_sample.metal", "mini", False)
    case = case_of("mini", logits, counts, allowed, p, 0)
    for pick in range(1500):
        case.buffers["ARGS"][:] = sampling_args(**p, pick=pick)
        drawn.append(case.run(lib)[1]["TOKEN"][0])
    for token, share in zip(tokens, shares):
        spread = (share * (1 - share) / len(drawn)) ** 0.5
        assert abs(drawn.count(token) / len(drawn) - share) < 5 * spread
    assert set(drawn) == set(tokens)


@pytest.mark.parametrize("p", [SETTINGS[0], SETTINGS[2]], ids=["argmax", "draw"])
def test_not_finite(p: Parameters) -> None:
    """One group's mark suffices; the token slot gets a valid id that no one uses."""
    logits, counts, allowed = scene("mini", 1)
    case = case_of("mini", logits, counts, allowed, p, 0)
    case.buffers["BEST"][13] = 0xFFFFFFFF
    report, after = case.run(library("decode_sample.metal", "mini", True))
    assert report.faults == []
    assert after["TOKEN"].tolist() == [0] and after["RESULT"].tolist() == [0, 0]

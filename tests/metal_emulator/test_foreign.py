"""The emulator on kernels that nobody here wrote, where a folder of public repositories is given:

    pytest tests/metal_emulator/test_foreign.py --foreign=DIR

with DIR/flash-moe and DIR/ds4 as their repositories have them. Each kernel runs in the fast and in
the checked build against numpy; what the checks say is compared with what is known of the text."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest
from emulator import Library, Report, front_end

SEEDS = (0, 1, 2)


@pytest.fixture(name="folder")
def _folder(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--foreign")
    if not given:
        pytest.skip("no folder of public kernels given (--foreign=DIR)")
    return Path(given)


@functools.cache
def flash_moe(folder: Path, checked: bool) -> Library:
    path = folder / "flash-moe/metal_infer/shaders.metal"
    if not path.exists():
        pytest.skip(f"no {path}")
    # One statement with two threadgroup variables, which the front end refuses on purpose.
    text = re.sub(r"threadgroup (\w+) (\w+\[\d+\]), (\w+\[\d+\]);",
                  r"threadgroup \1 \2; threadgroup \1 \3;", path.read_text())  # fmt: skip
    return Library(front_end.FOREIGN + text, checked)


@functools.cache
def ds4(folder: Path, checked: bool) -> Library:
    host = folder / "ds4/ds4_metal.m"
    if not host.exists():
        pytest.skip(f"no {host}")
    program = host.read_text()
    literal = program.split("ds4_gpu_source =\n")[1].split(";\n\n")[0]
    lines = re.findall(r'^"(.*)"$', literal, re.M)
    texts = ["".join(lines).encode().decode("unicode_escape")]
    for file in re.findall(r'@"metal/(\w+\.metal)"\]', program):
        texts.append((folder / "ds4/metal" / file).read_text())
    # Macros in this pragma are lost by a preprocessor that runs alone.
    text = re.sub(r"#pragma unroll *\(MIN.*", "#pragma unroll", "\n".join(texts))
    return Library(front_end.FOREIGN + text, checked)


def uint(n: int) -> np.ndarray:
    return np.array([n], np.uint32)


def single(x: float) -> np.ndarray:
    return np.array([x], np.float32)


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-4) -> bool:
    return bool(np.abs(got - want).max() <= tolerance * np.abs(want).max())


def texts(report: Report) -> list[str]:
    return [f.text for f in report.faults]


both = pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
every_seed = pytest.mark.parametrize("seed", SEEDS)


# ---- flash-moe

MATVECS = {  # threads of a threadgroup, rows of one; 0: a thread has a row
    "dequant_matvec_4bit": (64, 0),
    "dequant_matvec_4bit_fast": (64, 1),
    "dequant_matvec_4bit_v3": (256, 8),
    "dequant_matvec_4bit_v4": (256, 8),
    "dequant_matvec_4bit_v5": (256, 8),
}


@both
@every_seed
@pytest.mark.parametrize("kernel", MATVECS)
def test_matvec(folder: Path, kernel: str, seed: int, checked: bool) -> None:
    rng, rows, columns, group = np.random.default_rng(1), 20, 512, 64
    codes = rng.integers(0, 2**32, (rows, columns // 8), np.uint32)
    scales, biases = (rng.integers(0x3C00, 0x3C80, (rows, columns // group), np.uint16)
                      for _ in range(2))  # fmt: skip
    x, out = rng.standard_normal(columns).astype(np.float32), np.zeros(rows, np.float32)
    nibbles = codes[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    factor, offset = (
        np.repeat((a.astype(np.uint32) << 16).view(np.float32), group, axis=1)
        for a in (scales, biases)
    )
    w = nibbles.reshape(rows, columns) * factor.astype(np.float64) + offset
    threads, tile = MATVECS[kernel]
    grid = -(-rows // threads) * threads if tile == 0 else -(-rows // tile) * threads
    buffers = {0: codes, 1: scales, 2: biases, 3: x, 4: out, 5: uint(rows), 6: uint(columns),
               7: uint(group)}  # fmt: skip
    report = flash_moe(folder, checked).run(kernel, (grid,), (threads,), buffers, seed)
    # _fast reduces with the lanes that have a partial sum; Metal leaves the others' values open.
    allowed = {"SIMD_PARTIAL"} if kernel == "dequant_matvec_4bit_fast" else set()
    assert report.kinds() == allowed and close(out, w @ x), texts(report)


@both
@every_seed
def test_rms_norm(folder: Path, seed: int, checked: bool) -> None:
    rng, n = np.random.default_rng(2), 1000
    x, weight = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    total, out = np.zeros(1, np.float32), np.zeros(n, np.float32)
    library = flash_moe(folder, checked)
    first = library.run("rms_norm_sum_sq", (256,), (256,), {0: x, 1: total, 2: uint(n)}, seed)
    buffers = {0: x, 1: weight, 2: total, 3: out, 4: uint(n), 5: single(1e-6)}
    second = library.run("rms_norm_apply", (1024,), (256,), buffers, seed)
    assert texts(first) == [] == texts(second)
    assert close(out, x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-6) * weight)


@both
@every_seed
def test_attention(folder: Path, seed: int, checked: bool) -> None:
    rng, heads, dim, length, stride = np.random.default_rng(3), 4, 64, 37, 40
    q = rng.standard_normal((heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((length, 2 * dim)).astype(np.float32) for _ in range(2))
    scores, out = np.zeros((heads, stride), np.float32), np.zeros((heads, dim), np.float32)
    sizes = {3: uint(dim), 4: uint(2 * dim), 5: uint(length), 6: uint(stride)}
    library = flash_moe(folder, checked)
    reports = [
        library.run("attn_scores_batched", (heads * length * 64,), (64,), {
            0: q, 1: k, 2: scores, **sizes, 7: single(0.125), 8: uint(2), 9: uint(length)}, seed),
        library.run("attn_softmax_batched", (heads * 64,), (64,), {
            0: scores, 1: uint(length), 2: uint(stride)}, seed),
        library.run("attn_values_batched", (heads * dim,), (64,), {
            0: scores, 1: v, 2: out, **sizes, 7: uint(2)}, seed),
    ]  # fmt: skip
    # Two of them reduce with the lanes of one simdgroup that have a value, others left out.
    assert all(r.kinds() <= {"SIMD_PARTIAL"} for r in reports), [texts(r) for r in reports]
    for h in range(heads):
        columns = slice(h // 2 * dim, (h // 2 + 1) * dim)
        e = np.exp(k[:, columns] @ q[h] * 0.125)
        assert close(out[h], (e / e.sum()) @ v[:, columns])


@both
@every_seed
def test_delta_rule(folder: Path, seed: int, checked: bool) -> None:
    rng, heads, share = np.random.default_rng(4), 4, 2
    state = rng.standard_normal((heads, 128, 128)).astype(np.float32) * 0.1
    q, k = (rng.standard_normal((heads // share, 128)).astype(np.float32) * 0.1 for _ in range(2))
    v, out = rng.standard_normal((heads, 128)).astype(np.float32), np.zeros((heads, 128), np.float32)
    g, beta = (rng.random(heads).astype(np.float32) for _ in range(2))
    want, after = np.zeros((heads, 128)), state.astype(np.float64)
    for h in range(heads):
        after[h] *= g[h]
        after[h] += np.outer((v[h] - after[h] @ k[h // share]) * beta[h], k[h // share])
        want[h] = after[h] @ q[h // share]
    buffers = {0: state, 1: q, 2: k, 3: v, 4: g, 5: beta, 6: out, 7: uint(share)}
    report = flash_moe(folder, checked).run(
        "gated_delta_net_step", (heads * 128,), (128,), buffers, seed
    )
    assert texts(report) == [] and close(out, want) and close(state, after)


# ---- ds4


def packed(fields: list[tuple[str, object]]) -> np.ndarray:
    """A struct of C, with its padding, from (numpy type, value) pairs."""
    kinds = np.dtype([(f"f{i}", kind) for i, (kind, _) in enumerate(fields)], align=True)
    return np.array([tuple(value for _, value in fields)], kinds).view(np.uint8)


@both
@every_seed
def test_ds4_rms_norm(folder: Path, seed: int, checked: bool) -> None:
    rng, rows, n = np.random.default_rng(5), 3, 320
    x, weight = rng.standard_normal((rows, n)).astype(np.float32), rng.standard_normal(n)
    weight, out = weight.astype(np.float32), np.zeros((rows, n), np.float32)
    three = [("i4", 1)] * 3
    strides = [("u8", 4 * n), *[("u8", 0)] * 8]
    args = packed([("i4", n), ("i4", n // 4), ("u8", 4 * n), ("u8", 0), ("u8", 0), ("f4", 1e-6),
                   *three, *three, *three, *strides])  # fmt: skip
    report = ds4(folder, checked).run(
        "kernel_rms_norm_mul_f32_4", (rows * 64,), (64,),
        {0: args, 1: x, 2: weight, 3: weight, 4: out}, seed, tg={0: 128},
    )  # fmt: skip
    mean = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
    assert texts(report) == []
    assert close(out, x / np.sqrt(mean + 1e-6) * weight)


@both
@every_seed
@pytest.mark.parametrize("k,m,n", [(64, 64, 32), (96, 72, 37)], ids=str)
def test_ds4_simdgroup_matrices(
    folder: Path, k: int, m: int, n: int, seed: int, checked: bool
) -> None:
    rng = np.random.default_rng(6)
    a = rng.standard_normal((m, k)).astype(np.float16)
    b = rng.standard_normal((n, k)).astype(np.float32)
    out = np.zeros((n, m), np.float32)
    args = packed([("i4", k), ("i4", 1), ("u8", 2 * k), ("u8", 0), ("u8", 0), ("i4", 1), ("u8", 4),
                   ("u8", 4 * k), ("u8", 0), ("u8", 0), ("i4", m), ("i4", n), ("i2", 1),
                   ("i2", 1)])  # fmt: skip
    grid = (-(-n // 32) * 128, -(-m // 64))
    edges = np.bool_(m % 64 != 0 or n % 32 != 0)
    report = ds4(folder, checked).run(
        "kernel_mul_mm_f16_f32", grid, (128, 1), {0: args, 1: a, 2: b, 3: out}, seed,
        tg={0: 8192},
        constants={"FC_mul_mm_bc_inp": np.bool_(False), "FC_mul_mm_bc_out": edges},
    )  # fmt: skip
    assert texts(report) == []
    assert close(out, b.astype(np.float64) @ a.astype(np.float64).T, 2e-3)


@both
@every_seed
def test_ds4_argsort(folder: Path, seed: int, checked: bool) -> None:
    rng, n = np.random.default_rng(7), 256
    x, out = rng.standard_normal((2, n)).astype(np.float32), np.zeros((2, n), np.int32)
    fields = re.search(
        r"struct ds4_metal_args_argsort \{(.*?)\}",
        (folder / "ds4/metal/argsort.metal").read_text() if folder.exists() else "", re.S,
    )  # fmt: skip
    values = {"ne00": n, "ne01": 2, "ne02": 1, "ne03": 1, "nb00": 4, "nb01": 4 * n, "nb02": 8 * n,
              "nb03": 8 * n, "ne0": n, "ne1": 2, "ne2": 1, "ne3": 1, "top_k": n,
              "len": n}  # fmt: skip
    library = ds4(folder, checked)
    assert fields
    kinds = {"int32_t": "i4", "uint64_t": "u8"}
    names = re.findall(r"(\w+)\s+(\w+);", fields.group(1))
    args = packed([(kinds[kind], values[name]) for kind, name in names])
    report = library.run(
        "kernel_argsort_f32_i32_desc", (2 * n,), (n,), {0: args, 1: x, 2: out}, seed,
        tg={0: 4 * n},
    )  # fmt: skip
    assert texts(report) == []
    assert np.array_equal(out, np.argsort(-x, axis=1, kind="stable"))


# ---- example_matmul_metal4: tensor operations

TENSORS = {  # rows that lie within the result's extents, which the text gives the wrong way round
    "matmul_auto_slice_dynamic_extents": 64,
    "matmul_auto_slice_static_extents": 64,
    "matmul_static_slice_dynamic_extents": 128,
    "matmul_static_slice_static_extents": 128,
}


@both
@every_seed
@pytest.mark.parametrize("kernel", TENSORS)
def test_tensors(folder: Path, kernel: str, seed: int, checked: bool) -> None:
    path = folder / "example_matmul_metal4/Sources/matmul/shader.metal"
    if not path.exists():
        pytest.skip(f"no {path}")
    rng = np.random.default_rng(8)
    a = rng.standard_normal((128, 256)).astype(np.float16)
    b = rng.standard_normal((256, 64)).astype(np.float16)
    out = np.zeros((128, 128), np.float16)
    report = Library(front_end.FOREIGN + path.read_text(), checked).run(
        kernel, (2 * 128, 2), (128, 1), {0: a, 1: b, 2: out}, seed
    )
    assert texts(report) == []
    rows, want = TENSORS[kernel], a.astype(np.float64) @ b.astype(np.float64)
    assert close(out[:rows, :64].astype(np.float64), want[:rows], 4e-3)  # halves are accumulated
    assert not out[rows:].any() and not out[:, 64:].any()

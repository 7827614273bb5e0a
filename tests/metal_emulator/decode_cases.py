"""One case for each decode kernel and shape: inputs, and results by the model's formulas."""

from __future__ import annotations

import struct

import numpy as np
from decode_kernels import (
    Array,
    Case,
    Experts,
    from_bf16,
    groups,
    matrix,
    norm,
    sigmoid,
    silu,
    to_bf16,
)
from library_text import shape

F32 = np.float32


def floats(rng: np.random.Generator, *dims: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal(dims) * scale).astype(F32)


def weights(rng: np.random.Generator, n: int) -> Array:
    return rng.uniform(0.5, 1.5, n).astype(F32)


def dims(shape_name: str) -> dict[str, int]:
    s = dict(shape(shape_name))
    s["Q"], s["KV"] = s["Q_HEADS"] * 256, s["KV_HEADS"] * 256
    s["GK"], s["GV"] = s["GDN_K_HEADS"] * 128, s["GDN_V_HEADS"] * 128
    s["CONV"] = 2 * s["GK"] + s["GV"]
    return s


def embed(shape_name: str, token: int = 5, host: bool = True, count: int = 1) -> Case:
    """Only the first rows of the embedding exist here."""
    rng = np.random.default_rng(1)
    s = dims(shape_name)
    table = matrix(rng, 8, s["HIDDEN"])
    counts = rng.integers(0, 3, s["VOCAB"]).astype(np.uint32)
    counted = counts.copy()
    if count:
        counted[token] = 2 if counts[token] == 0 else counts[token] + 1
    codes, scale, bias = table.codes[token], table.scales[token], table.biases[token]
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(-1).astype(F32)
    exact = np.repeat(from_bf16(scale), 64) * nibbles + np.repeat(from_bf16(bias), 64)
    buffers = {
        "ARGS": np.array([token if host else -1, count], np.int32),
        "TOKEN": np.array([token], np.uint32),
        "CODES": table,
        "COUNTS": counts,
        "H": np.zeros(s["HIDDEN"], F32),
    }
    n = groups("decode_embed", shape_name)
    return Case("decode_embed", shape_name, n, buffers, {"H": exact, "COUNTS": counted}, 0.0)


def gdn_in(shape_name: str) -> Case:
    rng = np.random.default_rng(2)
    s = dims(shape_name)
    h, weight = floats(rng, s["HIDDEN"], scale=3), weights(rng, s["HIDDEN"])
    rows = {"QKV": s["CONV"], "Z": s["GV"], "B": s["GDN_V_HEADS"], "A": s["GDN_V_HEADS"]}
    parts = {name: matrix(rng, n, s["HIDDEN"]) for name, n in rows.items()}
    x = norm(h, weight)
    want = np.concatenate([m.values() @ x for m in parts.values()])
    buffers = {"H": h, "NORM": weight, **parts, "PROJ": np.zeros(len(want), F32)}
    n = groups("decode_gdn_in", shape_name)
    return Case("decode_gdn_in", shape_name, n, buffers, {"PROJ": want})


def gdn_delta(shape_name: str) -> Case:
    rng = np.random.default_rng(3)
    s = dims(shape_name)
    heads, n, conv_dim = s["GDN_V_HEADS"], 128, s["CONV"]
    proj = floats(rng, conv_dim + s["GV"] + 2 * heads)
    taps, history = floats(rng, conv_dim, 4, scale=0.5), floats(rng, 3, conv_dim)
    a_log, dt_bias = rng.uniform(-2, 2, heads).astype(F32), floats(rng, heads, scale=4)
    weight, state = weights(rng, n), floats(rng, heads, n, n, scale=0.3)  # [value][key]
    u = proj[:conv_dim].astype(np.float64)
    z = proj[conv_dim : conv_dim + s["GV"]].astype(np.float64).reshape(heads, n)
    b, a = proj[conv_dim + s["GV"] :].astype(np.float64).reshape(2, heads)
    moved = np.concatenate([history[1:], proj[None, :conv_dim]])
    c = silu((taps.T * np.concatenate([history, u[None]])).sum(0))
    q, k = c[: 2 * s["GK"]].reshape(2, -1, n)
    q, k = (v / np.sqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (q, k))
    q, k = (np.repeat(v, 2, 0) for v in (q / np.sqrt(n), k))
    v = c[2 * s["GK"] :].reshape(heads, n)
    decay = np.exp(-np.exp(a_log.astype(np.float64)) * np.logaddexp(0, a + dt_bias))
    new = state * decay[:, None, None]
    d = sigmoid(b)[:, None] * (v - (new * k[:, None]).sum(-1))
    new = new + d[:, :, None] * k[:, None]
    o = (new * q[:, None]).sum(-1)
    buffers = {
        "PROJ": proj, "CONV": taps, "A_LOG": a_log, "DT_BIAS": dt_bias, "NORM": weight,
        "CONV_IN": history, "CONV_OUT": np.zeros_like(history),
        "STATE_IN": state, "STATE_OUT": np.zeros_like(state),
        "GATED": np.zeros((heads, n), F32), "SQUARES": np.zeros((heads, 4), F32),
    }  # fmt: skip
    want = {
        "CONV_OUT": moved,
        "STATE_OUT": new,
        "GATED": o * weight * silu(z),
        "SQUARES": (o**2).reshape(heads, 4, 32).sum(-1),
    }
    return Case(
        "decode_gdn_delta", shape_name, groups("decode_gdn_delta", shape_name), buffers, want
    )


def gdn_out(shape_name: str) -> Case:
    rng = np.random.default_rng(4)
    s = dims(shape_name)
    gated, squares = floats(rng, s["GV"]), rng.uniform(8, 90, (s["GDN_V_HEADS"], 4)).astype(F32)
    h, m = floats(rng, s["HIDDEN"]), matrix(rng, s["HIDDEN"], s["GV"])
    rms = np.sqrt(squares.astype(np.float64).sum(1) / 128 + 1e-6)
    want = h + m.values() @ (gated.reshape(-1, 128) / rms[:, None]).reshape(-1)
    buffers = {"GATED": gated, "SQUARES": squares, "PROJ": m, "H": h}
    n = groups("decode_gdn_out", shape_name)
    return Case("decode_gdn_out", shape_name, n, buffers, {"H": want})


def attn_in(shape_name: str) -> Case:
    rng = np.random.default_rng(5)
    s = dims(shape_name)
    h, weight = floats(rng, s["HIDDEN"], scale=3), weights(rng, s["HIDDEN"])
    rows = {"Q": 2 * s["Q"], "K": s["KV"], "V": s["KV"]}
    parts = {name: matrix(rng, n, s["HIDDEN"]) for name, n in rows.items()}
    x = norm(h, weight)
    want = np.concatenate([m.values() @ x for m in parts.values()])
    buffers = {"H": h, "NORM": weight, **parts, "QKV": np.zeros(len(want), F32)}
    n = groups("decode_attn_in", shape_name)
    return Case("decode_attn_in", shape_name, n, buffers, {"QKV": want})


def turn(x: Array, position: int, inv_freq: Array) -> Array:
    """RoPE of the first 64 dimensions, pairs (i, i + 32); the angle is a float32 product."""
    angle = (F32(position) * inv_freq).astype(np.float64)
    a, b = x[..., :32], x[..., 32:64]
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 64:]], -1)


def inverse_frequencies() -> Array:
    return (1 / (10000000.0 ** (np.arange(32) / 32)).astype(F32)).astype(F32)


def attn(shape_name: str, kernel: str, position: int, block_rows: int) -> Case:
    """The whole layer between projections, in blocks; the cache has rows up to this token's."""
    rng = np.random.default_rng(position)
    s = dims(shape_name)
    heads, kv_heads = s["Q_HEADS"], s["KV_HEADS"]
    qkv = floats(rng, 2 * s["Q"] + 2 * s["KV"], scale=2)
    q_norm, k_norm, inv_freq = weights(rng, 256), weights(rng, 256), inverse_frequencies()
    keys = to_bf16(floats(rng, position + 1, kv_heads, 256))
    values = to_bf16(floats(rng, position + 1, kv_heads, 256))
    q, gate = qkv[: 2 * s["Q"]].reshape(heads, 2, 256).astype(np.float64).transpose(1, 0, 2)
    new_k, new_v = qkv[2 * s["Q"] :].reshape(2, kv_heads, 256)
    q = turn(norm(q, q_norm), position, inv_freq)
    want_keys, want_values = keys.copy(), values.copy()
    want_keys[position] = to_bf16(turn(norm(new_k, k_norm), position, inv_freq))
    want_values[position] = to_bf16(new_v)
    blocks = -(-(position + 1) // block_rows)
    partial = np.zeros((blocks, heads, 256))
    stats = np.zeros((blocks, heads, 2))
    for i in range(blocks):
        rows = slice(i * block_rows, (i + 1) * block_rows)
        k, v = (np.repeat(from_bf16(a[rows]), 8, 1) for a in (want_keys, want_values))
        scores = np.einsum("hd,thd->th", q, k) / 16
        e = np.exp(scores - scores.max(0))
        partial[i] = np.einsum("th,thd->hd", e, v) * sigmoid(gate)
        stats[i] = np.stack([scores.max(0), e.sum(0)], -1)
    buffers = {
        "ARGS": np.array([position, block_rows, blocks], np.uint32),
        "QKV": qkv, "Q_NORM": q_norm, "K_NORM": k_norm, "INV_FREQ": inv_freq,
        "KEYS": keys, "VALUES": values,
        "PARTIAL": np.zeros_like(partial, F32), "STATS": np.zeros_like(stats, F32),
    }  # fmt: skip
    want = {"KEYS": want_keys, "VALUES": want_values, "PARTIAL": partial, "STATS": stats}
    return Case(kernel, shape_name, blocks * kv_heads, buffers, want, 4e-6)


def attn_whole(shape_name: str, buffers: dict[str, Array], keys: Array, values: Array) -> Array:
    """softmax over all rows of the cache, gated: [q_heads][256]."""
    s = dims(shape_name)
    position = int(buffers["ARGS"][0])
    qkv = buffers["QKV"][: 2 * s["Q"]].reshape(-1, 2, 256).astype(np.float64)
    q = turn(norm(qkv[:, 0], buffers["Q_NORM"]), position, buffers["INV_FREQ"])
    out = np.zeros_like(q)
    for head in range(s["Q_HEADS"]):
        k, v = (from_bf16(a[:, head // 8]).astype(np.float64) for a in (keys, values))
        scores = k @ q[head] / 16
        e = np.exp(scores - scores.max())
        out[head] = e @ v / e.sum()
    return out * sigmoid(qkv[:, 1])


def _partials(rng: np.random.Generator, heads: int, blocks: int) -> tuple[Array, Array, Array]:
    """Partial results, statistics, and the softmax-weighted mean they stand for."""
    partial = floats(rng, blocks, heads, 256)
    stats = np.stack(
        [floats(rng, blocks, heads, scale=3), rng.uniform(1, 9, (blocks, heads)).astype(F32)], -1
    )
    factor = np.exp(stats[..., 0].astype(np.float64) - stats[..., 0].max(0))
    mean = (factor[..., None] * partial).sum(0) / (factor * stats[..., 1]).sum(0)[:, None]
    return partial, stats, mean


def attn_merge(shape_name: str, blocks: int = 37) -> Case:
    rng = np.random.default_rng(6)
    s = dims(shape_name)
    partial, stats, mean = _partials(rng, s["Q_HEADS"], blocks)
    buffers = {
        "ARGS": np.array([blocks], np.uint32), "PARTIAL": partial, "STATS": stats,
        "MERGED": np.zeros_like(mean, F32), "MERGED_STATS": np.zeros((s["Q_HEADS"], 2), F32),
    }  # fmt: skip
    want = {"MERGED": mean, "MERGED_STATS": np.tile([0.0, 1.0], (s["Q_HEADS"], 1))}
    n = groups("decode_attn_merge", shape_name)
    return Case("decode_attn_merge", shape_name, n, buffers, want)


def attn_out(shape_name: str, blocks: int = 3) -> Case:
    rng = np.random.default_rng(7)
    s = dims(shape_name)
    partial, stats, mean = _partials(rng, s["Q_HEADS"], blocks)
    h, m = floats(rng, s["HIDDEN"]), matrix(rng, s["HIDDEN"], s["Q"])
    buffers = {
        "ARGS": np.array([blocks], np.uint32), "PARTIAL": partial, "STATS": stats,
        "PROJ": m, "H": h,
    }  # fmt: skip
    want = {"H": h + m.values() @ mean.reshape(-1)}
    return Case("decode_attn_out", shape_name, groups("decode_attn_out", shape_name), buffers, want)


def router(shape_name: str) -> Case:
    rng = np.random.default_rng(8)
    s = dims(shape_name)
    h, weight = floats(rng, s["HIDDEN"], scale=3), weights(rng, s["HIDDEN"])
    logits, scalar = matrix(rng, s["EXPERTS"], s["HIDDEN"], 8), matrix(rng, 1, s["HIDDEN"], 8)
    gate, up = (matrix(rng, s["SHARED_WIDTH"], s["HIDDEN"]) for _ in range(2))
    x = norm(h, weight)
    want = {
        "X": x,
        "LOGITS": np.concatenate([logits.values() @ x, scalar.values() @ x]),
        "SHARED": silu(gate.values() @ x) * (up.values() @ x),
    }
    buffers = {
        "H": h, "NORM": weight, "LOGITS_W": logits, "SHARED_GATE": scalar, "GATE": gate, "UP": up,
        **{name: np.zeros_like(a, F32) for name, a in want.items()},
    }  # fmt: skip
    return Case("decode_router", shape_name, groups("decode_router", shape_name), buffers, want)


def router_logits(shape_name: str, kind: str = "plain") -> tuple[Array, list[int]]:
    """Logits of the experts and the scalar, and the eight to choose, best first, ties to the lower
    id."""
    rng = np.random.default_rng(9)
    n = shape(shape_name)["EXPERTS"]
    logits = floats(rng, n + 1)
    if kind == "ties":  # many equal ones, zeros of both signs among them
        logits[:n] = rng.choice(np.array([-1.5, -0.0, 0.0, 2.5], F32), n, p=[0.4, 0.28, 0.3, 0.02])
    if kind == "negative":
        logits[:n] = -np.abs(logits[:n]) - 5
    order = sorted(range(n), key=lambda e: (-logits[e], e))
    return logits, order[:8]


def experts_up(shape_name: str, kind: str = "plain") -> Case:
    rng = np.random.default_rng(10)
    s = dims(shape_name)
    x = floats(rng, s["HIDDEN"])
    logits, chosen = router_logits(shape_name, kind)
    experts = Experts(rng, shape_name, chosen)
    gate, up = (experts.matrices[n] for n in ("gate", "up"))
    want = np.stack([silu(gate[e].values() @ x) * (up[e].values() @ x) for e in chosen])
    buffers = {
        "ARGS": np.array([experts.stride], np.uint32), "X": x, "LOGITS": logits,
        "GATE": experts.bound("gate"), "UP": experts.bound("up"),
        "INNER": np.zeros_like(want, F32),
    }  # fmt: skip
    n = groups("decode_experts_up", shape_name)
    return Case("decode_experts_up", shape_name, n, buffers, {"INNER": want})


def experts_down(shape_name: str, kind: str = "plain") -> Case:
    rng = np.random.default_rng(11)
    s = dims(shape_name)
    width, h = s["EXPERT_WIDTH"], floats(rng, s["HIDDEN"])
    inner, shared = floats(rng, 8, width), floats(rng, s["SHARED_WIDTH"])
    logits, chosen = router_logits(shape_name, kind)
    experts = Experts(rng, shape_name, chosen)
    shared_down = matrix(rng, s["HIDDEN"], s["SHARED_WIDTH"])
    share = np.exp(logits[chosen].astype(np.float64))
    want = h + sigmoid(np.float64(logits[-1])) * (shared_down.values() @ shared)
    for e, w, v in zip(chosen, share / share.sum(), inner):
        want = want + w * (experts.matrices["down"][e].values() @ v)
    buffers = {
        "ARGS": np.array([experts.stride], np.uint32), "LOGITS": logits, "INNER": inner,
        "SHARED": shared, "DOWN": experts.bound("down"), "SHARED_DOWN": shared_down, "H": h,
    }  # fmt: skip
    n = groups("decode_experts_down", shape_name)
    return Case("decode_experts_down", shape_name, n, buffers, {"H": want})


def sampling_args(
    temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0, repetition: float = 1.0,
    frequency: float = 0.0, presence: float = 0.0, top_k: int = 20, stream: int = 0, pick: int = 0,
) -> Array:  # fmt: skip
    """struct decode_sampling_args."""
    penalties = (repetition, frequency, presence) != (1.0, 0.0, 0.0)
    words = (stream & 0xFFFFFFFF, stream >> 32, pick & 0xFFFFFFFF, pick >> 32)
    numbers = (temperature, top_p, min_p, repetition, frequency, presence)
    packed = struct.pack("<6f6I", *numbers, penalties, top_k, *words)
    return np.frombuffer(packed, np.uint8).copy()


def ordered(values: Array) -> Array:
    """uint32 in the order of float32, both zeros equal."""
    bits = (values.astype(F32) + F32(0)).view(np.uint32)
    return np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))


def penalised(logits: Array, counts: Array, allowed: Array, p: dict[str, float]) -> Array:
    """As engine/sampler.c adjusts logits, in float32."""
    x = logits.astype(F32).copy()
    seen = counts > 0
    r, frequency = F32(p.get("repetition", 1)), F32(p.get("frequency", 0))
    if r != 1:
        x[seen] = np.where(x[seen] > 0, x[seen] / r, x[seen] * r)
    often = counts[seen].astype(F32) - 1
    x[seen] -= frequency * often
    x[counts > 1] -= F32(p.get("presence", 0))
    return np.where(allowed, x, F32(-np.inf))


def mask_words(allowed: Array) -> Array:
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def vocabulary(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Which tokens may be sampled (holes, padding at the end), and counts."""
    allowed = rng.random(n) > 0.05
    allowed[n - 40 :] = False
    counts = rng.choice(np.array([0, 1, 2, 5], np.uint32), n, p=[0.7, 0.1, 0.1, 0.1])
    return allowed, counts


def head(shape_name: str, **penalties: float) -> Case:
    """The last group is not checked apart: it is like the others. VOCAB is the library's."""
    rng = np.random.default_rng(12)
    s = dims(shape_name)
    vocab = HEAD_VOCAB
    h, weight = floats(rng, s["HIDDEN"], scale=3), weights(rng, s["HIDDEN"])
    m = matrix(rng, vocab, s["HIDDEN"])
    allowed, counts = vocabulary(rng, vocab)
    logits = m.values() @ norm(h, weight)
    buffers = {
        "ARGS": sampling_args(**penalties), "H": h, "NORM": weight, "PROJ": m, "COUNTS": counts,
        "MASK": mask_words(allowed), "LOGITS": np.zeros(vocab, F32),
        "BEST": np.zeros(vocab // 128, np.uint32),
    }  # fmt: skip
    return Case("decode_head", shape_name, vocab // 128, buffers, {"LOGITS": logits})


HEAD_VOCAB = 1024  # rows of lm_head in these tests, at both shapes' width

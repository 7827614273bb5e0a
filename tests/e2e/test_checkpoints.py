"""Checkpoints through the program: packing quantises exactly as MLX does, inspection adds up, bad
input is refused with words that help, and nothing half-written stays behind."""

import hashlib
import json
import signal
import struct

import numpy as np
import pytest

from conftest import begun, until

# The class totals of the published MLX 4-bit checkpoint follow from these shapes; `lily inspect`
# must add up to the same for any number of layers.
REAL = dict(hidden=2048, vocab=248320, q=4096, kv=512, conv=8192, v=4096, v_heads=32, experts=256,
            width=512, shared=512, head=256, k=128)
MINI = dict(hidden=256, vocab=4096, q=2048, kv=256, conv=1024, v=512, v_heads=4, experts=32,
            width=64, shared=64, head=256, k=128)


# ---- safetensors and packed files ----------------------------------------------------------------

def save(path, tensors):
    """tensors: {name: (dtype, array)} in the order of the data."""
    header, at = {}, 0
    for name, (dtype, a) in tensors.items():
        header[name] = dict(dtype=dtype, shape=list(a.shape), data_offsets=[at, at + a.nbytes])
        at += a.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, a in tensors.values():
            f.write(np.ascontiguousarray(a).tobytes())


class Packed:
    """A packed file read by docs/packed-format.md alone."""

    def __init__(self, path):
        self.bytes = path.read_bytes()
        magic, version, n, size = struct.unpack("<8sIIQ", self.bytes[:24])
        assert (magic, version, size) == (b"LILYPACK", 1, len(self.bytes))
        text = self.bytes[64:64 + n]
        assert hashlib.sha256(self.bytes[:24] + text).digest() == self.bytes[24:56]
        self.directory = json.loads(text)
        self.tensors = {t["name"]: t for t in self.directory["tensors"]}

    def matrix(self, name, expert=0):
        """Codes [rows, cols], scales and biases [rows, cols / 64] as bfloat16 bits."""
        t = self.tensors[name]
        rows, cols = t["shape"]
        move = expert * t.get("stride", 0)

        def part(key, dtype, n):
            return np.frombuffer(self.bytes, dtype, n, t[key] + move)

        q = part("offset", np.uint8, rows * cols * t["bits"] // 8)
        if t["bits"] == 4:
            q = np.stack([q & 15, q >> 4], -1)
        groups = rows * cols // 64
        return (q.reshape(rows, cols), part("scales", np.uint16, groups).reshape(rows, -1),
                part("biases", np.uint16, groups).reshape(rows, -1))

    def floats(self, name):
        t = self.tensors[name]
        n = t["shape"][0] * t["shape"][1]
        return np.frombuffer(self.bytes, np.float32, n, t["offset"])


# ---- bfloat16 and the quantiser in numpy ----------------------------------------------------------

def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def half_away(x):
    return np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x).astype(np.float32)


def quantise(bits16, bits, gpu=True):
    """MLX's affine quantiser. Its GPU kernels (Metal, CUDA) round halves away from zero and start
    the maximum at 0; its CPU backend rounds halves to even and takes the true maximum."""
    w = widen(bits16).reshape(*bits16.shape[:-1], -1, 64)
    rounded = half_away if gpu else np.rint
    top = np.float32(2**bits - 1)
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    if gpu:
        high = np.maximum(high, np.float32(0))
    side = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / top, np.float32(1e-7))
    scale = np.where(side, scale, -scale)
    edge = np.where(side, low, high)
    q0 = rounded(edge / scale)
    zero = q0 == 0
    scale = np.where(zero, scale, edge / np.where(zero, np.float32(1), q0))
    bias = np.where(zero, np.float32(0), edge)
    q = np.clip(rounded((w - bias) / scale), 0, top).astype(np.uint8)
    return q.reshape(bits16.shape), narrow(scale[..., 0]), narrow(bias[..., 0])


def special_rows(rng, rows, cols):
    """Rows that quantisers stumble over, in turn: random, constant, tiny, huge, one-sided, zero,
    few distinct values (ties), one outlier."""
    x = rng.standard_normal((rows, cols)).astype(np.float32) / np.float32(cols) ** 0.5
    kind = np.arange(rows) % 10
    x[kind == 1] = 0.37
    x[kind == 2] *= np.float32(1e-9)
    x[kind == 3] *= np.float32(1e28)
    x[kind == 4] = -np.abs(x[kind == 4]) - np.float32(0.01)
    x[kind == 5] = np.abs(x[kind == 5]) + np.float32(0.01)
    x[kind == 6] = 0
    x[kind == 7] = np.round(x[kind == 7] * 100) / 8
    x[kind == 8, ::64] = 50
    return narrow(x)


# ---- a Hugging Face folder -------------------------------------------------------------------------

def hf_tensors(layers=4, seed=5, s=MINI):
    rng = np.random.default_rng(seed)
    out = {}

    def matrix(name, *shape):
        rows = int(np.prod(shape[:-1]))
        out[name] = ("BF16", special_rows(rng, rows, shape[-1]).reshape(shape))

    def vector(name, *shape):
        out[name] = ("BF16", narrow(rng.standard_normal(shape) * 0.2))

    p = "model.language_model."
    h = s["hidden"]
    matrix("lm_head.weight", s["vocab"], h)
    matrix(p + "embed_tokens.weight", s["vocab"], h)
    vector(p + "norm.weight", h)
    for i in range(layers):
        l = f"{p}layers.{i}."
        vector(l + "input_layernorm.weight", h)
        vector(l + "post_attention_layernorm.weight", h)
        if i % 4 == 3:
            for name, rows, cols in (("q", 2 * s["q"], h), ("k", s["kv"], h), ("v", s["kv"], h),
                                     ("o", h, s["q"])):
                matrix(f"{l}self_attn.{name}_proj.weight", rows, cols)
            vector(l + "self_attn.q_norm.weight", s["head"])
            vector(l + "self_attn.k_norm.weight", s["head"])
        else:
            for name, rows, cols in (("in_proj_qkv", s["conv"], h), ("in_proj_z", s["v"], h),
                                     ("in_proj_a", s["v_heads"], h), ("in_proj_b", s["v_heads"], h),
                                     ("out_proj", h, s["v"])):
                matrix(f"{l}linear_attn.{name}.weight", rows, cols)
            vector(l + "linear_attn.conv1d.weight", s["conv"], 1, 4)
            vector(l + "linear_attn.A_log", s["v_heads"])
            vector(l + "linear_attn.dt_bias", s["v_heads"])
            vector(l + "linear_attn.norm.weight", s["k"])
        matrix(l + "mlp.gate.weight", s["experts"], h)
        matrix(l + "mlp.experts.gate_up_proj", s["experts"], 2 * s["width"], h)
        matrix(l + "mlp.experts.down_proj", s["experts"], h, s["width"])
        for name, rows, cols in (("gate_proj", s["shared"], h), ("up_proj", s["shared"], h),
                                 ("down_proj", h, s["shared"])):
            matrix(f"{l}mlp.shared_expert.{name}.weight", rows, cols)
        matrix(l + "mlp.shared_expert_gate.weight", 1, h)
    # What a text engine skips knowingly.
    vector("model.visual.patch_embed.proj.bias", 1152)
    vector("mtp.norm.weight", h)
    return out


def mini_config(lily, folder):
    """config.json and tokenizer of a synthetic mini with 4 layers, without its quantisation."""
    done = lily("synth", folder, "--shape", "mini", "--layers", 4)
    assert done.returncode == 0, done.stderr
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    return config, (folder / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def hf(lily, tmp_path_factory):
    """(folder, tensors): bfloat16 in two shards with an index."""
    root = tmp_path_factory.mktemp("hf")
    config, tokenizer = mini_config(lily, root / "synthetic")
    folder = root / "bf16"
    folder.mkdir()
    tensors = hf_tensors()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:40],
              "model-00002-of-00002.safetensors": names[40:]}
    for file, part in shards.items():
        save(folder / file, {n: tensors[n] for n in part})
    index = {n: file for file, part in shards.items() for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder, tensors


def packed_names(tensors):
    """(name in the packed file, expert, bits of the matrix) for every matrix of a bf16 folder."""
    for name, (_, a) in tensors.items():
        if a.ndim < 2 or "conv1d" in name or name.startswith(("model.visual", "mtp.")):
            continue
        short = name.removeprefix("model.language_model.").removesuffix(".weight")
        if short.endswith("experts.gate_up_proj"):
            base, width = short.replace("experts.gate_up_proj", "switch_mlp."), a.shape[1] // 2
            for e in range(a.shape[0]):
                yield base + "gate_proj", e, a[e, :width]
                yield base + "up_proj", e, a[e, width:]
        elif short.endswith("experts.down_proj"):
            for e in range(a.shape[0]):
                yield short.replace("experts.", "switch_mlp."), e, a[e]
        else:
            yield short, 0, a


def test_pack_quantises_as_mlx_does(lily, hf, tmp_path):
    folder, tensors = hf
    out = tmp_path / "out.lily"
    done = lily("pack", folder, out)
    assert done.returncode == 0, done.stderr
    packed = Packed(out)
    count = 0
    for name, expert, bits16 in packed_names(tensors):
        eight = name.endswith(("mlp.gate", "shared_expert_gate"))
        want = quantise(bits16, 8 if eight else 4)
        got = packed.matrix(name, expert)
        for w, g, part in zip(want, got, ("codes", "scales", "biases")):
            assert np.array_equal(w, g), f"{name}[{expert}]: {part} differ"
        count += 1
    assert count == 2 + 4 * (3 * 32 + 5) + 3 * 5 + 4
    # Norms: 1 + w rounded to bfloat16, except the gated norm; the rest as it is.
    for name, (_, a) in tensors.items():
        short = name.removeprefix("model.language_model.").removesuffix(".weight")
        if short not in packed.tensors or packed.tensors[short]["bits"] != 32:
            continue
        v = widen(a.reshape(-1))
        if short.endswith("norm") and not short.endswith("linear_attn.norm"):
            v = widen(narrow(np.float32(1) + v))
        assert np.array_equal(packed.floats(short), v), short
    # Each section's checksum.
    for s in packed.directory["sections"]:
        data = packed.bytes[s["offset"]:s["offset"] + s["bytes"]]
        assert hashlib.sha256(data).hexdigest() == s["sha256"], s["name"]


def test_numpy_agrees_with_mlx():
    """The quantiser above in its CPU form equals mlx.core.quantize bit for bit, so the GPU form
    rests on two documented differences alone: where a group has no tie and is not all negative,
    both are the same."""
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    mx.set_default_device(mx.cpu)
    rows = special_rows(np.random.default_rng(1), 2000, 256)
    for bits in (4, 8):
        a = mx.view(mx.array(rows), mx.bfloat16)
        words, scales, biases = mx.quantize(a, group_size=64, bits=bits)
        codes = np.array(words).view(np.uint8)
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], -1)
        codes = codes.reshape(rows.shape)
        got = (codes, np.array(mx.view(scales, mx.uint16)), np.array(mx.view(biases, mx.uint16)))
        for want, have in zip(quantise(rows, bits, gpu=False), got):
            assert np.array_equal(want, have)
        q, s, b = quantise(rows, bits, gpu=True)
        same = np.all((q == codes).reshape(len(rows), -1, 64), -1) & (s == got[1]) & (b == got[2])
        random = np.arange(len(rows)) % 10 == 0
        assert same[random].mean() > 0.8 and not same.all()


# ---- inspection ------------------------------------------------------------------------------------

def quantised(rows, cols, bits):
    return rows * cols * bits // 8 + rows * cols // 64 * 4


def class_bytes(s, layers):
    h, attention = s["hidden"], layers // 4
    gdn = layers - attention
    expert = 3 * quantised(s["width"], h, 4)
    return {
        "routed experts": layers * s["experts"] * expert,
        "GDN projections": gdn * (quantised(s["conv"], h, 4) + 2 * quantised(s["v"], h, 4)
                                  + 2 * quantised(s["v_heads"], h, 4)),
        "full-attention projections": attention * (quantised(3 * s["q"], h, 4)
                                                   + 2 * quantised(s["kv"], h, 4)),
        "lm_head": quantised(s["vocab"], h, 4),
        "embed_tokens": quantised(s["vocab"], h, 4),
        "shared experts": layers * 3 * quantised(s["shared"], h, 4),
        "routers": layers * quantised(s["experts"], h, 8),
        "shared_expert_gate": layers * quantised(1, h, 8),
        "norms, conv1d, A_log, dt_bias": 2 * (h + layers * 2 * h + attention * 2 * s["head"]
                                              + gdn * (4 * s["conv"] + 2 * s["v_heads"] + s["k"])),
    }


def inspect(lily, path):
    done = lily("inspect", path, "--json")
    return done, json.loads(done.stdout)


def test_class_formulas_give_the_published_total():
    assert sum(class_bytes(REAL, 40).values()) == 19_508_787_456


def test_inspect_adds_up(lily, tmp_path):
    folder = tmp_path / "m"
    assert lily("synth", folder, "--shape", "mini", "--layers", 8).returncode == 0
    done, doc = inspect(lily, folder)
    assert done.returncode == 0 and doc["ok"] and doc["faults"] == []
    assert (doc["kind"], doc["shape"], doc["layers"]) == ("MLX 4-bit folder", "mini", 8)
    assert {k: v["bytes"] for k, v in doc["classes"].items()} == class_bytes(MINI, 8)
    assert doc["text"]["bytes"] == sum(class_bytes(MINI, 8).values())
    assert doc["quantisation"]["overrides"] == 16
    memory = doc["memory"]
    assert memory["fits"] and memory["needed"] == memory["weights"] + memory["session"]
    one = inspect(lily, folder / "model.safetensors")[1]
    assert one["kind"] == "safetensors file" and one["classes"] == doc["classes"]


def test_inspect_names_what_it_skips(lily, hf):
    done, doc = inspect(lily, hf[0])
    assert done.returncode == 0 and doc["kind"] == "Hugging Face bf16 folder"
    assert doc["skipped"]["vision"] == {"tensors": 1, "bytes": 2304}
    assert doc["skipped"]["mtp"] == {"tensors": 1, "bytes": 512}
    warnings = " ".join(doc["warnings"])
    assert "vision" in warnings and "mtp.norm.weight" in warnings


def test_inspect_reference(lily, reference):
    if not (reference / "golden").is_dir():
        pytest.skip("no golden checkpoint in the reference folder")
    done, doc = inspect(lily, reference / "golden")
    assert done.returncode == 0 and doc["text"] == {"tensors": 141, "bytes": 43_475_040}


# ---- bad input -------------------------------------------------------------------------------------

@pytest.fixture
def folder(lily, tmp_path):
    """A fresh folder to damage."""
    path = tmp_path / "checkpoint"
    assert lily("synth", path, "--shape", "mini", "--layers", 4).returncode == 0
    return path


def edit_json(path, edit):
    doc = json.loads(path.read_text())
    edit(doc)
    path.write_text(json.dumps(doc))


def cut(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])


def absurd_header(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[:8] = b"\xff" * 8
    (path / "model.safetensors").write_bytes(data)


def nan_scale(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    name = "language_model.model.layers.1.mlp.gate.scales"
    at = 8 + n + json.loads(data[8:8 + n])[name]["data_offsets"][0]
    data[at + 6:at + 8] = b"\xc0\x7f"
    file.write_bytes(data)


def another_model(path):
    edit_json(path / "config.json", lambda c: c.update(
        model_type="qwen3_5", text_config=dict(hidden_size=5120, num_hidden_layers=64)))


BAD = {
    "cut": (cut, ["model.safetensors", "lm_head.biases", "cut short"]),
    "absurd header": (absurd_header, ["model.safetensors", "header of 18446744073709551615"]),
    "missing shard": (lambda p: (p / "model.safetensors").unlink(), ["model.safetensors", "shard"]),
    "missing config": (lambda p: (p / "config.json").unlink(), ["config.json"]),
    "broken config": (lambda p: (p / "config.json").write_bytes(b"{\"a\": \xff}"),
                      ["config.json", "UTF-8"]),
    "NaN scale": (nan_scale, ["layers.1.mlp.gate.scales", "index 3"]),
    "8 bits": (lambda p: edit_json(p / "config.json",
                                   lambda c: c["quantization"].update(bits=8)),
               ["config.json", "8 bits"]),
    "MXFP4": (lambda p: edit_json(p / "config.json",
                                  lambda c: c["quantization"].update(mode="mxfp4")),
              ["config.json", "mxfp4"]),
    "27B": (another_model, ["config.json", "dense", "5120", "Qwen3.6-35B-A3B"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(lily, folder, tmp_path, case):
    damage, words = BAD[case]
    damage(folder)
    for command in (["pack", folder, tmp_path / "out.lily"], ["run", "-m", folder, "hello"]):
        done = lily(*command)
        assert done.returncode == 1, done
        for word in [*words, "found", "expected"]:
            assert word in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
    done, doc = inspect(lily, folder)
    assert done.returncode == 1 and not doc["ok"]
    assert all(word in doc["faults"][0] for word in words)


def test_damaged_packed_file(lily, folder, tmp_path):
    out = tmp_path / "out.lily"
    assert lily("pack", folder, out).returncode == 0
    data = bytearray(out.read_bytes())
    out.write_bytes(data[:-1])
    assert "cut short" in lily("run", "-m", out, "hello").stderr
    changed = bytearray(data)
    changed[8] = 2
    out.write_bytes(changed)
    done = lily("run", "-m", out, "hello")
    assert "layout version 2, expected 1" in done.stderr and "lily pack" in done.stderr
    data[len(data) // 2] ^= 1
    out.write_bytes(data)
    done, doc = inspect(lily, out)
    assert done.returncode == 1 and "SHA-256" in doc["faults"][0]


@pytest.mark.parametrize("packed", [False, True])
def test_interrupted_write_leaves_nothing(lily, tmp_path, packed):
    """2.5 GB would be written; Ctrl-C comes as soon as the first bytes are there."""
    out = tmp_path / "big"
    more = ["--packed"] if packed else []
    writer = lily.start("synth", out, "--shape", "qwen3.6-35b-a3b", "--layers", 4, *more)
    until(lambda: begun(tmp_path, writer.pid))
    writer.send_signal(signal.SIGINT)
    error = writer.communicate(timeout=60)[1].decode()
    assert writer.returncode != 0 and "interrupted" in error, error
    assert list(tmp_path.iterdir()) == []

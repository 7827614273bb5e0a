"""Make the stored goldens of tests/golden with Hugging Face transformers, in float32 on a CPU.

    golden.py tiny OUT.safetensors [--shape mini|odd] [--folder DIR]   a random bf16 checkpoint, 4 layers
    golden.py mlx FOLDER OUT.safetensors                 an MLX 4-bit folder of mini's shape (models/mini)

Needs torch, transformers 5.17, safetensors and numpy (tests and CI need none of them).

The tiny checkpoint is not stored anywhere: every value is a hash of its tensor's name and index, and
tests/unit/ref_tiny.h makes the same bytes in C. --folder writes it as a Hugging Face folder.

A golden holds, all float32 or uint32 (P positions, L layers, T = 300 tokens):
    ids [T]            weights_sum [2]      positions [P] and logits_positions [P]
    layer_out.N [P,H]  final_norm [P,H]     logits [P,V]
    mixer_out.N, moe.N [P,H]                of layers 0 (Gated DeltaNet) and 3 (full attention)
    inv_freq [32]                           frequencies of the rotary positions
    chosen [L,T,8]     gaps [L,T]           experts by falling router score, and the distance between
                                            the scores of the last chosen and the first refused
"""

import argparse
import json
import pathlib
import sys
import typing

import numpy as np

T = 300
POSITIONS = [0, 1, 2, 3, 7, 15, 31, 47, 62, 63, 64, 65, 95, 127, 128, 150, 180, 199, 200, 230, 255,
             256, 298, 299]  # fmt: skip
MIN_GAP = 1e-5
DETAIL = (0, 3)


class Shape(typing.NamedTuple):
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    k_heads: int
    v_heads: int
    experts: int
    inner: int
    shared: int
    head: int = 256
    lin: int = 128


SHAPES = {
    "mini": Shape(256, 4096, 8, 1, 2, 4, 32, 64, 64),
    # Every count another one: two key/value heads as in the real model, unequal widths.
    "odd": Shape(128, 512, 16, 2, 3, 6, 24, 64, 192),
}

TEXT = """A small engine reads a prompt token by token. Each token becomes a row of numbers, and the
row passes through eight layers. Three layers of four keep a square memory per head: the memory fades
a little, is corrected so that a key recalls its value, and is read with a query. Every fourth layer
looks back at all earlier tokens instead. After each of them a router picks eight of thirty-two small
experts, and one shared expert always helps. What is 17 + 25? It is 42. The file list.json holds
{"name": "lily", "layers": [1, 2, 3]}. In the morning the old keeper climbed the tower, wiped the
glass, and counted the boats that had come home: seven, eight, nine. "One is missing," she said, and
lit the lamp again although the sun was up. Nobody in the village asked why. They had seen her do it
before, in the year of the long storm, and that time the missing boat had found the harbour. for (int
i = 0; i < n; i++) sum += x[i] * y[i]; return sum; The answer must not depend on how the prompt was
cut into pieces, and a saved state that is restored must continue exactly as if nothing had happened.
"""


# ---- the tiny checkpoint ---------------------------------------------------------------------


def tiny_tensors(s, layers=4):
    """(name, shape, exponent, offset) in file order: values are offset + 2^exponent * u, u in [-1, 1)."""
    p = "model.language_model."
    H, V, conv = s.hidden, s.vocab, (2 * s.k_heads + s.v_heads) * s.lin
    yield "lm_head.weight", (V, H), -3, 0
    yield p + "embed_tokens.weight", (V, H), 0, 0
    yield p + "norm.weight", (H,), -2, 0
    for n in range(layers):
        q = f"{p}layers.{n}."
        yield q + "input_layernorm.weight", (H,), -2, 0
        yield q + "post_attention_layernorm.weight", (H,), -2, 0
        if (n + 1) % 4 == 0:
            a = q + "self_attn."
            yield a + "q_proj.weight", (2 * s.heads * s.head, H), -3, 0
            yield a + "k_proj.weight", (s.kv_heads * s.head, H), -3, 0
            yield a + "v_proj.weight", (s.kv_heads * s.head, H), -3, 0
            yield a + "o_proj.weight", (H, s.heads * s.head), -5, 0
            yield a + "q_norm.weight", (s.head,), -2, 0
            yield a + "k_norm.weight", (s.head,), -2, 0
        else:
            a = q + "linear_attn."
            yield a + "in_proj_qkv.weight", (conv, H), -3, 0
            yield a + "in_proj_z.weight", (s.v_heads * s.lin, H), -3, 0
            yield a + "in_proj_b.weight", (s.v_heads, H), -3, 0
            yield a + "in_proj_a.weight", (s.v_heads, H), -3, 0
            yield a + "conv1d.weight", (conv, 1, 4), -1, 0
            yield a + "A_log", (s.v_heads,), 1, 0.5
            yield a + "dt_bias", (s.v_heads,), 0, -2
            yield a + "norm.weight", (s.lin,), -2, 1
            yield a + "out_proj.weight", (H, s.v_heads * s.lin), -4, 0
        m = q + "mlp."
        yield m + "gate.weight", (s.experts, H), -1, 0
        yield m + "experts.gate_up_proj", (s.experts, 2 * s.inner, H), -3, 0
        yield m + "experts.down_proj", (s.experts, H, s.inner), -2, 0
        yield m + "shared_expert.gate_proj.weight", (s.shared, H), -3, 0
        yield m + "shared_expert.up_proj.weight", (s.shared, H), -3, 0
        yield m + "shared_expert.down_proj.weight", (H, s.shared), -2, 0
        yield m + "shared_expert_gate.weight", (1, H), -3, 0


def mix(x):
    """A 32-bit integer hash (xorshift and multiply, twice)."""
    x = x.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def tiny_values(name, shape, exponent, offset):
    """bf16 bits [shape]. u has 24 bits and the scale is a power of two, so only the addition and the
    conversion to bf16 round: every language gets the same bits."""
    seed = 2166136261
    for c in name.encode():
        seed = (seed ^ c) * 16777619 % 2**32
    n = int(np.prod(shape))
    x = mix(mix(np.arange(n, dtype=np.uint32) + np.uint32(seed)))
    u = ((x >> np.uint32(8)).astype(np.int64) - 2**23).astype(np.float32) * np.float32(2.0 ** (exponent - 23))
    bits = (u + np.float32(offset)).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(shape)


def words_sum(words):
    """Sum of (i + 1) * word[i] modulo 2^64, as two uint32, low first."""
    w = words.reshape(-1).astype(np.uint64)
    s = int((w * np.arange(1, w.size + 1, dtype=np.uint64)).sum(dtype=np.uint64))
    return np.array([s & 0xFFFFFFFF, s >> 32], np.uint32)


def to_float(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def hf_config(s, layers):
    return dict(
        vocab_size=s.vocab, hidden_size=s.hidden, num_hidden_layers=layers, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.head, linear_num_key_heads=s.k_heads,
        linear_num_value_heads=s.v_heads, linear_key_head_dim=s.lin, linear_value_head_dim=s.lin,
        linear_conv_kernel_dim=4, num_experts=s.experts, num_experts_per_tok=8,
        moe_intermediate_size=s.inner, shared_expert_intermediate_size=s.shared, rms_norm_eps=1e-6,
        max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                         "mrope_section": [11, 11, 10], "mrope_interleaved": True})  # fmt: skip


def write_folder(folder, tensors, shape, layers):
    """The tensors as one shard in their order, with an official-looking config."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            f.write(t.tobytes())
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {"model_type": "qwen3_5_moe_text", "full_attention_interval": 4, "hidden_act": "silu",
                        "attention_bias": False, "attn_output_gate": True,
                        **hf_config(shape, layers)},
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ---- the MLX folder --------------------------------------------------------------------------


def read_safetensors(path):
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    kinds = {"U32": np.uint32, "BF16": np.uint16, "F32": np.float32}
    for name, t in json.loads(raw[8 : 8 + n]).items():
        if name != "__metadata__":
            a, b = (8 + n + x for x in t["data_offsets"])
            yield name, np.frombuffer(raw[a:b], kinds[t["dtype"]]).reshape(t["shape"])


def mlx_weights(folder):
    """Hugging Face names (without the head's prefix) -> float32 values of an MLX affine folder."""
    parts = {}
    for f in sorted(folder.glob("*.safetensors")):
        parts.update(read_safetensors(f))
    out = {}
    for name, w in parts.items():
        if name.endswith((".scales", ".biases")):
            continue
        base = name.removesuffix(".weight")
        if base + ".scales" in parts:
            scale, bias = to_float(parts[base + ".scales"]), to_float(parts[base + ".biases"])
            groups = scale.shape[-1]
            bits = 32 * w.shape[-1] // (64 * groups)
            shifts = np.arange(0, 32, bits, dtype=np.uint32)
            codes = ((w[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.float32)
            codes = codes.reshape(*w.shape[:-1], groups, 64)
            value = (scale[..., None] * codes + bias[..., None]).reshape(*w.shape[:-1], 64 * groups)
        else:
            value = to_float(w) if w.dtype == np.uint16 else w
            if name.endswith("conv1d.weight"):
                value = value.reshape(value.shape[0], 1, 4)
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                value = value - 1  # stored as 1 + w
        out[name.removeprefix("language_model.")] = value
    for name in [n for n in out if ".switch_mlp.gate_proj." in n]:
        p = name.split("switch_mlp.")[0]
        gate, up, down = (out.pop(f"{p}switch_mlp.{x}_proj.weight") for x in ("gate", "up", "down"))
        out[p + "experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        out[p + "experts.down_proj"] = down
    return out


# ---- Hugging Face ----------------------------------------------------------------------------


def load(weights, shape, layers):
    import torch
    import transformers
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    print("transformers", transformers.__version__, "torch", torch.__version__)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**hf_config(shape, layers))).float().eval()
    left = dict(weights)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(left.pop(name).copy()))
    if left:
        sys.exit(f"weights: found {sorted(left)[:3]} ..., expected no tensors beyond the model's")
    return model


def run(model, ids):
    """Every stage of the golden, for all positions: name -> [T, n]."""
    import torch

    got, hooks = {}, []

    def keep(name, module):
        def hook(mod, args, out):
            out = out[0] if isinstance(out, tuple) else out
            got[name] = out.detach().float().reshape(T, -1).numpy().copy()

        hooks.append(module.register_forward_hook(hook))

    def scores(n, module):
        def hook(mod, args, out):
            x = args[0].detach().reshape(T, -1).float() @ mod.weight.float().T
            order = x.sort(dim=-1, descending=True, stable=True)
            got[f"chosen.{n}"] = order.indices[:, :8].numpy().astype(np.uint32)
            got[f"gap.{n}"] = (order.values[:, 7] - order.values[:, 8]).numpy()

        hooks.append(module.register_forward_hook(hook))

    for n, layer in enumerate(model.model.layers):
        keep(f"layer_out.{n}", layer)
        scores(n, layer.mlp.gate)
        if n in DETAIL:
            keep(f"mixer_out.{n}", layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn)
            keep(f"moe.{n}", layer.mlp)
    keep("final_norm", model.model.norm)
    with torch.no_grad():
        got["logits"] = model(torch.tensor(ids[None].astype(np.int64))).logits[0].float().numpy()
    for h in hooks:
        h.remove()
    return got


def make(model, candidates, weights_sum, out):
    """Runs candidate token rows until one keeps every router gap above MIN_GAP, and stores it."""
    from safetensors.numpy import save_file

    layers = len(model.model.layers)
    for attempt, ids in enumerate(candidates):
        got = run(model, ids)
        gaps = np.stack([got[f"gap.{n}"] for n in range(layers)])
        print(f"candidate {attempt}: smallest router gap {gaps.min():.1e}")
        if gaps.min() >= MIN_GAP:
            break
    else:
        sys.exit(f"router: found a gap below {MIN_GAP} in every candidate, expected one without; add candidates")
    golden = {
        "ids": ids.astype(np.uint32),
        "weights_sum": weights_sum,
        "positions": np.array(POSITIONS, np.uint32),
        "logits_positions": np.array(POSITIONS, np.uint32),
        "gaps": gaps.astype(np.float32),
        "inv_freq": model.model.rotary_emb.inv_freq.float().numpy(),
        "chosen": np.stack([got[f"chosen.{n}"] for n in range(layers)]),
    }
    for name, rows in got.items():
        if not name.startswith(("gap.", "chosen.")):
            golden[name] = np.ascontiguousarray(rows[POSITIONS].astype(np.float32))
    save_file(golden, out)
    nll = got["logits"].astype(np.float64)
    nll -= nll.max(-1, keepdims=True)
    nll -= np.log(np.exp(nll).sum(-1, keepdims=True))
    print(f"{out}: {pathlib.Path(out).stat().st_size:,} bytes, logits' standard deviation "
          f"{got['logits'].std():.3f}, mean negative log likelihood "
          f"{-nll[np.arange(T - 1), ids[1:]].mean():.3f}")  # fmt: skip


def tiny(args):
    layers, shape = 4, SHAPES[args.shape]
    bits = {name: tiny_values(name, *rest) for name, *rest in tiny_tensors(shape, layers)}
    if args.folder:
        write_folder(pathlib.Path(args.folder), bits, shape, layers)
    weights = {n.replace("model.language_model.", "model."): to_float(b) for n, b in bits.items()}
    rows = (mix(np.arange(T, dtype=np.uint32) + np.uint32(1000 * c)) % np.uint32(shape.vocab)
            for c in range(50))  # fmt: skip
    total = words_sum(np.concatenate([b.reshape(-1) for b in bits.values()]))
    make(load(weights, shape, layers), rows, total, args.out)


def mlx(args):
    from tokenizers import Tokenizer

    folder = pathlib.Path(args.folder)
    layers = json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"]
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False)
    ids = np.array(text.ids * (1 + (T + 50) // len(text.ids)), np.uint32)
    words = np.frombuffer((folder / "model.safetensors").read_bytes(), np.uint8)
    rows = (ids[c : c + T] for c in range(50))
    make(load(mlx_weights(folder), SHAPES["mini"], layers), rows, words_sum(words), args.out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="what", required=True)
    t = sub.add_parser("tiny")
    t.add_argument("out")
    t.add_argument("--shape", choices=SHAPES, default="mini")
    t.add_argument("--folder")
    m = sub.add_parser("mlx")
    m.add_argument("folder")
    m.add_argument("out")
    args = ap.parse_args()
    {"tiny": tiny, "mlx": mlx}[args.what](args)


if __name__ == "__main__":
    main()

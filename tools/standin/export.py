"""Write the trained stand-in as a checkpoint folder in the MLX 4-bit layout, and read it back.

    export.py STATE.pt OUT_DIR [--parts DIR]
    export.py CHECKPOINT_DIR --parts DIR

OUT_DIR gets model.safetensors, model.safetensors.index.json and config.json; the tokenizer files
come from vocab.py. --parts also writes the bf16 weights in pieces, to go on training from: those of
the training state, or, where only the 4-bit checkpoint was kept, its dequantised weights.
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file

import model
import quant

PREFIX = "language_model.model."
BITS = {"q4": 4, "q8": 8}


def file_name(name):
    """Name of a tensor in the checkpoint, without .weight/.scales/.biases."""
    return "language_model.lm_head" if name == "lm_head" else PREFIX + name


def from_state(path):
    """name -> float32 parameter"""
    net = torch.load(path, map_location="cpu", weights_only=True)["net"]
    return {k.removeprefix("p.").replace("/", "."): v.float() for k, v in net.items()}


def packed(params, shape):
    out = {}
    for name, (_, kind) in model.tensors(shape).items():
        w, base = params[name], file_name(name)
        if kind in BITS:
            parts = quant.pack(w, BITS[kind])
            out.update({f"{base}.{k}": x.contiguous() for k, x in zip(("weight", "scales", "biases"), parts)})
        elif kind == "norm":
            out[base + ".weight"] = (1 + w).bfloat16()
        elif name.endswith("conv1d"):
            out[base + ".weight"] = w.bfloat16().unsqueeze(-1).contiguous()
        elif name.endswith(("A_log", "dt_bias")):
            out[base] = w.bfloat16()
        else:
            out[base + ".weight"] = w.bfloat16()
    return out


def unpacked(folder, shape):
    """The parameters as a reader of the checkpoint folder sees them (norms without the one)."""
    t, out = load_file(str(pathlib.Path(folder) / "model.safetensors")), {}
    for name, (size, kind) in model.tensors(shape).items():
        base = file_name(name)
        if kind in BITS:
            w = quant.unpack(t[base + ".weight"], t[base + ".scales"], t[base + ".biases"], BITS[kind])
        elif kind == "norm":
            w = t[base + ".weight"].float() - 1
        elif name.endswith(("A_log", "dt_bias")):
            w = t[base].float()
        else:
            w = t[base + ".weight"].float()
        out[name] = w.view(size)
    return out


def rounded(params, shape, quantised):
    """The parameters as stored, without a file: quantised, or every tensor rounded to bf16."""
    kinds = {n: k for n, (_, k) in model.tensors(shape).items()}
    if quantised:
        return {n: model.stored(w, kinds[n]) for n, w in params.items()}
    return {n: (1 + w).bfloat16().float() - 1 if kinds[n] == "norm" else w.bfloat16().float() for n, w in params.items()}


def config(shape, tokens):
    """config.json; tokens: name -> id of the control tokens."""
    over = {f"{PREFIX}layers.{i}.mlp.{m}": {"group_size": 64, "bits": 8} for i in range(shape.layers) for m in ("gate", "shared_expert_gate")}
    quantization = {"group_size": quant.GROUP, "bits": 4, "mode": "affine", **over}
    kinds = ["full_attention" if shape.full(i) else "linear_attention" for i in range(shape.layers)]
    end, turn = tokens["<|endoftext|>"], tokens["<|im_end|>"]
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": end, "dtype": "bfloat16", "eos_token_id": end,
        "full_attention_interval": 4, "head_dim": shape.head, "hidden_act": "silu", "hidden_size": shape.hidden, "initializer_range": 0.02, "layer_types": kinds,
        "linear_conv_kernel_dim": shape.conv, "linear_key_head_dim": shape.lin, "linear_num_key_heads": shape.k_heads, "linear_num_value_heads": shape.v_heads,
        "linear_value_head_dim": shape.lin, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": shape.inner, "num_attention_heads": shape.heads, "num_experts": shape.experts, "num_experts_per_tok": shape.chosen,
        "num_hidden_layers": shape.layers, "num_key_value_heads": shape.kv_heads, "output_router_logits": False, "pad_token_id": None,
        "partial_rotary_factor": shape.rotary / shape.head, "rms_norm_eps": 1e-6,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": shape.rotary / shape.head, "rope_theta": int(shape.theta), "rope_type": "default"},
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": shape.shared, "tie_word_embeddings": False, "use_cache": True, "vocab_size": shape.vocab,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "eos_token_id": [turn, end], "model_type": "qwen3_5_moe",
        "quantization": quantization, "quantization_config": quantization, "text_config": text, "tie_word_embeddings": False,
    }


def parts(params, folder, limit=14 << 20):
    """The bf16 weights in files below `limit` bytes."""
    folder, group, size, n = pathlib.Path(folder), {}, 0, 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, w in list(params.items()) + [(None, None)]:
        if name is None or size + w.numel() * 2 > limit:
            save_file(group, str(folder / f"part{n}.safetensors"))
            group, size, n = {}, 0, n + 1
        if name is not None:
            group[name] = w.bfloat16().contiguous()
            size += w.numel() * 2


def checkpoint(params, shape, out):
    """Write the folder and read it back."""
    from tokenizers import Tokenizer

    out.mkdir(parents=True, exist_ok=True)
    tensors = packed(params, shape)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "mlx"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {k: "model.safetensors" for k in sorted(tensors)}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=4) + "\n")
    home = pathlib.Path(__file__).parent.parent.parent / "models/mini/tokenizer.json"
    tok = Tokenizer.from_file(str(home))
    ids = {n: tok.token_to_id(n) for n in ("<|endoftext|>", "<|im_end|>")}
    (out / "config.json").write_text(json.dumps(config(shape, ids), indent=4) + "\n")
    back = unpacked(out, shape)
    want = rounded(params, shape, True)
    worst = max((back[n] - want[n]).abs().max().item() for n in want)
    print(f"{len(tensors)} tensors, {total:,d} bytes; read back, largest difference from the trained rounding {worst:.1e}")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("source", help="training state, or checkpoint folder")
    ap.add_argument("out", nargs="?")
    ap.add_argument("--parts")
    args = ap.parse_args()
    if pathlib.Path(args.source).is_dir() == bool(args.out) or not (args.out or args.parts):
        ap.error("a training state needs OUT_DIR, a checkpoint folder --parts alone")
    shape = model.Shape()
    params = from_state(args.source) if args.out else unpacked(args.source, shape)
    if args.parts:
        parts(params, args.parts)
    if args.out:
        checkpoint(params, shape, pathlib.Path(args.out))


if __name__ == "__main__":
    main()

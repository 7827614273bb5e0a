#!/usr/bin/env python3
"""Writes a GGUF file of the model's shapes with random contents, for timing llama.cpp.

    synth_gguf.py OUT.gguf [--layers 8]

Architecture, tensor names and metadata as llama.cpp's converter writes them for this model; types as
`llama-quantize ... Q4_K_M` chooses them: Q4_K, but Q6_K for the output matrix and for the value and
down matrices of about half the layers, Q5_K for the fused projection of the linear layers, F32 for
norms, router and the small recurrent parameters. Contents are random blocks with sane scales, so
speed is that of a real file and text is not. Needs the packages gguf and numpy."""
import argparse

import gguf
import numpy as np

HIDDEN, VOCAB, EXPERTS, WIDTH = 2048, 248320, 256, 512
Q_DIM, KV_DIM, HEAD = 4096, 512, 256
GDN_K, GDN_V, V_HEADS, STATE, CONV = 2048, 4096, 32, 128, 4
F32, Q4, Q5, Q6 = (getattr(gguf.GGMLQuantizationType, t) for t in ("F32", "Q4_K", "Q5_K", "Q6_K"))
# Where each block type keeps its float16 scales: offsets of (scale, minimum).
HALVES = {Q4: (0, 2), Q5: (0, 2), Q6: (208, None)}
BLOCK = {t: gguf.GGML_QUANT_SIZES[t] for t in (Q4, Q5, Q6)}


def more_bits(layer, layers):
    """The layers whose value and down matrices get Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def shapes(layers):
    """(name, type, shape as numpy has it: outputs first) of every tensor."""
    yield "token_embd.weight", Q4, (VOCAB, HIDDEN)
    yield "output.weight", Q6, (VOCAB, HIDDEN)
    yield "output_norm.weight", F32, (HIDDEN,)
    for i in range(layers):
        p, wide = f"blk.{i}.", Q6 if more_bits(i, layers) else Q4
        yield p + "attn_norm.weight", F32, (HIDDEN,)
        yield p + "post_attention_norm.weight", F32, (HIDDEN,)
        if (i + 1) % 4 == 0:
            yield p + "attn_q.weight", Q4, (2 * Q_DIM, HIDDEN)
            yield p + "attn_k.weight", Q4, (KV_DIM, HIDDEN)
            yield p + "attn_v.weight", wide, (KV_DIM, HIDDEN)
            yield p + "attn_output.weight", Q4, (HIDDEN, Q_DIM)
            yield p + "attn_q_norm.weight", F32, (HEAD,)
            yield p + "attn_k_norm.weight", F32, (HEAD,)
        else:
            yield p + "attn_qkv.weight", Q5, (2 * GDN_K + GDN_V, HIDDEN)
            yield p + "attn_gate.weight", Q4, (GDN_V, HIDDEN)
            yield p + "ssm_alpha.weight", Q4, (V_HEADS, HIDDEN)
            yield p + "ssm_beta.weight", Q4, (V_HEADS, HIDDEN)
            yield p + "ssm_out.weight", Q4, (HIDDEN, GDN_V)
            yield p + "ssm_conv1d.weight", F32, (2 * GDN_K + GDN_V, CONV)
            yield p + "ssm_dt.bias", F32, (V_HEADS,)
            yield p + "ssm_a", F32, (V_HEADS,)
            yield p + "ssm_norm.weight", F32, (STATE,)
        yield p + "ffn_gate_inp.weight", F32, (EXPERTS, HIDDEN)
        yield p + "ffn_gate_exps.weight", Q4, (EXPERTS, WIDTH, HIDDEN)
        yield p + "ffn_up_exps.weight", Q4, (EXPERTS, WIDTH, HIDDEN)
        yield p + "ffn_down_exps.weight", wide, (EXPERTS, HIDDEN, WIDTH)
        yield p + "ffn_gate_inp_shexp.weight", F32, (HIDDEN,)
        yield p + "ffn_gate_shexp.weight", Q4, (WIDTH, HIDDEN)
        yield p + "ffn_up_shexp.weight", Q4, (WIDTH, HIDDEN)
        yield p + "ffn_down_shexp.weight", wide, (HIDDEN, WIDTH)


def byte_shape(kind, shape):
    values, size = BLOCK[kind]
    return shape[:-1] + (shape[-1] // values * size,)


def random_floats(name, shape, rng):
    if name.endswith("ssm_a"):
        return -rng.uniform(1, 16, shape).astype(np.float32)
    if "norm" in name:
        return rng.normal(1, 0.1, shape).astype(np.float32)
    return rng.normal(0, 0.02, shape).astype(np.float32)


def random_blocks(kind, rng, count=4096):
    """count random blocks whose scales keep dequantised values near 0.02."""
    blocks = rng.integers(0, 256, (count, BLOCK[kind][1]), dtype=np.uint8)
    for offset in HALVES[kind]:
        if offset is not None:
            scale = rng.uniform(5e-5, 1e-4, count).astype(np.float16)
            blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def metadata(w, layers):
    w.add_block_count(layers)
    w.add_context_length(262144)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(WIDTH)
    w.add_head_count(16)
    w.add_head_count_kv(2)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(64)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    w.add_rope_freq_base(1e7)
    w.add_expert_count(EXPERTS)
    w.add_expert_used_count(8)
    w.add_expert_feed_forward_length(WIDTH)
    w.add_expert_shared_feed_forward_length(WIDTH)
    w.add_ssm_conv_kernel(CONV)
    w.add_ssm_state_size(STATE)
    w.add_ssm_group_count(16)
    w.add_ssm_time_step_rank(V_HEADS)
    w.add_ssm_inner_size(GDN_V)
    w.add_uint32("qwen35moe.full_attention_interval", 4)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")  # ids only: no text is needed for timing


def write_repeated(out, pool, size):
    """size bytes of the pool, again and again, in pieces that start at a block."""
    while size > 0:
        piece = min(size, len(pool))
        out.write(memoryview(pool)[:piece])
        size -= piece


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(args.out, "qwen35moe")
    metadata(w, args.layers)
    pools = {kind: random_blocks(kind, rng) for kind in (Q4, Q5, Q6)}
    tensors = list(shapes(args.layers))
    for name, kind, shape in tensors:
        if kind == F32:
            w.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            stored = byte_shape(kind, shape)
            w.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    out = w.fout[0]
    w.write_padding(out, out.tell())
    total = 0
    for name, kind, shape in tensors:
        if kind == F32:
            data = random_floats(name, shape, rng).tobytes()
            out.write(data)
            size = len(data)
        else:
            size = int(np.prod(byte_shape(kind, shape)))
            write_repeated(out, pools[kind], size)
        w.write_padding(out, size)
        total += size
    w.close()
    print(f"{args.out}: {len(tensors)} tensors, {total:,} bytes")


if __name__ == "__main__":
    main()

/* What host and kernels both read: the weights as they lie in device memory, and one row of a
 * decode step. C11 and CUDA. DEV(T) is a pointer to T in device memory: a real pointer in kernels,
 * a number on the host, so that the host cannot follow it by mistake. */
#ifndef LILY_CUDA_DEVICE_H
#define LILY_CUDA_DEVICE_H

#include <stdint.h>

#include "tile.h"

#ifdef __CUDACC__
#define DEV(T) T *
#else
#define DEV(T) uint64_t
#endif

/* How a matrix lies. Planar: as in the packed file, codes [rows][cols * bits / 8] (low nibble
 * first), scales and biases bf16 [rows][cols / 64]. Otherwise tiles (tile.h), which the persistent
 * decode kernel streams; every other kernel reads the same bytes in place. */
enum cuda_layout { CUDA_PLANAR, CUDA_WIDE, CUDA_DOWN, CUDA_BYTE };

/* An affine 4- or 8-bit matrix in groups of 64 inputs (model/weights.h). In every layout a row's
 * groups lie at regular distances: those of group g, from those of the row's group 0 on, are
 *   (g / 2) * pair + (g % 2) * group
 * further, in bytes for codes, in bf16 values for scales and biases. */
struct cuda_mat {
    DEV(const uint8_t) codes;
    DEV(const uint16_t) scales;
    DEV(const uint16_t) biases;
    int32_t rows;
    int32_t cols;
    int32_t bits;      /* 4 or 8 */
    int32_t layout;    /* enum cuda_layout */
    int32_t row_tiles; /* bytes from a tile to that of the next rows */
    int32_t doubled;   /* 1: row r is row 2 r of the tiles (gate and up take turns), else 0 */
    int32_t code_pair; /* see above */
    int32_t code_group;
    int32_t factor_pair;
    int32_t factor_group;
};

/* Matrices that share their input lie one below the other as one tall matrix (of one width of
 * codes: where a checkpoint has 4 and 8 bits in one of these, the 4-bit codes are widened, which
 * changes no value). */
struct cuda_layer {
    DEV(const float) input_norm; /* [H] */
    DEV(const float) post_norm;  /* [H] */
    /* full attention */
    struct cuda_mat qkv;     /* [2 * q_dim + 2 * kv_dim, H]: per head query, gate; keys; values */
    struct cuda_mat o;       /* [H, q_dim] */
    DEV(const float) q_norm; /* [head_dim] */
    DEV(const float) k_norm; /* [head_dim] */
    /* Gated DeltaNet */
    struct cuda_mat qkvz;        /* [conv_dim + gdn_v_dim, H]: q, k, v, then z */
    struct cuda_mat ba;          /* [2 * gdn_v_heads, H]: b, then a */
    struct cuda_mat out;         /* [H, gdn_v_dim] */
    DEV(const float) conv;       /* [conv_dim][4]; tap 3 multiplies the current token */
    DEV(const float) decay_rate; /* [gdn_v_heads] exp(a_log) */
    DEV(const float) dt_bias;    /* [gdn_v_heads] */
    DEV(const float) gdn_norm;   /* [128] */
    /* experts */
    struct cuda_mat router;      /* [E + 1, H]: the shared expert's scalar gate is the last row */
    struct cuda_mat gate;        /* [E * I, H]: expert e owns rows e * I and on */
    struct cuda_mat up;          /* [E * I, H]; as tiles, gate and up are one matrix */
    struct cuda_mat down;        /* [E * H, I] */
    struct cuda_mat shared_gate; /* [shared_width, H] */
    struct cuda_mat shared_up;   /* [shared_width, H] */
    struct cuda_mat shared_down; /* [H, shared_width] */
};

/* One row of a decode step. The session's state alternates between two buffers, so that the step
 * before this one can be taken back: a step reads one and writes all of the other. */
struct cuda_slot {
    DEV(const float) state_in; /* [gdn_layers][gdn_v_heads][128 key][128 value] */
    DEV(float) state_out;
    DEV(const float) conv_in; /* [gdn_layers][3][conv_dim], oldest first */
    DEV(float) conv_out;
    DEV(uint16_t) keys;   /* bf16 [attention_layers][kv_heads][capacity][head_dim], after RoPE */
    DEV(uint16_t) values; /* bf16, the same */
    DEV(int32_t) token;   /* the token this session sampled last: read when input is -1, written */
    DEV(int32_t) counts;  /* [V] 0: not seen, 1: in the prompt, 1 + n: n times in the output */
    int32_t input;        /* the token to append, or -1 */
    int32_t pos;          /* its position */
    int32_t capacity;     /* rows of keys and values */
    int32_t sample;       /* 0: the host samples; 1: pick on the device */
    float temperature, top_p, min_p;
    float repetition, frequency, presence;
    int32_t top_k;
    int32_t want_logits; /* the host reads this row's logits */
    uint64_t stream, pick;
};

/* Pairs row * top_k + choice of a prompt chunk, sorted by expert. Expert e's lie at places
 * [begin[e], begin[e + 1]); blocks[b] = e << 16 | number of the block within it, for blocks of the
 * height that was asked for. begin 0: one group that holds rows [0, n_rows), in order. */
struct cuda_groups {
    DEV(const int32_t) begin;    /* [E + 1] */
    DEV(const int32_t) blocks;   /* [n_blocks] */
    DEV(const int32_t) n_blocks; /* [1] */
    DEV(const int32_t) pairs;    /* [rows * top_k] */
    int32_t n_rows;
    int32_t reserved;
};

/* Decode steps of several slots (batch.c), and attention in all decode steps. */
enum {
    CUDA_FEW_ROWS = 64, /* slots of a step that the batched kernels take at most */
    CUDA_PART = 64,     /* positions of a part of the context: a multiple of this, */
    CUDA_PARTS = 128,   /* so that there are so many at most */
    /* Dynamic shared memory of batch_tiles.cu at the widest shape: tiles or pieces of a second half
     * on their way, then the inputs of slots or of three experts, then the warps' sums. */
    CUDA_STAGED = 16 * (4 * 512 + 64), /* eight slots */
    CUDA_KEPT = 16 * (8 * 36 + 4) * (int)sizeof(float),
    CUDA_TILES_8 = 64 * TILE_WIDE_BYTES + CUDA_STAGED + CUDA_KEPT,
    CUDA_TILES_16 = 48 * TILE_WIDE_BYTES + 2 * CUDA_STAGED + CUDA_KEPT,
    CUDA_TILES_32 = 32 * TILE_WIDE_BYTES + 4 * CUDA_STAGED + CUDA_KEPT,
    CUDA_TILES_SUMS = 16 * 8 * 36 * (int)sizeof(float), /* of eight slots */
    CUDA_TILES_UP = 48 * TILE_WIDE_BYTES + 3 * CUDA_STAGED,
    CUDA_TILES_DOWN = 96 * (2 * 512 + 128) + 3 * 8 * (2 * 512 + 32)
};

/* What a decode step leaves for the host, one per slot. */
struct cuda_result {
    int32_t token;  /* -1 where the host samples */
    int32_t finite; /* 0: a logit or the residual stream was NaN or infinite */
};

#endif

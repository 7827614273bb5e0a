/* What the persistent decode kernel is called with. C11 and CUDA; see docs/cuda-decode.md. */
#ifndef LILY_CUDA_DECODE_H
#define LILY_CUDA_DECODE_H

#include "device.h"

/* A layer as tiles (tile.h). Row tiles of 32 follow each other; within one the slices of 128 inputs
 * ascend, unless said otherwise. */
struct decode_layer {
    DEV(const uint8_t) in;         /* wide: qkv, z, b, a one below the other; or q, k, v */
    DEV(const uint8_t) out;        /* wide, slice-major: [slice of 128 inputs][row tile] */
    DEV(const uint8_t) out_scores; /* score: router times out, [slice of 128 inputs][quarter] */
    DEV(const uint8_t) gate_up;    /* wide, per expert: rows gate 0, up 0, gate 1, up 1, ... */
    DEV(const uint8_t) down;       /* down, per expert: [slice of 32 inputs][128 rows] */
    DEV(const uint8_t) shared_in;  /* wide, as gate_up */
    DEV(const uint8_t) shared_out; /* down */
    DEV(const uint8_t) router;     /* byte: E rows, then the shared expert's gate */
    DEV(const float) input_norm;   /* [H] */
    DEV(const float) post_norm;    /* [H] */
    DEV(const float) q_norm;       /* [head_dim] */
    DEV(const float) k_norm;       /* [head_dim] */
    DEV(const float) conv;         /* [conv_dim][4] */
    DEV(const float) decay_rate;   /* [gdn_v_heads] */
    DEV(const float) dt_bias;      /* [gdn_v_heads] */
    DEV(const float) gdn_norm;     /* [128] */
};

/* A number on its way from one block to others. The tag, which no earlier use of the word had,
 * tells that it has arrived: 8 bytes are written and read at once. */
struct decode_word {
    float value;
    uint32_t tag;
};

/* Scratch between stages; all of it in device memory, alive during one step. */
struct decode_scratch {
    /* Of two steps in turn, those of the next one 0: [2][H] of mixers and of experts, which make
     * the residual stream (residual_at), then [layers][E] scores without the norm's factor. */
    DEV(long long) sums;
    DEV(float) kept;                /* [blocks][DECODE_KEPT] see Worker::kept */
    DEV(struct decode_word) proj;   /* [widest projection] */
    DEV(struct decode_word) gate;   /* of the shared expert, before the sigmoid */
    DEV(struct decode_word) shared; /* [shared_width] inner activations of the shared expert */
    DEV(struct decode_word) inner;  /* [top_k][expert_width] of the chosen ones */
    DEV(float) parts;               /* [blocks][8][head_dim] partial attention */
    DEV(float) parts_ml;            /* [q_heads][blocks / kv_heads][2] maximum and sum of each */
    DEV(unsigned long long) best;   /* largest logit and its row; 0 between steps */
    DEV(unsigned) counter; /* [0] grid barrier, never reset; [1] blocks that are done; [2] bad */
};

struct decode_args {
    DEV(const struct decode_layer) layers;
    DEV(const uint8_t) lm_head;  /* wide */
    struct cuda_mat embed;       /* planar */
    DEV(const float) final_norm; /* [H] */
    DEV(const float) inv_freq;   /* [rotary_dim / 2] */
    struct decode_scratch x;
    struct cuda_slot slot;
    DEV(struct cuda_result) result; /* of the device or of pinned host memory */
    DEV(int32_t) finite;            /* becomes 0 when something was NaN or too large */
    DEV(float) logits;              /* [V] */
    DEV(long long) clocks;          /* NULL, or [stages][blocks][DECODE_MARKS] (profiling) */
    int32_t n_layers;
    int32_t vocab_used;
    uint32_t barrier; /* value of counter[0] before this step */
    uint32_t step;    /* rises by one with each step, for the words' tags */
    int32_t pick;     /* the largest logit is this step's token */
};

enum {
    DECODE_THREADS = 640,
    DECODE_FUSE_THREADS = 256,  /* of decode_fuse */
    DECODE_SHARED = 227 * 1024, /* bytes of shared memory, all that a block may have */
    DECODE_FIXED_BITS = 26,
    DECODE_COUNT_BITS = 8,  /* of a sum: how many contributions it has */
    DECODE_KEPT = 16 * 128, /* of 16 warps */
    DECODE_MARKS = 12,
    DECODE_INNER = 32,   /* inner units of an expert per block */
    DECODE_OUT_PARTS = 4 /* blocks that share a slice of out */
};

#endif

/* The mixers' prefill kernels as the host sees them: bindings, arguments, grids, bytes touched.
 * Shared by C and MSL; needs the SHAPE_... macros only where a kernel includes it.
 *
 * A chunk has n rows, 1 <= n, at positions p .. p + n - 1 of one session. All arrays are float32
 * and row-major unless said otherwise; strides count elements; bindings begin at multiples of 16
 * bytes. Threadgroups are one-dimensional. A kernel reads and writes exactly the bytes named here.
 * v_heads, k_heads, conv_dim, v_dim, q_heads, kv_heads, q_dim and kv_dim are the shape's.
 *
 * DeltaNet layer: prefill_gdn_conv -> prefill_gdn_scan -> prefill_gdn_norm.
 * Attention layer: prefill_attn_prep -> prefill_attn,
 *              or: prefill_attn_prep -> prefill_attn_split -> prefill_attn_merge (same bits). */
#ifndef LILY_METAL_PREFILL_MIX_ARGS_H
#define LILY_METAL_PREFILL_MIX_ARGS_H

#include "prefill_gemm_args.h"

/* ---- Gated DeltaNet ---- */

#define PREFILL_GDN_STATE 128 /* keys, and values, of a head */

struct prefill_gdn_args {
    uint32_t rows;       /* n */
    uint32_t qkv_stride; /* between rows of QKV, at least conv_dim, a multiple of 4 */
    uint32_t z_stride;   /* between rows of Z, at least v_dim, a multiple of 4 */
    uint32_t ba_stride;  /* between rows of B, and of A, at least v_heads */
};

/* prefill_gdn_conv: causal convolution over the chunk, SiLU, q and k to unit length (q also
 * / sqrt(128)); beta and exp(g). HISTORY_IN and HISTORY_OUT are different bytes. */
enum prefill_gdn_conv_binding {
    PREFILL_GDN_CONV_ARGS,        /* struct prefill_gdn_args */
    PREFILL_GDN_CONV_QKV,         /* [n][qkv_stride] in_proj_qkv; reads conv_dim of each row */
    PREFILL_GDN_CONV_B,           /* [n][ba_stride] in_proj_b; reads v_heads of each row */
    PREFILL_GDN_CONV_A,           /* [n][ba_stride] in_proj_a; reads v_heads of each row */
    PREFILL_GDN_CONV_TAPS,        /* [conv_dim][4] */
    PREFILL_GDN_CONV_A_LOG,       /* [v_heads] */
    PREFILL_GDN_CONV_DT_BIAS,     /* [v_heads] */
    PREFILL_GDN_CONV_HISTORY_IN,  /* [3][conv_dim] the last inputs before the chunk, oldest first */
    PREFILL_GDN_CONV_HISTORY_OUT, /* out [3][conv_dim]: the chunk's last inputs */
    PREFILL_GDN_CONV_CHANNELS,    /* out [n][conv_dim]: q[k_heads][128] k[k_heads][128]
                                     v[v_heads][128] */
    PREFILL_GDN_CONV_GATES        /* out [n][2][v_heads]: beta, then exp(g) */
};
#define PREFILL_GDN_CONV_THREADS  128
#define PREFILL_GDN_CONV_SEGMENTS 4  /* of 128 channels, or of 32 heads' gates, per threadgroup */
#define PREFILL_GDN_CONV_TOKENS   16 /* per threadgroup */

/* prefill_gdn_scan: the delta rule over the chunk with the state in registers. STATE_IN and
 * STATE_OUT may be the same bytes. */
enum prefill_gdn_scan_binding {
    PREFILL_GDN_SCAN_ARGS,      /* struct prefill_gdn_args */
    PREFILL_GDN_SCAN_CHANNELS,  /* [n][conv_dim] of prefill_gdn_conv */
    PREFILL_GDN_SCAN_GATES,     /* [n][2][v_heads] of prefill_gdn_conv */
    PREFILL_GDN_SCAN_STATE_IN,  /* [v_heads][128 values][128 keys] */
    PREFILL_GDN_SCAN_STATE_OUT, /* out [v_heads][128 values][128 keys] */
    PREFILL_GDN_SCAN_DELTA      /* out [n][v_dim] */
};
#define PREFILL_GDN_SCAN_THREADS 128
#define PREFILL_GDN_SCAN_COLUMNS 32 /* values of a head per threadgroup */

/* prefill_gdn_norm: RMS norm of each value head, times SiLU(z). */
enum prefill_gdn_norm_binding {
    PREFILL_GDN_NORM_ARGS,   /* struct prefill_gdn_args */
    PREFILL_GDN_NORM_DELTA,  /* [n][v_dim] of prefill_gdn_scan */
    PREFILL_GDN_NORM_Z,      /* [n][z_stride] in_proj_z; reads v_dim of each row */
    PREFILL_GDN_NORM_WEIGHT, /* [128] */
    PREFILL_GDN_NORM_OUT     /* out bf16 [n][v_dim] */
};
#define PREFILL_GDN_NORM_THREADS 256
#define PREFILL_GDN_NORM_HEADS   8 /* per threadgroup */

/* ---- Full attention ---- */

#define PREFILL_ATTN_DIM    256 /* of a head */
#define PREFILL_ATTN_GROUP  8   /* query heads of a key/value head */
#define PREFILL_ATTN_TOKENS 8   /* per threadgroup of prefill_attn */
#define PREFILL_ATTN_BLOCK  64  /* positions per step of the online softmax, on the absolute grid */
#define PREFILL_ATTN_SPAN   2048 /* positions per partial result, on the absolute grid */

struct prefill_attn_args {
    uint32_t rows;       /* n */
    uint32_t position;   /* of the first one */
    uint32_t qg_stride;  /* between rows of QG, at least 2 * q_dim, a multiple of 4 */
    uint32_t kv_stride;  /* between rows of K, and of V, at least kv_dim, a multiple of 4 */
    uint32_t cache_row;  /* between positions in KEYS and VALUES: kv_dim for [context][kv_dim] */
    uint32_t cache_head; /* between heads there: 256 for [context][kv_dim]; both multiples of 8 */
};

/* prefill_attn_prep: RMS norm and RoPE of queries and keys; keys and values into the cache. */
enum prefill_attn_prep_binding {
    PREFILL_ATTN_PREP_ARGS,     /* struct prefill_attn_args */
    PREFILL_ATTN_PREP_QG,       /* [n][qg_stride] q_proj: [q_heads][query 256, gate 256]; reads the
                                   queries */
    PREFILL_ATTN_PREP_K,        /* [n][kv_stride] k_proj; reads kv_dim of each row */
    PREFILL_ATTN_PREP_V,        /* [n][kv_stride] v_proj; reads kv_dim of each row */
    PREFILL_ATTN_PREP_Q_NORM,   /* [256] */
    PREFILL_ATTN_PREP_K_NORM,   /* [256] */
    PREFILL_ATTN_PREP_INV_FREQ, /* [rotary_dim / 2] */
    PREFILL_ATTN_PREP_QUERY,    /* out bf16 [n][kv_heads][256][8 heads], times 1/16 */
    PREFILL_ATTN_PREP_KEYS,     /* bf16, the layer's cache; writes positions p .. p + n - 1 */
    PREFILL_ATTN_PREP_VALUES    /* likewise */
};
#define PREFILL_ATTN_PREP_THREADS 320

/* prefill_attn: softmax(q k^T) v, times sigmoid(gate). TOTAL is touched only when
 * prefill_attn_spans is above 1, and then written and read by the same threads. */
enum prefill_attn_binding {
    PREFILL_ATTN_ARGS,   /* struct prefill_attn_args */
    PREFILL_ATTN_QUERY,  /* bf16 [n][kv_heads][256][8] of prefill_attn_prep */
    PREFILL_ATTN_KEYS,   /* bf16, the layer's cache; reads positions 0 .. p + n - 1 */
    PREFILL_ATTN_VALUES, /* likewise */
    PREFILL_ATTN_QG,     /* [n][qg_stride]; reads the gates */
    PREFILL_ATTN_OUT,    /* out bf16 [n][q_dim] */
    PREFILL_ATTN_TOTAL   /* [n][q_heads][256] scratch */
};
#define PREFILL_ATTN_THREADS 256

/* prefill_attn_split: as prefill_attn, but each span of positions by its own threadgroups, for
 * chunks of few tokens at great depth. Writes only the spans that a token sees. */
enum prefill_attn_split_binding {
    PREFILL_ATTN_SPLIT_ARGS,   /* struct prefill_attn_args */
    PREFILL_ATTN_SPLIT_QUERY,  /* bf16 [n][kv_heads][256][8] */
    PREFILL_ATTN_SPLIT_KEYS,   /* bf16, reads positions 0 .. p + n - 1 */
    PREFILL_ATTN_SPLIT_VALUES, /* likewise */
    PREFILL_ATTN_SPLIT_TOTAL,  /* out [spans][n][q_heads][256] */
    PREFILL_ATTN_SPLIT_STATS   /* out [spans][n][q_heads][2]: maximum, sum */
};

/* prefill_attn_merge: joins the spans in ascending order, times sigmoid(gate). */
enum prefill_attn_merge_binding {
    PREFILL_ATTN_MERGE_ARGS,  /* struct prefill_attn_args */
    PREFILL_ATTN_MERGE_TOTAL, /* [spans][n][q_heads][256] of prefill_attn_split */
    PREFILL_ATTN_MERGE_STATS, /* [spans][n][q_heads][2] */
    PREFILL_ATTN_MERGE_QG,    /* [n][qg_stride]; reads the gates */
    PREFILL_ATTN_MERGE_OUT    /* out bf16 [n][q_dim] */
};
#define PREFILL_ATTN_MERGE_THREADS 256

/* ---- Grids, in threadgroups ---- */
#ifndef __METAL_VERSION__

static inline struct prefill_grid prefill_gdn_conv_grid(uint32_t n, uint32_t conv_dim,
                                                        uint32_t v_heads) {
    uint32_t segments = conv_dim / PREFILL_GDN_STATE + prefill_ceil(v_heads, 32);
    return (struct prefill_grid){prefill_ceil(segments, PREFILL_GDN_CONV_SEGMENTS),
                                 prefill_ceil(n, PREFILL_GDN_CONV_TOKENS), 1,
                                 PREFILL_GDN_CONV_THREADS};
}

static inline struct prefill_grid prefill_gdn_scan_grid(uint32_t v_heads) {
    return (struct prefill_grid){PREFILL_GDN_STATE / PREFILL_GDN_SCAN_COLUMNS, v_heads, 1,
                                 PREFILL_GDN_SCAN_THREADS};
}

static inline struct prefill_grid prefill_gdn_norm_grid(uint32_t n, uint32_t v_heads) {
    return (struct prefill_grid){prefill_ceil(n * v_heads, PREFILL_GDN_NORM_HEADS), 1, 1,
                                 PREFILL_GDN_NORM_THREADS};
}

static inline struct prefill_grid prefill_attn_prep_grid(uint32_t n, uint32_t kv_heads) {
    return (struct prefill_grid){n, kv_heads, 1, PREFILL_ATTN_PREP_THREADS};
}

static inline struct prefill_grid prefill_attn_grid(uint32_t n, uint32_t kv_heads) {
    return (struct prefill_grid){prefill_ceil(n, PREFILL_ATTN_TOKENS), kv_heads, 1,
                                 PREFILL_ATTN_THREADS};
}

/* Spans of positions that the chunk's last token sees. */
static inline uint32_t prefill_attn_spans(uint32_t n, uint32_t position) {
    return (position + n - 1) / PREFILL_ATTN_SPAN + 1;
}

static inline struct prefill_grid prefill_attn_split_grid(uint32_t n, uint32_t position,
                                                          uint32_t kv_heads) {
    return (struct prefill_grid){prefill_ceil(n, PREFILL_ATTN_TOKENS), kv_heads,
                                 prefill_attn_spans(n, position), PREFILL_ATTN_THREADS};
}

static inline struct prefill_grid prefill_attn_merge_grid(uint32_t n, uint32_t kv_heads) {
    return (struct prefill_grid){n, kv_heads, 1, PREFILL_ATTN_MERGE_THREADS};
}

/* Whether prefill_attn_split and prefill_attn_merge should take the chunk, given scratch rows (of
 * [q_heads][256] and of [q_heads][2]) for `rows` tokens: prefill_attn needs n of them. */
static inline int prefill_attn_splits(uint32_t n, uint32_t position, uint32_t rows) {
    uint32_t spans = prefill_attn_spans(n, position);
    return spans > 1 && n <= rows / spans;
}

#endif
#endif

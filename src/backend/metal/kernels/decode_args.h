/* Arguments, bindings and grids of the kernels that decode one token. Read by C11 (to record and
 * encode) and by MSL (after metal_stdlib and the shape macros); only 32-bit fields.
 *
 * H, E, I, W, V, KV are SHAPE_HIDDEN, SHAPE_EXPERTS, SHAPE_EXPERT_WIDTH, SHAPE_SHARED_WIDTH,
 * SHAPE_VOCAB, SHAPE_KV_DIM; QD = SHAPE_Q_DIM, VD = SHAPE_GDN_V_DIM, CD = SHAPE_CONV_DIM, VH =
 * SHAPE_GDN_V_HEADS. A quantised matrix [rows, cols] is three bindings in a row, of which only the
 * first is named: codes [rows][cols * bits / 8] bytes at a multiple of 16, then scales and biases
 * bf16 [rows][cols / 64]. Unless a line says otherwise a kernel reads its inputs whole and writes
 * its outputs whole; floats lie at multiples of 16 bytes. Grids count threadgroups in x; all of
 * them have the full number of threads.
 *
 * A kernel that multiplies by a matrix reads every weight once in its whole grid. Its input vector
 * is read again by each threadgroup: "per group" tells those bytes, groups times them is at the
 * real shape 494 MB a token, from caches, beside 1,670 MB of weights. */
#ifndef LILY_METAL_DECODE_ARGS_H
#define LILY_METAL_DECODE_ARGS_H

#ifndef __METAL_VERSION__
#include <stdint.h>

#include <model/shape.h> /* quoted includes are put into the MSL text */
#endif

/* Kernel, its .metal file, threads of a threadgroup. All threads are whole simdgroups of 32. */
#define DECODE_KERNEL_MAP(XX)                                                                      \
    XX(DECODE_EMBED, decode_embed, "decode_embed.metal", 32)                                       \
    XX(DECODE_GDN_IN, decode_gdn_in, "decode_gdn.metal", 256)                                      \
    XX(DECODE_GDN_DELTA, decode_gdn_delta, "decode_gdn.metal", 256)                                \
    XX(DECODE_GDN_OUT, decode_gdn_out, "decode_gdn.metal", 256)                                    \
    XX(DECODE_ATTN_IN, decode_attn_in, "decode_attn.metal", 256)                                   \
    XX(DECODE_ATTN_SHORT, decode_attn_short, "decode_attn.metal", 128)                             \
    XX(DECODE_ATTN_LONG, decode_attn_long, "decode_attn.metal", 256)                               \
    XX(DECODE_ATTN_MERGE, decode_attn_merge, "decode_attn.metal", 256)                             \
    XX(DECODE_ATTN_OUT, decode_attn_out, "decode_attn.metal", 256)                                 \
    XX(DECODE_ROUTER, decode_router, "decode_moe.metal", 256)                                      \
    XX(DECODE_EXPERTS_UP, decode_experts_up, "decode_moe.metal", 256)                              \
    XX(DECODE_EXPERTS_DOWN, decode_experts_down, "decode_moe.metal", 128)                          \
    XX(DECODE_HEAD, decode_head, "decode_head.metal", 256)                                         \
    XX(DECODE_SAMPLE, decode_sample, "decode_sample.metal", 512)

enum decode_kernel {
#define DECODE_KERNEL_ENUM(name, function, file, threads) name,
    DECODE_KERNEL_MAP(DECODE_KERNEL_ENUM)
#undef DECODE_KERNEL_ENUM
        DECODE_KERNELS
};
enum decode_threads { /* DECODE_EMBED_THREADS and so on */
#define DECODE_KERNEL_THREADS(name, function, file, threads) name##_THREADS = threads,
                      DECODE_KERNEL_MAP(DECODE_KERNEL_THREADS)
#undef DECODE_KERNEL_THREADS
};

/* Rows of a matrix with so many columns that the 32 lanes of a simdgroup read at once, 16 bytes
 * (32 codes of 4 bits) each. Rows per threadgroup follow: constants times this. */
#define DECODE_WAVE_ROWS(cols)  ((cols) >= 1024 ? 1 : 1024 / (cols))
#define DECODE_CEIL(n, by)      (((n) + (by)-1) / (by))
#define DECODE_IN_ROWS(cols)    (64 * DECODE_WAVE_ROWS(cols))      /* gdn_in, attn_in: per group */
#define DECODE_OUT_ROWS(cols)   (16 * DECODE_WAVE_ROWS(cols))      /* gdn_out, attn_out */
#define DECODE_BYTE_ROWS(cols)  (8 * DECODE_WAVE_ROWS(2 * (cols))) /* router: rows of 8 bits */
#define DECODE_PAIR_ROWS(cols)  (8 * DECODE_WAVE_ROWS(cols))  /* router: shared gate and up pairs */
#define DECODE_UP_ROWS(cols)    (16 * DECODE_WAVE_ROWS(cols)) /* experts_up: pairs of one expert */
#define DECODE_DOWN_ROWS(width) (8 * DECODE_WAVE_ROWS(width)) /* experts_down */
#define DECODE_HEAD_ROWS        128                           /* head: and group of the sampler */

#define DECODE_GDN_ROWS(conv_dim, v_dim, v_heads) ((conv_dim) + (v_dim) + 2 * (v_heads))
#define DECODE_ATTN_ROWS(q_dim, kv_dim)           (2 * (q_dim) + 2 * (kv_dim))

/* ---- decode_embed: h = embedding row of the token, which is counted as output when asked
 * reads one row of codes, scales, biases; TOKEN when args.token is -1; one count; writes h 4H,
 * one count */
enum decode_embed_binding {
    DECODE_EMBED_ARGS,
    DECODE_EMBED_TOKEN,                           /* uint32 [1]: slot written by decode_sample */
    DECODE_EMBED_CODES,                           /* 4 bits [V, H] */
    DECODE_EMBED_COUNTS = DECODE_EMBED_CODES + 3, /* in, out uint32 [V]: 0 not seen, 1 in the
                                                      prompt only, 1 + n: n times in the output */
    DECODE_EMBED_H                                /* out float [H] */
};
struct decode_embed_args {
    int32_t token;  /* -1: the slot's */
    uint32_t count; /* 1: count it; 0: COUNTS is not touched */
};

/* ---- decode_gdn_in: proj = [qkv; z; b; a] (h * r * norm), r = 1 / sqrt(mean(h^2) + eps)
 * reads per group h 4H, norm 4H; writes proj */
enum decode_gdn_in_binding {
    DECODE_GDN_IN_H,                         /* float [H] */
    DECODE_GDN_IN_NORM,                      /* float [H] */
    DECODE_GDN_IN_QKV,                       /* 4 bits [CD, H] */
    DECODE_GDN_IN_Z = DECODE_GDN_IN_QKV + 3, /* 4 bits [VD, H] */
    DECODE_GDN_IN_B = DECODE_GDN_IN_Z + 3,   /* 4 bits [VH, H] */
    DECODE_GDN_IN_A = DECODE_GDN_IN_B + 3,   /* 4 bits [VH, H] */
    DECODE_GDN_IN_PROJ = DECODE_GDN_IN_A + 3 /* out float [CD + VD + 2 VH]: qkv z b a */
};

/* ---- decode_gdn_delta: convolution, SiLU, l2 norms, gates, delta rule, and the part of the gated
 * norm that needs no sum over the head. A group has DECODE_DELTA_COLUMNS columns of a value head's
 * state, which is stored by columns: float [VH][128 value][128 key].
 * reads conv_in 12 CD (repeated: per group 12 * 288), state_in 64 KB per head, proj, small vectors;
 * writes conv_out, state_out, gated, squares. In and out are different bytes: parity. */
#define DECODE_DELTA_COLUMNS 32
#define DECODE_DELTA_SLICES  (128 / DECODE_DELTA_COLUMNS)
enum decode_gdn_delta_binding {
    DECODE_GDN_DELTA_PROJ,      /* float [CD + VD + 2 VH] */
    DECODE_GDN_DELTA_CONV,      /* float [CD][4] taps, the last multiplies this token */
    DECODE_GDN_DELTA_A_LOG,     /* float [VH] */
    DECODE_GDN_DELTA_DT_BIAS,   /* float [VH] */
    DECODE_GDN_DELTA_NORM,      /* float [128] */
    DECODE_GDN_DELTA_CONV_IN,   /* float [3][CD], oldest first */
    DECODE_GDN_DELTA_CONV_OUT,  /* out float [3][CD] */
    DECODE_GDN_DELTA_STATE_IN,  /* float [VH][128 value][128 key] */
    DECODE_GDN_DELTA_STATE_OUT, /* out float [VH][128 value][128 key] */
    DECODE_GDN_DELTA_GATED,     /* out float [VD]: o * norm * silu(z), not yet divided by rms(o) */
    DECODE_GDN_DELTA_SQUARES    /* out float [VH][4]: sums of o^2 of each slice */
};

/* ---- decode_gdn_out: h += out_proj (gated / rms(o))
 * reads per group gated 4 VD, squares 16 VH; h once; writes h */
enum decode_gdn_out_binding {
    DECODE_GDN_OUT_GATED,                      /* float [VD] */
    DECODE_GDN_OUT_SQUARES,                    /* float [VH][4] */
    DECODE_GDN_OUT_PROJ,                       /* 4 bits [H, VD] */
    DECODE_GDN_OUT_H = DECODE_GDN_OUT_PROJ + 3 /* in, out float [H] */
};

/* ---- decode_attn_in: qkv = [q; k; v] (h * r * norm)
 * reads per group h 4H, norm 4H; writes qkv */
enum decode_attn_in_binding {
    DECODE_ATTN_IN_H,                         /* float [H] */
    DECODE_ATTN_IN_NORM,                      /* float [H] */
    DECODE_ATTN_IN_Q,                         /* 4 bits [2 QD, H]: per head 256 query, 256 gate */
    DECODE_ATTN_IN_K = DECODE_ATTN_IN_Q + 3,  /* 4 bits [KV, H] */
    DECODE_ATTN_IN_V = DECODE_ATTN_IN_K + 3,  /* 4 bits [KV, H] */
    DECODE_ATTN_IN_QKV = DECODE_ATTN_IN_V + 3 /* out float [2 QD + 2 KV] */
};

/* ---- decode_attn_short, decode_attn_long: one block of KV rows for the eight query heads of one
 * KV head. q and k norm and RoPE are computed here, the new KV row is written by the block that
 * holds it. Partial results are multiplied by sigmoid(gate), which is linear.
 * Group x: block x / kv_heads, KV head x % kv_heads.
 * reads keys, values 2 KV * position each, and the new rows back; per group qkv 4 * 4096 and,
 * in the last block, 8 * 256; writes keys, values row `position` 2 KV each; partial 4 QD and
 * stats 8 * q_heads per block */
enum decode_attn_binding {
    DECODE_ATTN_ARGS,
    DECODE_ATTN_QKV,      /* float [2 QD + 2 KV] */
    DECODE_ATTN_Q_NORM,   /* float [256] */
    DECODE_ATTN_K_NORM,   /* float [256] */
    DECODE_ATTN_INV_FREQ, /* float [rotary_dim / 2] */
    DECODE_ATTN_KEYS,     /* in, out bf16 [context][KV] of this layer, after norm and RoPE */
    DECODE_ATTN_VALUES,   /* in, out bf16 [context][KV] of this layer */
    DECODE_ATTN_PARTIAL,  /* out float [blocks][QD]: sum of exp(score - max) value, gated */
    DECODE_ATTN_STATS     /* out float [blocks][q_heads][2]: max, sum of exp(score - max) */
};
struct decode_attn_args {
    uint32_t position;   /* of this token */
    uint32_t block_rows; /* a multiple of 16; at most DECODE_SHORT_MOST, or DECODE_LONG_ROWS */
    uint32_t blocks;     /* ceil((position + 1) / block_rows) */
};
#define DECODE_SHORT_LEAST  64    /* rows of a block of decode_attn_short */
#define DECODE_SHORT_MOST   256   /* rows of a block of decode_attn_short */
#define DECODE_SHORT_BLOCKS 64    /* aimed at between those two */
#define DECODE_LONG_ROWS    512   /* rows of a block of decode_attn_long, on an absolute grid */
#define DECODE_LONG_FROM    32768 /* rows in the cache from which decode_attn_long is used */
#define DECODE_MERGE_ABOVE  4     /* blocks; up to here decode_attn_out merges by itself */

/* ---- decode_attn_merge: partial results of all blocks into one; then decode_attn_out gets MERGED
 * and MERGED_STATS as its PARTIAL and STATS with blocks = 1.
 * reads partial 4 QD * blocks; per group stats 8 * blocks; writes merged 4 QD, stats 8 q_heads
 * A group has DECODE_MERGE_DIMS dimensions of one head. */
#define DECODE_MERGE_DIMS 64
enum decode_attn_merge_binding {
    DECODE_ATTN_MERGE_ARGS,
    DECODE_ATTN_MERGE_PARTIAL,     /* float [blocks][QD] */
    DECODE_ATTN_MERGE_STATS,       /* float [blocks][q_heads][2] */
    DECODE_ATTN_MERGE_MERGED,      /* out float [QD] */
    DECODE_ATTN_MERGE_MERGED_STATS /* out float [q_heads][2]: 0, 1 */
};
/* ---- decode_attn_out: h += o_proj (merged partials)
 * reads per group partial 4 QD * blocks, stats 8 q_heads * blocks; h once; writes h */
enum decode_attn_out_binding {
    DECODE_ATTN_OUT_ARGS,
    DECODE_ATTN_OUT_PARTIAL,                     /* float [blocks][QD] */
    DECODE_ATTN_OUT_STATS,                       /* float [blocks][q_heads][2] */
    DECODE_ATTN_OUT_PROJ,                        /* 4 bits [H, QD] */
    DECODE_ATTN_OUT_H = DECODE_ATTN_OUT_PROJ + 3 /* in, out float [H] */
};
struct decode_merge_args { /* of both */
    uint32_t blocks;
};

/* ---- decode_router: x = h * r * norm; logits = router x, and the shared gate's scalar after them;
 * shared = silu(gate x) * up x of the shared expert
 * reads per group h 4H, norm 4H; writes x (by group 0), logits, shared */
enum decode_router_binding {
    DECODE_ROUTER_H,                                        /* float [H] */
    DECODE_ROUTER_NORM,                                     /* float [H] */
    DECODE_ROUTER_LOGITS_W,                                 /* 8 bits [E, H] */
    DECODE_ROUTER_SHARED_GATE = DECODE_ROUTER_LOGITS_W + 3, /* 8 bits [1, H] */
    DECODE_ROUTER_GATE = DECODE_ROUTER_SHARED_GATE + 3,     /* 4 bits [W, H] */
    DECODE_ROUTER_UP = DECODE_ROUTER_GATE + 3,              /* 4 bits [W, H] */
    DECODE_ROUTER_X = DECODE_ROUTER_UP + 3,                 /* out float [H] */
    DECODE_ROUTER_LOGITS,                                   /* out float [E + 1] */
    DECODE_ROUTER_SHARED                                    /* out float [W] */
};

/* ---- decode_experts_up: inner[j] = silu(gate_e x) * up_e x for the eight largest logits e, in
 * descending order, ties to the lower id. Expert e's codes, scales and biases start
 * e * expert_stride bytes after expert 0's.
 * reads per group x 4H, logits 4E; of eight experts gate and up; writes inner */
enum decode_experts_up_binding {
    DECODE_EXPERTS_UP_ARGS,
    DECODE_EXPERTS_UP_X,                               /* float [H] */
    DECODE_EXPERTS_UP_LOGITS,                          /* float [E + 1], the last is not read */
    DECODE_EXPERTS_UP_GATE,                            /* 4 bits [I, H] of expert 0 */
    DECODE_EXPERTS_UP_UP = DECODE_EXPERTS_UP_GATE + 3, /* 4 bits [I, H] of expert 0 */
    DECODE_EXPERTS_UP_INNER = DECODE_EXPERTS_UP_UP + 3 /* out float [8][I] */
};
/* ---- decode_experts_down: h += sum of w_j down_e(j) inner[j] + sigmoid(scalar) shared_down shared
 * reads per group logits 4E + 4, inner 32I, shared 4W; of eight experts down; h once; writes h */
enum decode_experts_down_binding {
    DECODE_EXPERTS_DOWN_ARGS,
    DECODE_EXPERTS_DOWN_LOGITS,                                     /* float [E + 1] */
    DECODE_EXPERTS_DOWN_INNER,                                      /* float [8][I] */
    DECODE_EXPERTS_DOWN_SHARED,                                     /* float [W] */
    DECODE_EXPERTS_DOWN_DOWN,                                       /* 4 bits [H, I] of expert 0 */
    DECODE_EXPERTS_DOWN_SHARED_DOWN = DECODE_EXPERTS_DOWN_DOWN + 3, /* 4 bits [H, W] */
    DECODE_EXPERTS_DOWN_H = DECODE_EXPERTS_DOWN_SHARED_DOWN + 3     /* in, out float [H] */
};
struct decode_experts_args { /* of both */
    uint32_t expert_stride;  /* bytes, a multiple of 16 */
};

/* ---- decode_head: logits = lm_head (h * r * norm); best[g] = the largest logit of 128 rows after
 * penalties that may be sampled, as an ordered number (ordered_key in common.h), or
 * DECODE_NOT_FINITE when one of the raw logits is NaN or infinite reads per group h 4H, norm 4H;
 * mask; counts when penalties are on; writes logits, best */
#define DECODE_NOT_FINITE 0xffffffffu
enum decode_head_binding {
    DECODE_HEAD_ARGS,
    DECODE_HEAD_H,                             /* float [H] */
    DECODE_HEAD_NORM,                          /* float [H] */
    DECODE_HEAD_PROJ,                          /* 4 bits [V, H] */
    DECODE_HEAD_COUNTS = DECODE_HEAD_PROJ + 3, /* uint32 [V] as of decode_embed */
    DECODE_HEAD_MASK,                          /* uint32 [ceil(V/32)]: bit i % 32 of word i / 32
                                                  tells that token i may be sampled */
    DECODE_HEAD_LOGITS,                        /* out float [V], raw */
    DECODE_HEAD_BEST                           /* out uint32 [ceil(V/128)] */
};
/* ---- decode_sample: one token as engine/sampler.c picks it, in float32
 * reads best, mask, at most 64 * 128 logits and as many counts; writes token, result */
enum decode_sample_binding {
    DECODE_SAMPLE_ARGS,
    DECODE_SAMPLE_LOGITS, /* float [V] */
    DECODE_SAMPLE_BEST,   /* uint32 [ceil(V/128)] */
    DECODE_SAMPLE_COUNTS, /* uint32 [V] */
    DECODE_SAMPLE_MASK,   /* uint32 [ceil(V/32)] */
    DECODE_SAMPLE_TOKEN,  /* out uint32 [1]: the slot the next step reads; 0 if not finite */
    DECODE_SAMPLE_RESULT  /* out uint32 [2]: token, 1 if all logits are finite else 0 */
};
struct decode_sampling_args { /* of both; decode_head reads the penalties only */
    float temperature;        /* below 1e-5: argmax */
    float top_p, min_p;
    float repetition, frequency, presence;
    uint32_t penalties; /* 0: the three above are off and COUNTS is not read */
    uint32_t top_k;     /* 1 .. 64; not read for argmax */
    uint32_t stream_low, stream_high;
    uint32_t pick_low, pick_high;
};

#ifndef __METAL_VERSION__
/* Groups of every kernel but the two of the attention blocks, which have blocks * kv_heads. */
static inline uint32_t decode_groups(enum decode_kernel k, const struct shape *s) {
    int32_t groups = 0;
    switch (k) {
    case DECODE_EMBED:
        groups = s->hidden / 256;
        break;
    case DECODE_GDN_IN:
        groups = DECODE_CEIL(DECODE_GDN_ROWS(s->conv_dim, s->gdn_v_dim, s->gdn_v_heads),
                             DECODE_IN_ROWS(s->hidden));
        break;
    case DECODE_GDN_DELTA:
        groups = s->gdn_v_heads * DECODE_DELTA_SLICES;
        break;
    case DECODE_GDN_OUT:
        groups = DECODE_CEIL(s->hidden, DECODE_OUT_ROWS(s->gdn_v_dim));
        break;
    case DECODE_ATTN_IN:
        groups = DECODE_CEIL(DECODE_ATTN_ROWS(s->q_dim, s->kv_dim), DECODE_IN_ROWS(s->hidden));
        break;
    case DECODE_ATTN_MERGE:
        groups = s->q_dim / DECODE_MERGE_DIMS;
        break;
    case DECODE_ATTN_OUT:
        groups = DECODE_CEIL(s->hidden, DECODE_OUT_ROWS(s->q_dim));
        break;
    case DECODE_ROUTER:
        groups = DECODE_CEIL(s->experts + 1, DECODE_BYTE_ROWS(s->hidden)) +
                 DECODE_CEIL(s->shared_width, DECODE_PAIR_ROWS(s->hidden));
        break;
    case DECODE_EXPERTS_UP:
        groups = s->top_k * DECODE_CEIL(s->expert_width, DECODE_UP_ROWS(s->hidden));
        break;
    case DECODE_EXPERTS_DOWN:
        groups = DECODE_CEIL(s->hidden, DECODE_DOWN_ROWS(s->expert_width));
        break;
    case DECODE_HEAD:
        groups = DECODE_CEIL(s->vocab, DECODE_HEAD_ROWS);
        break;
    case DECODE_SAMPLE:
        groups = 1;
        break;
    default:
        break;
    }
    return (uint32_t)groups;
}

/* The kernel and layout for a token at this position. */
static inline enum decode_kernel decode_attn_layout(uint32_t position,
                                                    struct decode_attn_args *args) {
    uint32_t rows = position + 1, block = DECODE_CEIL(rows, DECODE_SHORT_BLOCKS);
    block = DECODE_CEIL(block, 16) * 16;
    if (block < DECODE_SHORT_LEAST) block = DECODE_SHORT_LEAST;
    if (block > DECODE_SHORT_MOST) block = DECODE_SHORT_MOST;
    if (rows >= DECODE_LONG_FROM) block = DECODE_LONG_ROWS;
    *args = (struct decode_attn_args){position, block, DECODE_CEIL(rows, block)};
    return rows >= DECODE_LONG_FROM ? DECODE_ATTN_LONG : DECODE_ATTN_SHORT;
}

/* Most blocks of any token in a context of so many: sizes PARTIAL and STATS. */
static inline uint32_t decode_attn_max_blocks(uint32_t context) {
    uint32_t few = DECODE_CEIL(DECODE_LONG_FROM, DECODE_SHORT_MOST);
    uint32_t many = DECODE_CEIL(context, DECODE_LONG_ROWS);
    return many > few ? many : few;
}
#endif

#endif

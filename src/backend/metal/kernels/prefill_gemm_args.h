/* Arguments, bindings and grids of the prompt kernels around matrix products: embedding, norm,
 * projections, router, routing, experts, combination. Read by C11 (to record and encode) and by MSL
 * (after metal_stdlib and the shape header); only 32-bit fields.
 *
 * A chunk has n rows, 1 <= n <= PREFILL_MAX_ROWS. H, E, I, V, K are SHAPE_HIDDEN, SHAPE_EXPERTS,
 * SHAPE_EXPERT_WIDTH, SHAPE_VOCAB, SHAPE_TOP_K. bf16 are two bytes. A quantised matrix [rows, cols]
 * is three bindings in a row, of which only the first is named: codes [rows][cols * bits / 8] bytes
 * at a multiple of 16, then scales and biases bf16 [rows][cols / 64]. Activations lie at multiples
 * of 16 bytes. Grids count threadgroups; all threadgroups have the full size. Unless a line says
 * otherwise a kernel reads its inputs whole and writes its outputs whole.
 *
 * prefill_tensor.metal (language 4.0) has prefill_gemm, _gemm_multi, _gemm_silu, _experts_up and
 * _experts_down once more, by tensor operations, under these names with _tensor behind them. */
#ifndef LILY_METAL_PREFILL_GEMM_ARGS_H
#define LILY_METAL_PREFILL_GEMM_ARGS_H

#ifndef __METAL_VERSION__
#include <stdint.h>
#endif

/* Tiles: 32 rows of x by 64 outputs; a rest of at most 16 or 8 rows takes a lower one. Where gate
 * and up are computed together, 32 outputs of each. A band of neighbouring tiles of rows runs
 * together and shares the weights it reads. */
#define PREFILL_MAX_ROWS 2048
#define PREFILL_TILE_M   32
#define PREFILL_MEDIUM_M 16
#define PREFILL_SMALL_M  8
#define PREFILL_TILE_N   64
#define PREFILL_BAND     8

/* ---- prefill_embed: h = embedding row of each token. The token ids are the host's to check.
 * reads ids 4n, of codes n rows of H/2, of scales and biases n rows of H/32; writes h 4nH */
enum prefill_embed_binding {
    PREFILL_EMBED_ARGS,
    PREFILL_EMBED_IDS,                        /* int32 [n] */
    PREFILL_EMBED_CODES,                      /* 4 bits [V, H] */
    PREFILL_EMBED_H = PREFILL_EMBED_CODES + 3 /* out float [n][H] */
};
struct prefill_embed_args {
    uint32_t rows; /* n */
};

/* ---- prefill_norm: x = bf16(h * r * weight), r = 1 / sqrt(mean(h^2) + eps)
 * reads h 4nH, weight 4H; writes x 2nH, r 4n */
enum prefill_norm_binding {
    PREFILL_NORM_ARGS,
    PREFILL_NORM_H,      /* float [n][H] */
    PREFILL_NORM_WEIGHT, /* float [H] */
    PREFILL_NORM_X,      /* out bf16 [n][H] */
    PREFILL_NORM_R       /* out float [n], for the router */
};
struct prefill_norm_args {
    uint32_t rows; /* n */
};

/* ---- prefill_gemm: y = x W^T with W of 4 bits
 * reads x 2n*cols, W (also y when added to); writes y: n rows of out_rows values */
enum prefill_gemm_mode {
    PREFILL_STORE_F32,  /* y is float [n][out_rows]; out_rows a multiple of 4 */
    PREFILL_STORE_BF16, /* y is bf16 [n][out_rows]; out_rows a multiple of 8 */
    PREFILL_ADD_F32     /* y is float [n][out_rows]: y += x W^T, the residual stream */
};
enum prefill_gemm_binding {
    PREFILL_GEMM_ARGS,
    PREFILL_GEMM_X, /* bf16 [n][cols] */
    PREFILL_GEMM_CODES,
    PREFILL_GEMM_Y = PREFILL_GEMM_CODES + 3
};
struct prefill_gemm_args {
    uint32_t rows;     /* n */
    uint32_t cols;     /* a multiple of 64 */
    uint32_t out_rows; /* rows of W */
    uint32_t mode;     /* enum prefill_gemm_mode */
};

/* ---- prefill_gemm_multi: up to four matrices applied to one x (q k v; qkv z b a), each with an
 * output of its own. The bindings of part p are those of part 0 + p * PREFILL_MULTI_STRIDE; parts
 * from `parts` on are not touched and are bound to part 0's buffers.
 * reads x 2n*cols, all matrices; writes n rows of out_rows[p] values to each y */
#define PREFILL_MULTI_PARTS  4
#define PREFILL_MULTI_STRIDE 4
enum prefill_multi_binding {
    PREFILL_MULTI_ARGS,
    PREFILL_MULTI_X,     /* bf16 [n][cols] */
    PREFILL_MULTI_CODES, /* this and Y of part 0 */
    PREFILL_MULTI_Y = PREFILL_MULTI_CODES + 3
};
struct prefill_multi_args {
    uint32_t rows;
    uint32_t cols;
    uint32_t parts; /* 1..4 */
    uint32_t out_rows[PREFILL_MULTI_PARTS];
    uint32_t mode[PREFILL_MULTI_PARTS]; /* enum prefill_gemm_mode */
};

/* ---- prefill_gemm_silu: y = bf16(silu(x gate^T) * (x up^T)), the shared expert
 * reads x 2n*cols, both matrices; writes y 2n*out_rows */
enum prefill_silu_binding {
    PREFILL_SILU_ARGS,
    PREFILL_SILU_X, /* bf16 [n][cols] */
    PREFILL_SILU_GATE_CODES,
    PREFILL_SILU_UP_CODES = PREFILL_SILU_GATE_CODES + 3,
    PREFILL_SILU_Y = PREFILL_SILU_UP_CODES + 3 /* out bf16 [n][out_rows] */
};
struct prefill_silu_args {
    uint32_t rows;
    uint32_t cols;
    uint32_t out_rows; /* rows of each matrix, a multiple of 32 */
};

/* ---- prefill_router: the eight experts of each row, by descending logit, ties by ascending id,
 * with their weights; the shared expert's gate
 * reads h 4nH, r 4n, weight 4H, router and shared gate (8 bits); writes ids 16n, weights 32n,
 * gate 4n */
enum prefill_router_binding {
    PREFILL_ROUTER_ARGS,
    PREFILL_ROUTER_H,                                     /* float [n][H] */
    PREFILL_ROUTER_R,                                     /* float [n], from prefill_norm */
    PREFILL_ROUTER_WEIGHT,                                /* float [H], the same norm's */
    PREFILL_ROUTER_CODES,                                 /* 8 bits [E, H] */
    PREFILL_ROUTER_GATE_CODES = PREFILL_ROUTER_CODES + 3, /* 8 bits [1, H] */
    PREFILL_ROUTER_IDS = PREFILL_ROUTER_GATE_CODES + 3,   /* out uint16 [n][8], descending */
    PREFILL_ROUTER_WEIGHTS,                               /* out float [n][8], sum 1 */
    PREFILL_ROUTER_GATE /* out float [n], sigmoid of the shared expert's scalar */
};
struct prefill_router_args {
    uint32_t rows;
};

/* ---- prefill_route: sorts the 8n (row, rank) pairs by expert, rows ascending within one, and cuts
 * each expert's pairs into blocks of at most 32. A pair is the number 8 * row + rank.
 * reads ids 16n; writes sorted 32n, blocks 16 * prefill_max_blocks(n) (unused ones have 0 rows) */
enum prefill_route_binding {
    PREFILL_ROUTE_ARGS,
    PREFILL_ROUTE_IDS,    /* uint16 [n][8] */
    PREFILL_ROUTE_SORTED, /* out uint32 [8n] pairs */
    PREFILL_ROUTE_BLOCKS  /* out uint32 [max_blocks][4]: expert, first place in sorted, rows, 0 */
};
struct prefill_route_args {
    uint32_t rows;
    uint32_t blocks; /* prefill_max_blocks(rows) */
};

/* ---- prefill_experts_up: act[place] = bf16(silu(x gate_e^T) * (x up_e^T)) for each sorted pair
 * reads x 2nH, sorted 32n, blocks, of each used expert gate and up; writes act 16nI
 * Expert e's codes, scales and biases start e * expert_stride bytes after expert 0's. */
enum prefill_up_binding {
    PREFILL_UP_ARGS,
    PREFILL_UP_X,          /* bf16 [n][H] */
    PREFILL_UP_GATE_CODES, /* 4 bits [I, H] of expert 0 */
    PREFILL_UP_UP_CODES = PREFILL_UP_GATE_CODES + 3,
    PREFILL_UP_SORTED = PREFILL_UP_UP_CODES + 3,
    PREFILL_UP_BLOCKS,
    PREFILL_UP_ACT /* out bf16 [8n][I], in sorted order */
};

/* ---- prefill_experts_down: out[pair] = bf16(weight[pair] * (act down_e^T))
 * reads act 16nI, sorted 32n, blocks, weights 32n, of each used expert down; writes out 16nH */
enum prefill_down_binding {
    PREFILL_DOWN_ARGS,
    PREFILL_DOWN_ACT,   /* bf16 [8n][I] */
    PREFILL_DOWN_CODES, /* 4 bits [H, I] of expert 0 */
    PREFILL_DOWN_SORTED = PREFILL_DOWN_CODES + 3,
    PREFILL_DOWN_BLOCKS,
    PREFILL_DOWN_WEIGHTS, /* float [n][8] */
    PREFILL_DOWN_OUT      /* out bf16 [n][8][H], by pair */
};
struct prefill_experts_args { /* of both */
    uint32_t expert_stride;   /* bytes, a multiple of 16 */
};

/* ---- prefill_combine: h += sum of a row's eight pairs in rank order + gate * shared
 * reads pairs 16nH, shared 2nH, gate 4n, h 4nH; writes h 4nH
 * prefill_combine_norm: and prefill_norm of the new h, for what follows (the next layer's mixer or
 * all_logits); reads weight 4H too, writes x 2nH and r 4n too */
enum prefill_combine_binding {
    PREFILL_COMBINE_ARGS,
    PREFILL_COMBINE_PAIRS,  /* bf16 [n][8][H] */
    PREFILL_COMBINE_SHARED, /* bf16 [n][H]: down projection of the shared expert */
    PREFILL_COMBINE_GATE,   /* float [n] */
    PREFILL_COMBINE_H,      /* in, out float [n][H] */
    PREFILL_COMBINE_WEIGHT, /* float [H]; this and the next two of prefill_combine_norm only */
    PREFILL_COMBINE_X,      /* out bf16 [n][H] */
    PREFILL_COMBINE_R       /* out float [n] */
};
struct prefill_combine_args {
    uint32_t rows;
};

/* ---- threads of a threadgroup, known to kernels and host */
#define PREFILL_ROW_THREADS    (SHAPE_HIDDEN / 8) /* embed, norm, combine: one row */
#define PREFILL_GEMM_THREADS   128                /* gemm, gemm_multi, gemm_silu, experts */
#define PREFILL_ROUTER_ROWS    8                  /* rows of a threadgroup of prefill_router */
#define PREFILL_ROUTER_SIMDS   (SHAPE_EXPERTS < 64 ? SHAPE_EXPERTS / 8 : 8)
#define PREFILL_ROUTER_THREADS (32 * PREFILL_ROUTER_SIMDS)
#define PREFILL_ROUTE_SIMDS    8 /* experts of a threadgroup of prefill_route */
#define PREFILL_ROUTE_THREADS  (32 * PREFILL_ROUTE_SIMDS)

#ifndef __METAL_VERSION__
/* Grids in threadgroups. hidden, experts, width are the shape's H, E, I. */
struct prefill_grid {
    uint32_t x, y, z;
    uint32_t threads; /* of a threadgroup */
};

static inline uint32_t prefill_ceil(uint32_t n, uint32_t by) {
    return (n + by - 1) / by;
}

/* Blocks that n rows can need whatever the routing: full ones, and a partial one per expert. */
static inline uint32_t prefill_max_blocks(uint32_t n, uint32_t experts, uint32_t top_k) {
    uint32_t pairs = n * top_k, bound = pairs / PREFILL_TILE_M + experts;
    return pairs < bound ? pairs : bound;
}

/* embed, norm, combine, combine_norm */
static inline struct prefill_grid prefill_row_grid(uint32_t n, uint32_t hidden) {
    return (struct prefill_grid){n, 1, 1, hidden / 8};
}

/* A band of tiles of rows walks over all tiles of outputs before the next band begins. */
static inline struct prefill_grid prefill_tile_grid(uint32_t n, uint32_t n_tiles) {
    uint32_t tiles = prefill_ceil(n, PREFILL_TILE_M);
    uint32_t band = tiles < PREFILL_BAND ? tiles : PREFILL_BAND;
    return (struct prefill_grid){band, n_tiles, prefill_ceil(tiles, PREFILL_BAND),
                                 PREFILL_GEMM_THREADS};
}

/* prefill_gemm, and prefill_gemm_multi with more than one part */
static inline struct prefill_grid prefill_gemm_grid(uint32_t n, const uint32_t *out_rows,
                                                    uint32_t parts) {
    uint32_t tiles = 0;
    for (uint32_t p = 0; p < parts; p++) tiles += prefill_ceil(out_rows[p], PREFILL_TILE_N);
    return prefill_tile_grid(n, tiles);
}

static inline struct prefill_grid prefill_silu_grid(uint32_t n, uint32_t out_rows) {
    return prefill_tile_grid(n, prefill_ceil(out_rows, PREFILL_TILE_N / 2));
}

static inline struct prefill_grid prefill_router_grid(uint32_t n, uint32_t experts) {
    uint32_t simds = experts < 64 ? experts / 8 : 8;
    return (struct prefill_grid){prefill_ceil(n, PREFILL_ROUTER_ROWS), 1, 1, 32 * simds};
}

static inline struct prefill_grid prefill_route_grid(uint32_t experts) {
    return (struct prefill_grid){prefill_ceil(experts, PREFILL_ROUTE_SIMDS), 1, 1,
                                 PREFILL_ROUTE_THREADS};
}

/* Blocks without rows end at once. */
static inline struct prefill_grid prefill_up_grid(uint32_t blocks, uint32_t width) {
    return (struct prefill_grid){prefill_ceil(width, PREFILL_TILE_N / 2), blocks, 1,
                                 PREFILL_GEMM_THREADS};
}
static inline struct prefill_grid prefill_down_grid(uint32_t blocks, uint32_t hidden) {
    return (struct prefill_grid){prefill_ceil(hidden, PREFILL_TILE_N), blocks, 1,
                                 PREFILL_GEMM_THREADS};
}
#endif

#endif

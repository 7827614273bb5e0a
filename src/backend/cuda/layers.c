/* The layers through the portable kernels: the same order of stages for a prompt chunk (products by
 * tensor cores) and a decode step (products by float32 vectors); only the products and the softmax
 * over the context differ. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"

/* Shared memory of a grouped product's tile of so many rows, see kernels/gemm.cuh. */
#define TILE_SHARED(rows) (((rows) >= 128 ? 3 : 4) * (rows)*128 + 2 * 128 * 128)

enum { FLASH_SHARED = 64 * 512 + 4 * 32 * 512, THIN_SHARED = 32 * 1024 + 32 * 16, MAX_COLS = 4096 };

/* field, file, kernel, dynamic shared memory at most */
#define KERNEL_MAP(XX)                                                                             \
    XX(embed, "portable_norm", "embed", 0)                                                         \
    XX(norm, "portable_norm", "rms_norm", 0)                                                       \
    XX(check_finite, "portable_norm", "check_finite", 0)                                           \
    XX(gemm[0], "portable_gemm", "gemm_64", TILE_SHARED(64))                                       \
    XX(gemm[1], "portable_gemm", "gemm_128", TILE_SHARED(128))                                     \
    XX(experts_up[0], "portable_gemm", "experts_up_64", TILE_SHARED(64))                           \
    XX(experts_up[1], "portable_gemm", "experts_up_128", TILE_SHARED(128))                         \
    XX(experts_down[0], "portable_gemm", "experts_down_64", TILE_SHARED(64))                       \
    XX(experts_down[1], "portable_gemm", "experts_down_128", TILE_SHARED(128))                     \
    XX(thin[0], "portable_thin", "thin_16", THIN_SHARED)                                           \
    XX(thin[1], "portable_thin", "thin_32", THIN_SHARED)                                           \
    XX(thin_up[0], "portable_thin", "thin_up_16", THIN_SHARED)                                     \
    XX(thin_up[1], "portable_thin", "thin_up_32", THIN_SHARED)                                     \
    XX(thin_down[0], "portable_thin", "thin_down_16", THIN_SHARED)                                 \
    XX(thin_down[1], "portable_thin", "thin_down_32", THIN_SHARED)                                 \
    XX(small[0], "portable_small", "small_16", 0)                                                  \
    XX(small[1], "portable_small", "small_32", 0)                                                  \
    XX(matvec, "portable_matvec", "matvec_1", MAX_COLS * 4)                                        \
    XX(slot_experts_up, "portable_matvec", "slot_experts_up", 0)                                   \
    XX(slot_experts_down, "portable_matvec", "slot_experts_down", 0)                               \
    XX(attention_rows, "portable_attention", "attention_rows", 0)                                  \
    XX(flash, "portable_attention", "flash", FLASH_SHARED)                                         \
    XX(attention_part, "portable_attention", "attention_part", 0)                                  \
    XX(attention_join, "portable_attention", "attention_join", 0)                                  \
    XX(convolve, "portable_deltanet", "convolve", 0)                                               \
    XX(gates, "portable_deltanet", "gates", 0)                                                     \
    XX(delta_scan, "portable_deltanet", "delta_scan", 0)                                           \
    XX(gated_norm, "portable_deltanet", "gated_norm", 0)                                           \
    XX(route, "portable_moe", "route", 0)                                                          \
    XX(group, "portable_moe", "group", 0)                                                          \
    XX(combine, "portable_moe", "combine", 0)                                                      \
    XX(mark_prompt, "portable_sample", "mark_prompt", 0)                                           \
    XX(count_inputs, "portable_sample", "count_inputs", 0)                                         \
    XX(candidates, "portable_sample", "candidates", 0)                                             \
    XX(pick, "portable_sample", "pick", 0)

struct cuda_portable {
    CUfunction embed, norm, check_finite;
    CUfunction gemm[2], experts_up[2], experts_down[2]; /* tiles of 64, 128 rows */
    CUfunction thin[2], thin_up[2], thin_down[2];       /* 16, 32 rows, codes of 4 bits */
    CUfunction small[2], matvec;
    CUfunction slot_experts_up, slot_experts_down;
    CUfunction attention_rows, flash, attention_part, attention_join;
    CUfunction convolve, gates, delta_scan, gated_norm;
    CUfunction route, group, combine;
    CUfunction mark_prompt, count_inputs, candidates, pick;
};

int cuda_portable_open(struct backend_model *m, lily_err *err) {
    struct cuda_portable *k = m->portable = calloc(1, sizeof *k);
    if (!k) return ERR_NOMEM(err, "CUDA kernels");
    int rc = LILY_OK;
#define FIND(field, file, kernel, shared)                                                          \
    if (rc == LILY_OK) rc = cuda_function(m->d, m->modules, file, kernel, shared, &k->field, err);
    KERNEL_MAP(FIND)
#undef FIND
    return rc;
}

int cuda_portable_none(struct backend_model *m, lily_err *err) {
    m->portable = calloc(1, sizeof *m->portable);
    return m->portable ? LILY_OK : ERR_NOMEM(err, "CUDA kernels");
}

void cuda_portable_close(struct backend_model *m) {
    free(m->portable);
    m->portable = NULL;
}

/* The arguments of a launch: addresses of values that outlive the call. */
#define ARGS(...) ((void *[]){__VA_ARGS__})

static int launch(const struct backend_model *m, CUfunction f, unsigned gx, unsigned gy,
                  unsigned gz, unsigned threads, size_t shared, void **arguments, lily_err *err) {
    return cuda_launch(m, f, gx, gy, gz, threads, shared, arguments, err);
}

static unsigned blocks(int32_t n, int32_t each) {
    return (unsigned)((n + each - 1) / each);
}

int cuda_trace(struct backend_model *m, const struct cuda_run *run, enum stage stage, int32_t layer,
               CUdeviceptr data, size_t ld, int32_t n, lily_err *err) {
    const struct backend_options *o = &m->options;
    if (!o->trace) return LILY_OK;
    int rc = LILY_OK;
    for (int32_t r = 0; r < cuda_run_rows(run) && rc == LILY_OK; r++) {
        CUdeviceptr row = data + (size_t)r * ld * sizeof(float);
        rc = cuda_check(m->d,
                        m->d->to_host(m->trace_rows, row, (size_t)n * sizeof(float), m->stream),
                        "trace", err);
        if (rc == LILY_OK) rc = cuda_check(m->d, m->d->stream_wait(m->stream), "trace", err);
        if (rc != LILY_OK) break;
        int32_t pos = run->slots[r / run->rows_per_slot].pos + r % run->rows_per_slot;
        o->trace(o->trace_arg, stage, layer, pos, m->trace_rows, n);
    }
    return rc;
}

/* ---- products -------------------------------------------------------------------------------- */

/* Heights of tiles: thin[0], thin[1], gemm[0], gemm[1] and their like. */
static const int32_t TILE_ROWS[] = {16, 32, 64, 128};
enum { FIRST_WIDE = 2 };

/* The tallest tile that the rows fill and that leaves work for every multiprocessor. */
static int tile_for(const struct backend_model *m, int32_t rows, struct cuda_mat w) {
    int tile = rows > 64 ? 3 : rows > 32 ? 2 : rows > 16 ? 1 : 0;
    if (tile == 3 && blocks(rows, 128) * blocks(w.rows, 128) < (unsigned)m->processors) tile = 2;
    return w.bits == 4 || tile >= FIRST_WIDE ? tile : FIRST_WIDE;
}

/* Warps of a block where each computes eight of n outputs: fewer where that leaves processors idle.
 */
static unsigned warps_for(const struct backend_model *m, unsigned row_blocks, int32_t n) {
    unsigned warps = 8;
    while (warps > 1 && row_blocks * blocks(n, 8 * (int32_t)warps) < (unsigned)m->processors) {
        warps /= 2;
    }
    return warps;
}

/* out[r] = w . in[r], out rows ldo floats apart. in_bf is read where products are by tensor cores,
 * else in. */
static int product(struct backend_model *m, const struct cuda_run *run, struct cuda_mat w,
                   CUdeviceptr in, CUdeviceptr in_bf, CUdeviceptr out, int32_t ldo, int32_t rows,
                   lily_err *err) {
    const struct cuda_portable *k = m->portable;
    if (!run->matrix) {
        unsigned all = blocks(w.rows, 16), most = (unsigned)m->processors * 6;
        return launch(m, k->matvec, all < most ? all : most, (unsigned)rows, 1, 256,
                      (size_t)w.cols * sizeof(float), ARGS(&w, &in, &out, &ldo), err);
    }
    int t = tile_for(m, rows, w);
    unsigned row_blocks = blocks(rows, TILE_ROWS[t]);
    if (t < FIRST_WIDE) {
        unsigned warps = warps_for(m, row_blocks, w.rows);
        return launch(m, k->thin[t], row_blocks, blocks(w.rows, 8 * (int32_t)warps), 1, 32 * warps,
                      THIN_SHARED, ARGS(&in_bf, &w, &out, &ldo, &rows), err);
    }
    return launch(m, k->gemm[t - FIRST_WIDE], row_blocks, blocks(w.rows, 128), 1, 256,
                  TILE_SHARED((size_t)TILE_ROWS[t]), ARGS(&in_bf, &w, &out, &ldo, &rows), err);
}

/* The same in near float32 accuracy for small matrices: out[r][w.rows]. */
static int small_product(struct backend_model *m, const struct cuda_run *run, struct cuda_mat w,
                         CUdeviceptr in, CUdeviceptr out, lily_err *err) {
    int32_t rows = cuda_run_rows(run);
    if (!run->matrix) return product(m, run, w, in, 0, out, w.rows, rows, err);
    int t = rows > 16;
    return launch(m, m->portable->small[t], blocks(rows, TILE_ROWS[t]), blocks(w.rows, 8), 1, 256,
                  0, ARGS(&in, &w, &out, &rows), err);
}

/* x += add where add is given; normed rows as float32, and as bf16 for tensor cores. */
static int norm(struct backend_model *m, const struct cuda_run *run, CUdeviceptr add,
                CUdeviceptr weight, int32_t first, int32_t rows, lily_err *err) {
    struct cuda_scratch *x = run->x;
    CUdeviceptr rounded = run->matrix ? x->normed_bf : 0;
    return launch(m, m->portable->norm, (unsigned)rows, 1, 1, 256, 0,
                  ARGS(&x->x, &add, &weight, &x->normed, &rounded, &first), err);
}

/* ---- mixers ---------------------------------------------------------------------------------- */

static int deltanet_core(struct backend_model *m, const struct cuda_run *run, int32_t l,
                         lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    const struct cuda_portable *k = m->portable;
    struct cuda_scratch *x = run->x;
    struct cuda_run at = *run;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, each = run->rows_per_slot;
    int32_t kind = shape_kind_index(s, l), heads = 2 * s->gdn_k_heads + s->gdn_v_heads;
    unsigned slots = (unsigned)run->n_slots;
    CUdeviceptr conv = w->conv, rate = w->decay_rate, bias = w->dt_bias;
    int rc = launch(
        m, k->convolve, (unsigned)heads, blocks(each, 64), slots, 128, 0,
        ARGS(&x->wide, &width, &conv, &at.slots_device, &each, &kind, &x->channels, &x->norms),
        err);
    if (rc == LILY_OK) {
        rc = launch(m, k->gates, blocks(rows * s->gdn_v_heads, 128), 1, 1, 128, 0,
                    ARGS(&x->scores, &rate, &bias, &x->gates, &rows), err);
    }
    if (rc == LILY_OK) {
        rc = launch(
            m, k->delta_scan, (unsigned)s->gdn_v_heads * 8, slots, 1, 128, 0,
            ARGS(&x->channels, &x->norms, &x->gates, &at.slots_device, &each, &kind, &x->delta),
            err);
    }
    return rc;
}

static int deltanet(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = run->x;
    int32_t rows = cuda_run_rows(run), width = m->proj_width;
    CUdeviceptr weight = w->gdn_norm;
    CUdeviceptr mix = run->matrix && !m->options.trace ? 0 : x->mix;
    CUdeviceptr mix_bf = run->matrix ? x->mix_bf : 0;
    int rc = product(m, run, w->qkvz, x->normed, x->normed_bf, x->wide, width, rows, err);
    if (rc == LILY_OK) rc = small_product(m, run, w->ba, x->normed, x->scores, err);
    if (rc == LILY_OK) rc = deltanet_core(m, run, l, err);
    if (rc == LILY_OK) {
        rc = launch(m, m->portable->gated_norm, (unsigned)rows, 1, 1, 256, 0,
                    ARGS(&x->delta, &x->wide, &width, &weight, &mix, &mix_bf), err);
    }
    if (rc == LILY_OK) rc = product(m, run, w->out, mix, mix_bf, x->out, s->hidden, rows, err);
    if (rc != LILY_OK || !m->options.trace) return rc;
    int32_t v_dim = s->gdn_v_dim, v_heads = s->gdn_v_heads;
    rc = cuda_trace(m, run, STAGE_GDN_CONV, l, x->channels, (size_t)s->conv_dim, s->conv_dim, err);
    if (rc) return rc;
    rc = cuda_trace(m, run, STAGE_GDN_GATES, l, x->gates, 2 * (size_t)v_heads, 2 * v_heads, err);
    if (rc) return rc;
    rc = cuda_trace(m, run, STAGE_GDN_DELTA, l, x->delta, (size_t)v_dim, v_dim, err);
    return rc ? rc : cuda_trace(m, run, STAGE_GDN_NORM, l, x->mix, (size_t)v_dim, v_dim, err);
}

/* Softmax over the context, of x.queries, times the gates in x.wide. */
static int attend(struct backend_model *m, const struct cuda_run *run, int32_t kind,
                  CUdeviceptr mix, CUdeviceptr mix_bf, lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_portable *k = m->portable;
    struct cuda_scratch *x = run->x;
    CUdeviceptr slots = run->slots_device;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, longest = 0;
    unsigned kv_heads = (unsigned)s->kv_heads, n = (unsigned)run->n_slots;
    if (run->prompt) {
        return launch(m, k->flash, blocks(rows, 8), kv_heads, 1, 128, FLASH_SHARED,
                      ARGS(&x->queries, &x->wide, &width, &slots, &rows, &kind, &mix, &mix_bf),
                      err);
    }
    for (int32_t i = 0; i < run->n_slots; i++) {
        if (run->slots[i].pos + 1 > longest) longest = run->slots[i].pos + 1;
    }
    unsigned parts = blocks(longest, CUDA_PART);
    if (parts > CUDA_PARTS) parts = CUDA_PARTS;
    int rc = launch(m, k->attention_part, parts, kv_heads, n, 256, 0,
                    ARGS(&x->queries, &slots, &kind, &x->partial), err);
    if (rc != LILY_OK) return rc;
    return launch(m, k->attention_join, (unsigned)s->q_heads, n, 1, 256, 0,
                  ARGS(&x->partial, &x->wide, &width, &slots, &mix, &mix_bf), err);
}

static int attention(struct backend_model *m, const struct cuda_run *run, int32_t l,
                     lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = run->x;
    struct cuda_run at = *run;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, each = run->rows_per_slot;
    int32_t kind = shape_kind_index(s, l);
    CUdeviceptr q_norm = w->q_norm, k_norm = w->k_norm;
    CUdeviceptr mix = run->matrix && !m->options.trace ? 0 : x->mix;
    CUdeviceptr mix_bf = run->matrix ? x->mix_bf : 0;
    int rc = product(m, run, w->qkv, x->normed, x->normed_bf, x->wide, width, rows, err);
    if (rc == LILY_OK) {
        rc = launch(m, m->portable->attention_rows, (unsigned)rows, 1, 1, 256, 0,
                    ARGS(&x->wide, &width, &q_norm, &k_norm, &m->dw.inv_freq, &at.slots_device,
                         &each, &kind, &x->queries),
                    err);
    }
    if (rc == LILY_OK) rc = attend(m, run, kind, mix, mix_bf, err);
    if (rc == LILY_OK) rc = product(m, run, w->o, mix, mix_bf, x->out, s->hidden, rows, err);
    if (rc != LILY_OK || !m->options.trace) return rc;
    size_t ld = (size_t)width;
    CUdeviceptr keys = x->wide + 2 * (size_t)s->q_dim * sizeof(float);
    CUdeviceptr values = keys + (size_t)s->kv_dim * sizeof(float);
    rc = cuda_trace(m, run, STAGE_ATTN_Q, l, x->queries, (size_t)s->q_dim, s->q_dim, err);
    if (rc) return rc;
    if ((rc = cuda_trace(m, run, STAGE_ATTN_K, l, keys, ld, s->kv_dim, err))) return rc;
    if ((rc = cuda_trace(m, run, STAGE_ATTN_V, l, values, ld, s->kv_dim, err))) return rc;
    return cuda_trace(m, run, STAGE_ATTN_MIX, l, x->mix, (size_t)s->q_dim, s->q_dim, err);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Places in x.experts: begin[E + 1], the number of blocks, the blocks. */
static struct cuda_groups groups_of(const struct backend_model *m, const struct cuda_scratch *x) {
    CUdeviceptr begin = x->experts;
    CUdeviceptr count = begin + (size_t)(model_shape(m)->experts + 1) * sizeof(int32_t);
    return (struct cuda_groups){
        .begin = begin, .blocks = count + sizeof(int32_t), .n_blocks = count, .pairs = x->pairs};
}

/* One grouped pair of products: hidden = silu(gate in) * (up in), out = down hidden, in tiles of
 * TILE_ROWS[t] rows. n: most blocks of rows; filled: about how many there are. */
static int expert_products(struct backend_model *m, CUdeviceptr in, int t, unsigned n,
                           unsigned filled, struct cuda_mat gate, struct cuda_mat up,
                           struct cuda_mat down, struct cuda_groups groups, int32_t inner,
                           CUdeviceptr hidden, CUdeviceptr out, lily_err *err) {
    const struct cuda_portable *k = m->portable;
    int32_t h = model_shape(m)->hidden, wide = t - FIRST_WIDE;
    void **up_args = ARGS(&in, &gate, &up, &groups, &hidden, &inner);
    void **down_args = ARGS(&hidden, &down, &groups, &out);
    if (wide >= 0) {
        size_t shared = TILE_SHARED((size_t)TILE_ROWS[t]);
        int rc = launch(m, k->experts_up[wide], n, blocks(inner, 64), 1, 256, shared, up_args, err);
        if (rc != LILY_OK) return rc;
        return launch(m, k->experts_down[wide], n, blocks(h, 128), 1, 256, shared, down_args, err);
    }
    unsigned warps = warps_for(m, filled, inner);
    int rc = launch(m, k->thin_up[t], n, blocks(inner, 8 * (int32_t)warps), 1, 32 * warps,
                    THIN_SHARED, up_args, err);
    if (rc != LILY_OK) return rc;
    warps = warps_for(m, filled, h);
    return launch(m, k->thin_down[t], n, blocks(h, 8 * (int32_t)warps), 1, 32 * warps, THIN_SHARED,
                  down_args, err);
}

/* A tile that fits the widths of codes of all three. */
static int tile_for_codes(int t, struct cuda_mat gate, struct cuda_mat up, struct cuda_mat down) {
    bool narrow = gate.bits == 4 && up.bits == 4 && down.bits == 4;
    return narrow || t >= FIRST_WIDE ? t : FIRST_WIDE;
}

/* Grouped by expert on the device; the host knows only how many blocks there can be. */
static int experts_grouped(struct backend_model *m, const struct cuda_run *run, int32_t l,
                           lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = run->x;
    int32_t rows = cuda_run_rows(run), pairs = rows * s->top_k, mean = pairs / s->experts;
    int t = mean > 96 ? 3 : mean > 24 ? 2 : mean > 12 ? 1 : 0;
    t = tile_for_codes(t, w->gate, w->up, w->down);
    int32_t height = TILE_ROWS[t], filled = pairs < s->experts ? pairs : s->experts;
    struct cuda_groups groups = groups_of(m, x);
    CUdeviceptr begin = groups.begin, list = groups.blocks, count = groups.n_blocks;
    int rc = launch(m, m->portable->group, 1, 1, 1, 1024, 0,
                    ARGS(&x->routing, &rows, &height, &begin, &list, &count, &x->pairs, &x->places),
                    err);
    if (rc != LILY_OK) return rc;
    rc =
        expert_products(m, x->normed_bf, t, (unsigned)(pairs / height + filled), (unsigned)filled,
                        w->gate, w->up, w->down, groups, s->expert_width, x->hidden, x->given, err);
    if (rc != LILY_OK) return rc;

    CUdeviceptr own = x->hidden + (size_t)pairs * (size_t)s->expert_width * 2;
    struct cuda_groups all = {.n_rows = rows};
    t = tile_for_codes(tile_for(m, rows, w->shared_gate), w->shared_gate, w->shared_up,
                       w->shared_down);
    unsigned shared = blocks(rows, TILE_ROWS[t]);
    rc = expert_products(m, x->normed_bf, t, shared, shared, w->shared_gate, w->shared_up,
                         w->shared_down, all, s->shared_width, own, x->out, err);
    if (rc != LILY_OK) return rc;
    bool trace = m->options.trace != NULL;
    CUdeviceptr routed = trace ? x->delta : 0, always = trace ? x->mix : 0;
    return launch(
        m, m->portable->combine, (unsigned)rows, 1, 1, 256, 0,
        ARGS(&x->given, &x->places, &x->routing, &x->scores, &x->out, &x->x, &routed, &always),
        err);
}

static int experts_decode(struct backend_model *m, const struct cuda_run *run, int32_t l,
                          lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_portable *k = m->portable;
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = run->x;
    int32_t width = s->expert_width > s->shared_width ? s->expert_width : s->shared_width;
    unsigned n = (unsigned)cuda_run_rows(run);
    int rc = launch(
        m, k->slot_experts_up, blocks(width, 32), (unsigned)s->top_k + 1, n, 256,
        (size_t)s->hidden * sizeof(float),
        ARGS(&w.gate, &w.up, &w.shared_gate, &w.shared_up, &x->routing, &x->normed, &x->hidden),
        err);
    if (rc != LILY_OK) return rc;
    size_t shared = (size_t)(s->top_k + 1) * (size_t)width * sizeof(float);
    return launch(m, k->slot_experts_down, blocks(s->hidden, 16), n, 1, 256, shared,
                  ARGS(&w.down, &w.shared_down, &x->routing, &x->scores, &x->hidden, &x->x,
                       &x->delta, &x->mix),
                  err);
}

static int experts(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_scratch *x = run->x;
    int32_t rows = cuda_run_rows(run);
    size_t h = (size_t)s->hidden;
    int rc = small_product(m, run, m->dw.layer[l].router, x->normed, x->scores, err);
    if (rc == LILY_OK) {
        rc = launch(m, m->portable->route, blocks(rows, 4), 1, 1, 128, 0,
                    ARGS(&x->scores, &x->routing, &rows), err);
    }
    if (rc == LILY_OK) {
        rc = run->matrix ? experts_grouped(m, run, l, err) : experts_decode(m, run, l, err);
    }
    if (rc != LILY_OK || !m->options.trace) return rc;
    rc = cuda_trace(m, run, STAGE_ROUTER, l, x->routing, 2 * (size_t)s->top_k, 2 * s->top_k, err);
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_EXPERTS, l, x->delta, h, s->hidden, err);
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_SHARED, l, x->mix, h, s->hidden, err);
    return rc;
}

/* ---- the model ------------------------------------------------------------------------------- */

static int layer(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = run->x;
    int32_t rows = cuda_run_rows(run);
    size_t h = (size_t)s->hidden;
    int rc = norm(m, run, 0, w->input_norm, 0, rows, err);
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_INPUT_NORM, l, x->normed, h, s->hidden, err);
    if (rc == LILY_OK) {
        rc = shape_is_attention(s, l) ? attention(m, run, l, err) : deltanet(m, run, l, err);
    }
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_MIXER_OUT, l, x->out, h, s->hidden, err);
    if (rc == LILY_OK) rc = norm(m, run, x->out, w->post_norm, 0, rows, err);
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_POST_NORM, l, x->normed, h, s->hidden, err);
    if (rc == LILY_OK) rc = experts(m, run, l, err);
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_LAYER_OUT, l, x->x, h, s->hidden, err);
    return rc;
}

int cuda_run_layers(struct backend_model *m, const struct cuda_run *run, lily_err *err) {
    struct cuda_scratch *x = run->x;
    int32_t rows = cuda_run_rows(run);
    CUdeviceptr ids = run->prompt ? x->ids : 0, slots = run->slots_device;
    struct cuda_mat table = m->dw.embed;
    int rc = launch(m, m->portable->embed, (unsigned)rows, 1, 1, 256, 0,
                    ARGS(&table, &ids, &slots, &x->x), err);
    int32_t hidden = model_shape(m)->hidden;
    if (rc == LILY_OK) rc = cuda_trace(m, run, STAGE_EMBED, -1, x->x, (size_t)hidden, hidden, err);
    for (int32_t l = 0; l < m->w->layers && rc == LILY_OK; l++) rc = layer(m, run, l, err);
    return rc;
}

int cuda_run_head(struct backend_model *m, const struct cuda_run *run, int32_t first, int32_t n,
                  lily_err *err) {
    struct cuda_scratch *x = run->x;
    int32_t vocab = model_shape(m)->vocab;
    int rc = norm(m, run, 0, m->dw.final_norm, first, n, err);
    if (rc != LILY_OK) return rc;
    return product(m, run, m->dw.lm_head, x->normed, x->normed_bf, x->logits, vocab, n, err);
}

int cuda_check_rows(struct backend_model *m, CUdeviceptr data, int32_t rows, int64_t width,
                    int32_t per_flag, int32_t at, lily_err *err) {
    CUdeviceptr flags = m->x.finite + (size_t)at * sizeof(int32_t);
    unsigned share = width > 16384 ? 64 : 1;
    return launch(m, m->portable->check_finite, (unsigned)rows, share, 1, 256, 0,
                  ARGS(&data, &width, &per_flag, &flags), err);
}

int cuda_run_sampling(struct backend_model *m, CUdeviceptr slots, int32_t n, bool head,
                      CUdeviceptr results, lily_err *err) {
    const struct cuda_portable *k = m->portable;
    struct cuda_scratch *x = &m->x;
    int32_t used = m->sampled_below;
    CUdeviceptr sampled = m->has_holes ? x->sampled : 0;
    int rc = LILY_OK;
    if (head) {
        rc = launch(m, k->count_inputs, blocks(n, 32), 1, 1, 32, 0, ARGS(&slots, &n), err);
        if (rc == LILY_OK) {
            rc = launch(m, k->candidates, 64, (unsigned)n, 1, 256, 0,
                        ARGS(&x->logits, &slots, &used, &sampled, &x->sampling, &x->finite), err);
        }
    }
    if (rc != LILY_OK) return rc;
    return launch(m, k->pick, (unsigned)n, 1, 1, 256, 0,
                  ARGS(&x->sampling, &slots, &x->finite, &results), err);
}

int cuda_mark_prompt(struct backend_session *s, const int32_t *ids, int32_t n, lily_err *err) {
    struct backend_model *m = s->model;
    const struct cuda_driver *d = m->d;
    size_t bytes = (size_t)n * sizeof *ids;
    memcpy(m->prompt_ids, ids, bytes);
    int rc = cuda_check(d, d->to_device(m->x.ids, m->prompt_ids, bytes, m->stream), "prompt", err);
    if (rc == LILY_OK) {
        rc = launch(m, m->portable->mark_prompt, blocks(n, 256), 1, 1, 256, 0,
                    ARGS(&m->x.ids, &n, &s->counts), err);
    }
    return rc == LILY_OK ? cuda_check(d, d->stream_wait(m->stream), "prompt", err) : rc;
}

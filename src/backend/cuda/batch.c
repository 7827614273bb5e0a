/* A decode step of 2 to 64 slots, each weight read once for all of them (docs/cuda-batch.md): seven
 * launches a layer where weights lie as tiles, nine elsewhere, and there of one slot as well. 4-bit
 * matrices, the router and, without tiles, the gates of any width. A slot's values depend neither
 * on the other slots nor on their number. */
#include <stdlib.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/tile.h"

enum {
    THREADS = 512,                               /* of kernels/batch.cuh */
    COLUMNS = 8,                                 /* slots of one product */
    SUMS = 2 * 16 * 8 * 36 * (int)sizeof(float), /* shared memory of a product's sums, twice */
    WIDEST = 2048 /* columns of a matrix whose blocks take all of them at once */
};

/* field, file, kernel, dynamic shared memory: what both sets use, then either. */
#define COMMON_MAP(XX)                                                                             \
    XX(embed, "portable_norm", "embed", 0)                                                         \
    XX(first_norm, "portable_norm", "rms_norm", 0)                                                 \
    XX(mix, "portable_batch_mix", "batch_mix", 0)                                                  \
    XX(attention_rows, "portable_attention", "attention_rows", 0)                                  \
    XX(attention_part, "portable_attention", "attention_part", 0)                                  \
    XX(attention_join, "portable_attention", "attention_join", 0)
#define PLANAR_MAP(XX)                                                                             \
    XX(project[0], "portable_batch", "batch_project_8", SUMS)                                      \
    XX(project[1], "portable_batch", "batch_project_16", 2 * SUMS)                                 \
    XX(out[0], "portable_batch", "batch_out_8", SUMS)                                              \
    XX(out[1], "portable_batch", "batch_out_16", 2 * SUMS)                                         \
    XX(router, "portable_batch", "batch_gate", SUMS)                                               \
    XX(route, "portable_batch", "batch_route", SUMS)                                               \
    XX(up, "portable_batch", "batch_up", SUMS)                                                     \
    XX(down, "portable_batch", "batch_down", SUMS)                                                 \
    XX(norm, "portable_batch", "batch_norm", 0)                                                    \
    XX(combine, "portable_batch", "batch_combine", 0)
#define TILES_MAP(XX)                                                                              \
    XX(project[0], "batch_tiles", "tiles_project_8", CUDA_TILES_8)                                 \
    XX(project[1], "batch_tiles", "tiles_project_16", CUDA_TILES_16)                               \
    XX(project[2], "batch_tiles", "tiles_project_32", CUDA_TILES_32)                               \
    XX(out[0], "batch_tiles", "tiles_out_8", CUDA_TILES_SUMS)                                      \
    XX(out[1], "batch_tiles", "tiles_out_16", 2 * CUDA_TILES_SUMS)                                 \
    XX(out[2], "batch_tiles", "tiles_out_32", 4 * CUDA_TILES_SUMS)                                 \
    XX(router, "batch_tiles", "tiles_router", 0)                                                   \
    XX(up, "batch_tiles", "tiles_up", CUDA_TILES_UP)                                               \
    XX(down, "batch_tiles", "tiles_down", CUDA_TILES_DOWN)                                         \
    XX(combine, "batch_tiles", "tiles_combine", 0)

struct cuda_batch {
    bool tiles; /* how the weights lie, and so which set */
    CUfunction embed, first_norm, project[3], out[3], mix;
    CUfunction attention_rows, attention_part, attention_join;
    CUfunction router, route, up, down, norm, combine; /* tiles: no route (the choice), no norm */
};

#define ARGS(...) ((void *[]){__VA_ARGS__})

static unsigned blocks(int32_t n, int32_t each) {
    return (unsigned)((n + each - 1) / each);
}

/* Queues a kernel of portable_batch*: on cards that can, it begins while the one before it ends.
 * Those kernels wait for what was queued before them themselves; all others wait as ever. */
static int launch(const struct backend_model *m, CUfunction f, unsigned gx, unsigned gy,
                  unsigned gz, unsigned threads, size_t shared, void **arguments, lily_err *err) {
    if (m->capability < 90) {
        return cuda_launch(m, f, gx, gy, gz, threads, shared, arguments, err);
    }
    CUlaunchAttribute early = {.id = CU_LAUNCH_PROGRAMMATIC, .value = {.number = 1}};
    CUlaunchConfig config = {.grid_x = gx,
                             .grid_y = gy,
                             .grid_z = gz,
                             .block_x = threads,
                             .block_y = 1,
                             .block_z = 1,
                             .shared = (unsigned)shared,
                             .stream = m->stream,
                             .attributes = &early,
                             .n_attributes = 1};
    return cuda_check(m->d, m->d->launch_with(&config, f, arguments, NULL), "kernel launch", err);
}

/* ---- products for all slots ------------------------------------------------------------------ */

/* Sets of 32 rows that a block takes at once: its 16 warps over chunks of 128 columns. */
static int32_t sets_of(int32_t cols) {
    int32_t chunks = (cols + 127) / 128;
    return chunks > 0 && chunks < 16 ? 16 / chunks : 1;
}

/* 0: eight slots a product, 1: sixteen, 2: 32; in so many groups. */
static int tile_of(const struct backend_model *m, int32_t rows, int32_t *groups) {
    int tile = rows <= COLUMNS ? 0 : rows <= 2 * COLUMNS || !m->batch->tiles ? 1 : 2;
    *groups = (int32_t)blocks(rows, COLUMNS << tile);
    return tile;
}

/* out[r] = w . normed[r], and small_out[r] = small . normed[r] where small has rows. */
static int project(struct backend_model *m, int32_t rows, struct cuda_mat w, CUdeviceptr out,
                   int32_t ldo, struct cuda_mat small, CUdeviceptr small_out, lily_err *err) {
    struct cuda_scratch *x = &m->x;
    const struct cuda_batch *k = m->batch;
    int32_t groups, tile = tile_of(m, rows, &groups), all = m->processors, split = 0;
    int32_t units = (int32_t)blocks(w.rows, 32 * sets_of(w.cols));
    unsigned small_blocks = blocks(small.rows, 16);
    size_t shared = (size_t)SUMS << tile;
    if (k->tiles) { /* all blocks at once; parts of a row tile only where a block has few of them */
        static const size_t all_shared[] = {CUDA_TILES_8, CUDA_TILES_16, CUDA_TILES_32};
        int32_t slices = w.cols / TILE_WIDE_COLS;
        units = (int32_t)blocks(w.rows, TILE_WIDE_ROWS);
        split = units >= 8 * m->processors ? 1 : slices < 4 ? slices : 4;
        small_blocks =
            blocks(small.rows, TILE_WIDE_ROWS) * blocks(rows, tile ? 2 * COLUMNS : COLUMNS);
        if (all > (int32_t)small_blocks) all -= (int32_t)small_blocks;
        shared = all_shared[tile];
    }
    int32_t each = all / groups;
    if (each < 1) each = 1;
    if (each > units) each = units;
    int32_t dense = each * groups;
    /* The kernels without tiles have no parts: one argument less. */
    return launch(
        m, k->project[tile], (unsigned)dense + small_blocks, 1, 1, THREADS, shared,
        ARGS(&x->normed_bf, &x->normed, &w, &out, &ldo, &small, &small_out, &rows, &dense, &split),
        err);
}

/* x.out[r] = w . x.mix_bf[r] */
static int project_out(struct backend_model *m, int32_t rows, struct cuda_mat w, lily_err *err) {
    struct cuda_scratch *x = &m->x;
    int32_t groups, tile = tile_of(m, rows, &groups);
    size_t shared = (size_t)(m->batch->tiles ? CUDA_TILES_SUMS : SUMS) << tile;
    return launch(m, m->batch->out[tile], blocks(w.rows, 16) * (unsigned)groups, 1, 1, THREADS,
                  shared, ARGS(&x->mix_bf, &w, &x->out, &rows), err);
}

/* ---- mixers ---------------------------------------------------------------------------------- */

static int deltanet(struct backend_model *m, const struct cuda_step *step, int32_t l,
                    lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    int32_t width = m->proj_width, kind = shape_kind_index(s, l);
    CUdeviceptr slots = step->slots_device, taps = w->conv, rate = w->decay_rate;
    CUdeviceptr bias = w->dt_bias, weight = w->gdn_norm;
    int rc = project(m, step->n, w->qkvz, x->wide, width, w->ba, x->scores, err);
    if (rc != LILY_OK) return rc;
    return launch(
        m, m->batch->mix, (unsigned)s->gdn_v_heads, (unsigned)step->n, 1, 256, 0,
        ARGS(&x->wide, &width, &taps, &x->scores, &rate, &bias, &weight, &slots, &kind, &x->mix_bf),
        err);
}

static int attention(struct backend_model *m, const struct cuda_step *step, int32_t l,
                     lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    int32_t width = m->proj_width, kind = shape_kind_index(s, l), one = 1, longest = 0;
    unsigned n = (unsigned)step->n;
    CUdeviceptr slots = step->slots_device, q_norm = w->q_norm, k_norm = w->k_norm, none = 0;
    for (int32_t i = 0; i < step->n; i++) {
        if (step->slots[i].pos >= longest) longest = step->slots[i].pos + 1;
    }
    unsigned parts = blocks(longest, CUDA_PART);
    if (parts > CUDA_PARTS) parts = CUDA_PARTS;
    int rc = project(m, step->n, w->qkv, x->wide, width, (struct cuda_mat){0}, 0, err);
    if (rc == LILY_OK) {
        rc = launch(m, m->batch->attention_rows, n, 1, 1, 640, 0,
                    ARGS(&x->wide, &width, &q_norm, &k_norm, &m->dw.inv_freq, &slots, &one, &kind,
                         &x->queries),
                    err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, m->batch->attention_part, parts, (unsigned)s->kv_heads, n, 256, 0,
                    ARGS(&x->queries, &slots, &kind, &x->partial), err);
    }
    if (rc != LILY_OK) return rc;
    return launch(m, m->batch->attention_join, (unsigned)s->q_heads, n, 1, 256, 0,
                  ARGS(&x->partial, &x->wide, &width, &slots, &none, &x->mix_bf), err);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* With tiles: residual stream, norm and router; choice and first halves; second halves; x.x and the
 * norm with `weight` after it. The list of chosen experts lies where queries do between mixers. */
static int tiled_experts(struct backend_model *m, int32_t rows, int32_t l, CUdeviceptr weight,
                         lily_err *err) {
    const struct cuda_batch *k = m->batch;
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    unsigned groups = blocks(rows, COLUMNS), all = (unsigned)m->processors;
    int rc = launch(m, k->router, blocks(w.router.rows, TILE_BYTE_ROWS), groups, 1, 2 * THREADS, 0,
                    ARGS(&x->x, &x->out, &w.post_norm, &w.router, &x->scores, &x->normed_bf, &rows),
                    err);
    if (rc == LILY_OK) {
        rc = launch(m, k->up, all, 1, 1, THREADS, CUDA_TILES_UP,
                    ARGS(&x->normed_bf, &x->scores, &rows, &w.gate, &w.shared_gate, &x->queries,
                         &x->routing, &x->hidden),
                    err);
    }
    if (rc == LILY_OK) {
        rc = launch(
            m, k->down, all, 1, 1, THREADS, CUDA_TILES_DOWN,
            ARGS(&x->hidden, &x->queries, &rows, &w.down, &w.shared_down, &x->wide, &x->delta),
            err);
    }
    if (rc != LILY_OK) return rc;
    return launch(m, k->combine, (unsigned)rows, 1, 1, THREADS, 0,
                  ARGS(&x->wide, &x->routing, &x->scores, &x->delta, &x->out, &x->x, &weight,
                       &x->normed, &x->normed_bf),
                  err);
}

/* Router and shared expert, choice, the chosen experts; x.x and the norm with `weight` after it. */
static int experts(struct backend_model *m, int32_t rows, int32_t l, CUdeviceptr weight,
                   lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_batch *k = m->batch;
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    unsigned groups = blocks(rows, COLUMNS), all = (unsigned)m->processors;
    int32_t router = (int32_t)blocks(w.router.rows, 16);
    CUdeviceptr begin = x->experts;
    CUdeviceptr count = begin + (size_t)(s->experts + 1) * sizeof(int32_t);
    CUdeviceptr list = count + sizeof(int32_t);
    CUdeviceptr own = x->hidden + (size_t)(rows * s->top_k) * (size_t)s->expert_width * 2;
    struct cuda_groups by_expert = {
        .begin = begin, .blocks = list, .n_blocks = count, .pairs = x->pairs};
    unsigned first_half = blocks(s->shared_width, 16 * sets_of(s->hidden));
    int rc = launch(m, k->router, (unsigned)router + first_half, groups, 1, THREADS, SUMS,
                    ARGS(&x->normed_bf, &x->normed, &w.router, &x->scores, &w.shared_gate,
                         &w.shared_up, &own, &rows, &router),
                    err);
    unsigned second_half = blocks(s->hidden, 32 * sets_of(s->shared_width));
    if (rc == LILY_OK) {
        rc = launch(m, k->route, 1 + second_half, groups, 1, THREADS, SUMS,
                    ARGS(&x->scores, &x->routing, &rows, &begin, &list, &count, &x->pairs,
                         &x->places, &own, &w.shared_down, &x->out),
                    err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, k->up, all, 1, 1, THREADS, SUMS,
                    ARGS(&x->normed_bf, &w.gate, &w.up, &by_expert, &x->hidden), err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, k->down, all, 1, 1, THREADS, SUMS,
                    ARGS(&x->hidden, &w.down, &by_expert, &x->wide), err);
    }
    if (rc != LILY_OK) return rc;
    return launch(m, k->combine, (unsigned)rows, 1, 1, THREADS, 0,
                  ARGS(&x->wide, &x->places, &x->routing, &x->scores, &x->out, &x->x, &weight,
                       &x->normed, &x->normed_bf),
                  err);
}

/* ---- the step -------------------------------------------------------------------------------- */

static int layer(struct backend_model *m, const struct cuda_step *step, int32_t l, lily_err *err) {
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    bool full = shape_is_attention(model_shape(m), l), last = l + 1 == m->w->layers;
    CUdeviceptr next = last ? m->dw.final_norm : m->dw.layer[l + 1].input_norm;
    int rc = full ? attention(m, step, l, err) : deltanet(m, step, l, err);
    if (rc == LILY_OK) rc = project_out(m, step->n, full ? w->o : w->out, err);
    if (rc != LILY_OK) return rc;
    if (m->batch->tiles) return tiled_experts(m, step->n, l, next, err);
    CUdeviceptr weight = w->post_norm;
    rc = launch(m, m->batch->norm, (unsigned)step->n, 1, 1, THREADS, 0,
                ARGS(&x->out, &x->x, &weight, &x->normed, &x->normed_bf), err);
    return rc == LILY_OK ? experts(m, step->n, l, next, err) : rc;
}

static int queue(struct backend_model *m, struct cuda_step *step, lily_err *err) {
    struct cuda_scratch *x = &m->x;
    const struct shape *s = model_shape(m);
    struct cuda_mat table = m->dw.embed;
    CUdeviceptr ids = 0, slots = step->slots_device;
    int32_t n = step->n;
    bool head = false;
    for (int32_t i = 0; i < n; i++) head |= step->slots[i].sample || step->slots[i].want_logits;
    int rc = cuda_launch(m, m->batch->embed, (unsigned)n, 1, 1, THREADS, 0,
                         ARGS(&table, &ids, &slots, &x->x), err);
    CUdeviceptr none = 0, weight = m->dw.layer[0].input_norm;
    int32_t first = 0;
    if (rc == LILY_OK) {
        rc = cuda_launch(m, m->batch->first_norm, (unsigned)n, 1, 1, THREADS, 0,
                         ARGS(&x->x, &none, &weight, &x->normed, &x->normed_bf, &first), err);
    }
    for (int32_t l = 0; l < m->w->layers && rc == LILY_OK; l++) rc = layer(m, step, l, err);
    if (rc == LILY_OK) rc = cuda_check_rows(m, x->x, n, s->hidden, 1, 0, err);
    if (rc == LILY_OK && head) {
        rc = project(m, n, m->dw.lm_head, x->logits, s->vocab, (struct cuda_mat){0}, 0, err);
    }
    return rc == LILY_OK ? cuda_run_sampling(m, slots, n, head, step->results_device, err) : rc;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* Whether a matrix lies as the kernels for this card read it. */
static bool lies(const struct backend_model *m, const struct cuda_mat *w, enum cuda_layout tiled) {
    return w->bits == 4 && w->layout == (int32_t)(m->capability == 90 ? tiled : CUDA_PLANAR);
}

/* The kernels for tiles want the small matrices as tiles too, and a shared expert that is one more
 * expert. */
static bool tiles_suit(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    bool fit = m->shared_limit >= CUDA_TILES_32 && s->shared_width == s->expert_width &&
               s->expert_width % 64 == 0 && s->expert_width <= 512 && s->hidden % 128 == 0;
    for (int32_t l = 0; l < m->w->layers && fit; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        fit = w->router.layout == CUDA_BYTE &&
              (shape_is_attention(s, l) || lies(m, &w->ba, CUDA_WIDE));
    }
    return fit;
}

/* 4-bit codes but in what is multiplied exactly, and columns as the blocks share them: a power of
 * two of chunks up to 16, or for the output projections up to 32. */
static bool suits(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    const int32_t widths[] = {s->hidden, s->expert_width, s->shared_width};
    bool fit = lies(m, &m->dw.lm_head, CUDA_WIDE) && s->shared_width % 16 == 0 &&
               s->expert_width % 16 == 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        int32_t chunks = (widths[i] + 127) / 128;
        fit = fit && widths[i] <= WIDEST && (chunks & (chunks - 1)) == 0;
    }
    for (int32_t l = 0; l < m->w->layers; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        bool full = shape_is_attention(s, l);
        const struct cuda_mat *wide[] = {&w->gate,
                                         &w->up,
                                         &w->shared_gate,
                                         &w->shared_up,
                                         full ? &w->qkv : &w->qkvz,
                                         full ? &w->o : &w->out};
        for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
            fit = fit && lies(m, wide[i], CUDA_WIDE);
        }
        fit = fit && lies(m, &w->down, CUDA_DOWN) && lies(m, &w->shared_down, CUDA_DOWN);
    }
    return fit && (m->capability != 90 || tiles_suit(m));
}

static void close_batch(struct backend_model *m) {
    free(m->batch);
    m->batch = NULL;
}

/* A kernel that leaves shared memory as large as it is for those with the most: a multiprocessor
 * that had to change it would run nothing meanwhile. */
static int find(const struct backend_model *m, const char *file, const char *kernel, size_t shared,
                CUfunction *out, lily_err *err) {
    int rc = cuda_function(m->d, m->modules, file, kernel, shared, out, err);
    if (rc != LILY_OK || !m->batch->tiles) return rc;
    return cuda_check(m->d, m->d->func_set(*out, CU_FUNC_CARVEOUT, 100), kernel, err);
}

static int open_batch(struct backend_model *m, bool *usable, lily_err *err) {
    *usable = false;
    if (!suits(m)) return LILY_OK;
    struct cuda_batch *k = m->batch = calloc(1, sizeof *k);
    if (!k) return ERR_NOMEM(err, "CUDA kernels");
    int rc = LILY_OK;
    k->tiles = m->capability == 90;
#define FIND(field, file, kernel, shared)                                                          \
    if (rc == LILY_OK) rc = find(m, file, kernel, shared, &k->field, err);
    COMMON_MAP(FIND)
    if (k->tiles) {
        TILES_MAP(FIND)
    } else {
        PLANAR_MAP(FIND)
    }
#undef FIND
    if (rc != LILY_OK) close_batch(m);
    *usable = rc == LILY_OK;
    return rc;
}

/* Stages between kernels are traced by the portable path. One slot goes where it is alone faster:
 * with tiles that is the persistent kernel, elsewhere here (docs/cuda-batch.md). */
static bool takes(const struct backend_model *m, const struct cuda_step *step) {
    int32_t least = m->batch->tiles ? 2 : 1;
    return step->n >= least && step->n <= CUDA_FEW_ROWS && !m->options.trace;
}

const struct cuda_path cuda_path_batch = {
    .name = "batch", .open = open_batch, .close = close_batch, .takes = takes, .queue = queue};

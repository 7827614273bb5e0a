/* A decode step of one sequence as one persistent kernel (sm_90a; docs/cuda-decode.md). The kernel
 * reads its weights as tiles: a second copy of the matrices, made on the device when the model is
 * opened. Where that copy does not fit, the portable path decodes. */
#include <stdlib.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/decode.h"
#include "backend/cuda/kernels/tile.h"

/* What the driver, and whoever else, may still need beside the tiles. */
static const size_t SPARE = (size_t)1 << 30;

struct cuda_decode {
    CUfunction step, pack;
    CUdeviceptr arena; /* tiles, tables, scratch: one allocation */
    struct decode_args args;
    uint32_t per_step; /* arrivals at the grid's barrier */
};

/* ---- the arena: walked twice, first to add it up, then to fill it ------------------------------
 */

struct walk {
    struct backend_model *m;
    CUdeviceptr base; /* 0: only add up */
    size_t used;
    int rc;
    lily_err *err;
};

static CUdeviceptr room(struct walk *w, size_t bytes) {
    size_t at = w->used;
    w->used += (bytes + CUDA_ALIGN - 1) / CUDA_ALIGN * CUDA_ALIGN;
    return w->base + at;
}

static int32_t round_up(int32_t n, int32_t to) {
    return (n + to - 1) / to * to;
}

/* Bytes of a matrix of rows and cols as tiles. */
static size_t tile_bytes(enum decode_tile tile, int32_t rows, int32_t cols) {
    if (tile == DECODE_DOWN) {
        return (size_t)(round_up(rows, TILE_DOWN_ROWS) / TILE_DOWN_ROWS) *
               (size_t)(cols / TILE_DOWN_COLS) * TILE_DOWN_BYTES;
    }
    if (tile == DECODE_BYTE) {
        return (size_t)(round_up(rows, TILE_BYTE_ROWS) / TILE_BYTE_ROWS) *
               (size_t)(cols / TILE_BYTE_COLS) * TILE_BYTE_BYTES;
    }
    return (size_t)(round_up(rows, TILE_WIDE_ROWS) / TILE_WIDE_ROWS) *
           (size_t)(cols / TILE_WIDE_COLS) * TILE_WIDE_BYTES;
}

/* n matrices, the i-th made of rows [i * stride, i * stride + rows) of a, and of b alike. */
static CUdeviceptr pack(struct walk *w, enum decode_tile tile, struct cuda_mat a,
                        const struct cuda_mat *b, bool interleaved, int32_t n, int32_t rows) {
    int32_t all = rows + (b ? interleaved ? rows : b->rows : 0);
    struct decode_pack p = {.a = a,
                            .interleaved = interleaved,
                            .tile = tile,
                            .rows = rows,
                            .stride = rows,
                            .bytes = tile_bytes(tile, all, a.cols)};
    if (b) p.b = *b;
    p.to = room(w, (size_t)n * p.bytes);
    if (!w->base || w->rc != LILY_OK) return p.to;
    int32_t height = tile == DECODE_DOWN   ? TILE_DOWN_ROWS
                     : tile == DECODE_BYTE ? TILE_BYTE_ROWS
                                           : TILE_WIDE_ROWS;
    size_t words = (size_t)round_up(all, height) * (size_t)(a.cols / 8);
    void *arguments[] = {&p};
    w->rc = cuda_launch(w->m, w->m->decode->pack, (unsigned)((words + 255) / 256), (unsigned)n, 1,
                        256, 0, arguments, w->err);
    return p.to;
}

static CUdeviceptr pack_one(struct walk *w, enum decode_tile tile, struct cuda_mat a) {
    return pack(w, tile, a, NULL, false, 1, a.rows);
}

static struct decode_layer pack_layer(struct walk *w, int32_t l) {
    const struct shape *s = model_shape(w->m);
    const struct cuda_layer *from = &w->m->dw.layer[l];
    struct decode_layer out = {.input_norm = from->input_norm,
                               .post_norm = from->post_norm,
                               .q_norm = from->q_norm,
                               .k_norm = from->k_norm,
                               .conv = from->conv,
                               .decay_rate = from->decay_rate,
                               .dt_bias = from->dt_bias,
                               .gdn_norm = from->gdn_norm};
    if (shape_is_attention(s, l)) {
        out.in = pack_one(w, DECODE_WIDE, from->qkv);
        out.out = pack_one(w, DECODE_WIDE_SLICES, from->o);
    } else {
        out.in = pack(w, DECODE_WIDE, from->qkvz, &from->ba, false, 1, from->qkvz.rows);
        out.out = pack_one(w, DECODE_WIDE_SLICES, from->out);
    }
    int32_t e = s->experts;
    out.gate_up = pack(w, DECODE_WIDE, from->gate, &from->up, true, e, s->expert_width);
    out.down = pack(w, DECODE_DOWN, from->down, NULL, false, e, s->hidden);
    out.shared_in =
        pack(w, DECODE_WIDE, from->shared_gate, &from->shared_up, true, 1, s->shared_width);
    out.shared_out = pack_one(w, DECODE_DOWN, from->shared_down);
    out.router = pack_one(w, DECODE_BYTE, from->router);
    return out;
}

static void place_scratch(struct walk *w, struct decode_scratch *x) {
    const struct shape *s = model_shape(w->m);
    size_t blocks = (size_t)w->m->processors, head = (size_t)s->head_dim, f = sizeof(float);
    int32_t gdn = s->conv_dim + s->gdn_v_dim + 2 * s->gdn_v_heads;
    int32_t attention = 2 * s->q_dim + 2 * s->kv_dim;
    x->h = room(w, 4 * (size_t)s->hidden * sizeof(int64_t));
    x->proj = room(w, (size_t)(gdn > attention ? gdn : attention) * f);
    x->scores = room(w, ((size_t)s->experts + 1) * f);
    x->shared = room(w, (size_t)s->shared_width * f);
    x->parts = room(w, blocks * 8 * head * f);
    x->parts_ml = room(w, blocks * 8 * 2 * f);
    x->best = room(w, sizeof(uint64_t));
    x->counter = room(w, 3 * sizeof(uint32_t));
}

/* layers: room on the host for the table, or NULL. */
static void walk_all(struct walk *w, struct decode_args *a, struct decode_layer *layers) {
    struct backend_model *m = w->m;
    size_t n = (size_t)m->w->layers;
    place_scratch(w, &a->x);
    a->layers = room(w, n * sizeof *layers);
    a->lm_head = pack_one(w, DECODE_WIDE, m->dw.lm_head);
    for (int32_t l = 0; l < m->w->layers; l++) {
        struct decode_layer layer = pack_layer(w, l);
        if (layers) layers[l] = layer;
    }
}

/* ---- open ------------------------------------------------------------------------------------ */

static bool mat_is(const struct cuda_mat *a, int32_t bits) {
    return a->bits == bits;
}

/* Whether the weights have the widths the kernel is written for: 4 bits, the router any. */
static bool widths_fit(const struct backend_model *m) {
    bool fit = mat_is(&m->dw.lm_head, 4);
    for (int32_t l = 0; l < m->w->layers; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        const struct cuda_mat *all[] = {&w->gate,        &w->up,        &w->down,
                                        &w->shared_gate, &w->shared_up, &w->shared_down};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) fit = fit && mat_is(all[i], 4);
        fit = fit && (shape_is_attention(model_shape(m), l)
                          ? mat_is(&w->qkv, 4) && mat_is(&w->o, 4)
                          : mat_is(&w->qkvz, 4) && mat_is(&w->ba, 4) && mat_is(&w->out, 4));
    }
    return fit;
}

/* One block a multiprocessor, more of them than routed jobs, and memory for the tiles. */
static int suits(struct backend_model *m, size_t bytes, bool *out, lily_err *err) {
    const struct shape *s = model_shape(m);
    size_t free_now = 0, total = 0;
    int rc = cuda_check(m->d, m->d->memory_info(&free_now, &total), "memory", err);
    size_t sessions =
        (size_t)m->options.max_sessions * cuda_session_bytes(m, m->options.max_context);
    *out = m->processors > s->top_k * (s->expert_width / DECODE_INNER) &&
           m->shared_limit >= DECODE_SHARED && bytes + sessions + SPARE <= free_now;
    return rc;
}

static int fill(struct backend_model *m, lily_err *err) {
    struct cuda_decode *x = m->decode;
    struct decode_args *a = &x->args;
    struct walk w = {.m = m, .base = x->arena, .err = err};
    size_t n = (size_t)m->w->layers;
    struct decode_layer *layers = calloc(n, sizeof *layers);
    if (!layers) return ERR_NOMEM(err, "CUDA decode");
    walk_all(&w, a, layers);
    CUresult r = m->d->to_device(a->layers, layers, n * sizeof *layers, m->stream);
    if (r == 0) r = m->d->fill8(a->x.best, 0, sizeof(uint64_t), m->stream);
    if (r == 0) r = m->d->fill8(a->x.counter, 0, 3 * sizeof(uint32_t), m->stream);
    if (r == 0) r = m->d->stream_wait(m->stream);
    free(layers);
    if (w.rc != LILY_OK) return w.rc;
    a->embed = m->dw.embed;
    a->final_norm = m->dw.final_norm;
    a->inv_freq = m->dw.inv_freq;
    a->finite = m->x.finite;
    a->logits = m->x.logits;
    a->n_layers = m->w->layers;
    a->vocab_used = m->w->vocab_used;
    x->per_step = (uint32_t)(4 * m->gdn_layers + 5 * m->attention_layers) * (uint32_t)m->processors;
    return cuda_check(m->d, r, "decode tiles", err);
}

static void close_decode(struct backend_model *m) {
    if (m->decode && m->decode->arena) m->d->memory_free(m->decode->arena);
    free(m->decode);
    m->decode = NULL;
}

static int open_decode(struct backend_model *m, bool *usable, lily_err *err) {
    *usable = false;
    if (m->capability != 90 || !widths_fit(m)) return LILY_OK;
    struct walk w = {.m = m};
    struct decode_args ignored;
    walk_all(&w, &ignored, NULL);
    bool fits = false;
    int rc = suits(m, w.used, &fits, err);
    if (rc != LILY_OK || !fits) return rc;
    m->decode = calloc(1, sizeof *m->decode);
    if (!m->decode) return ERR_NOMEM(err, "CUDA decode");
    rc = cuda_function(m->d, m->modules, "decode_step", "decode_step", DECODE_SHARED,
                       &m->decode->step, err);
    if (rc == LILY_OK) {
        rc =
            cuda_function(m->d, m->modules, "decode_pack", "decode_pack", 0, &m->decode->pack, err);
    }
    if (rc == LILY_OK) rc = cuda_memory(m, w.used, "decode tiles", &m->decode->arena, err);
    if (rc == LILY_OK) rc = fill(m, err);
    if (rc != LILY_OK) close_decode(m);
    *usable = rc == LILY_OK;
    if (*usable) m->dw.bytes += w.used; /* what weights take, both copies */
    return rc;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Stages are not traced inside the kernel. */
static bool takes(const struct backend_model *m, const struct cuda_step *step) {
    return step->n == 1 && !m->options.trace;
}

/* The largest logit is the pick, and no one needs the counts: the kernel has done it. */
static bool is_argmax(const struct cuda_slot *slot) {
    return slot->temperature < 1e-5f && slot->repetition == 1 && slot->frequency == 0 &&
           slot->presence == 0;
}

static int queue(struct backend_model *m, struct cuda_step *step, lily_err *err) {
    struct cuda_decode *x = m->decode;
    const struct cuda_slot *slot = &step->slots[0];
    x->args.slot = step->slots_device;
    x->args.result = step->results_device;
    x->args.pick = slot->sample && is_argmax(slot);
    void *arguments[] = {&x->args};
    int rc = cuda_launch(m, x->step, (unsigned)m->processors, 1, 1, DECODE_THREADS, DECODE_SHARED,
                         arguments, err);
    if (rc != LILY_OK) return rc;
    x->args.barrier += x->per_step;
    if (!slot->sample || x->args.pick) return LILY_OK;
    return cuda_run_sampling(m, step->slots_device, 1, true, step->results_device, err);
}

static void plan(const struct shape *shape, const struct plan_query *query,
                 struct backend_plan *out) {
    int32_t attention = shape_attention_layers(shape, query->layers);
    out->kernels = 1;
    out->barriers = 4 * (query->layers - attention) + 5 * attention;
    out->stages = out->barriers + 1;
}

const struct cuda_path cuda_path_decode = {.name = "persistent sm_90a",
                                           .open = open_decode,
                                           .close = close_decode,
                                           .takes = takes,
                                           .queue = queue,
                                           .plan = plan};

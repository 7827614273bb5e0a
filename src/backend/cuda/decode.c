/* A decode step of one sequence as one persistent kernel (sm_90a; docs/cuda-decode.md). It streams
 * the matrices that upload.c has laid out as tiles. */
#include <stdlib.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/decode.h"

struct cuda_decode {
    CUfunction step;
    CUdeviceptr block; /* the table of layers, out_scores, scratch: one allocation */
    struct decode_args args;
    uint32_t per_step; /* arrivals at the grid's barrier */
};

/* ---- memory ---------------------------------------------------------------------------------- */

static CUdeviceptr room(CUdeviceptr base, size_t *used, size_t bytes) {
    size_t at = *used;
    *used += cuda_aligned(bytes);
    return base + at;
}

/* Tiles of a layer's out_scores: those of a slice of 128 inputs, slices. */
static int32_t score_tiles(const struct shape *s) {
    int32_t rows = s->experts / DECODE_OUT_PARTS;
    return (rows + TILE_SCORE_ROWS - 1) / TILE_SCORE_ROWS * DECODE_OUT_PARTS;
}
static int32_t out_slices(const struct shape *s, bool attention) {
    return (attention ? s->q_dim : s->gdn_v_dim) / TILE_SCORE_COLS;
}

size_t cuda_decode_score_bytes(const struct backend_model *m, int32_t layer) {
    const struct shape *s = model_shape(m);
    int32_t slices = out_slices(s, shape_is_attention(s, layer));
    return (size_t)slices * (size_t)score_tiles(s) * TILE_SCORE_BYTES;
}

/* Adds up (base 0) or places what the kernel needs beside the weights; scores: NULL, or where each
 * layer's out_scores are. */
static size_t place(const struct backend_model *m, CUdeviceptr base, struct decode_args *a,
                    CUdeviceptr *scores) {
    const struct shape *s = model_shape(m);
    size_t blocks = (size_t)m->processors, head = (size_t)s->head_dim, f = sizeof(float), used = 0;
    int32_t gdn = s->conv_dim + s->gdn_v_dim + 2 * s->gdn_v_heads;
    int32_t attention = 2 * s->q_dim + 2 * s->kv_dim;
    struct decode_scratch *x = &a->x;
    size_t word = sizeof(struct decode_word);
    size_t sums = 2 * (size_t)s->hidden + (size_t)s->layers * (size_t)s->experts;
    x->sums = room(base, &used, 2 * sums * sizeof(int64_t));
    x->kept = room(base, &used, blocks * DECODE_KEPT * f);
    x->proj = room(base, &used, (size_t)(gdn > attention ? gdn : attention) * word);
    x->gate = room(base, &used, word);
    x->shared = room(base, &used, (size_t)s->shared_width * word);
    x->inner = room(base, &used, (size_t)s->top_k * (size_t)s->expert_width * word);
    x->parts = room(base, &used, blocks * 8 * head * f);
    x->parts_ml = room(base, &used, blocks * 8 * 2 * f);
    x->best = room(base, &used, sizeof(uint64_t));
    x->counter = room(base, &used, 3 * sizeof(uint32_t));
    a->layers = room(base, &used, (size_t)m->w->layers * sizeof(struct decode_layer));
    for (int32_t l = 0; l < m->w->layers; l++) {
        CUdeviceptr at = room(base, &used, cuda_decode_score_bytes(m, l));
        if (scores) scores[l] = at;
    }
    return used;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* Whether the weights lie as the kernel streams them. */
static bool tiles_fit(const struct backend_model *m) {
    bool fit = m->dw.lm_head.layout == CUDA_WIDE;
    for (int32_t l = 0; l < m->w->layers; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        bool full = shape_is_attention(model_shape(m), l);
        const struct cuda_mat *wide[] = {full ? &w->qkv : &w->qkvz, full ? &w->qkv : &w->ba,
                                         full ? &w->o : &w->out, &w->gate, &w->shared_gate};
        for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
            fit = fit && wide[i]->layout == CUDA_WIDE;
        }
        fit = fit && w->down.layout == CUDA_DOWN && w->shared_down.layout == CUDA_DOWN &&
              w->router.layout == CUDA_BYTE;
    }
    return fit;
}

/* One block a multiprocessor, more of them than jobs of routed experts or of the output. */
static bool suits(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    int32_t gdn = out_slices(s, false), attention = out_slices(s, true);
    int32_t out = DECODE_OUT_PARTS * (gdn > attention ? gdn : attention);
    int32_t routed = s->top_k * (s->expert_width / DECODE_INNER);
    return m->capability == 90 && m->shared_limit >= DECODE_SHARED && m->processors > routed &&
           m->processors > out && tiles_fit(m);
}

size_t cuda_decode_bytes(const struct backend_model *m) {
    struct decode_args ignored;
    return suits(m) ? place(m, 0, &ignored, NULL) : 0;
}

int32_t cuda_decode_stages(const struct backend_model *m) {
    return 4 * m->gdn_layers + 5 * m->attention_layers + 1;
}

static struct decode_layer layer_of(const struct backend_model *m, int32_t l, CUdeviceptr scores) {
    const struct cuda_layer *from = &m->dw.layer[l];
    bool full = shape_is_attention(model_shape(m), l);
    return (struct decode_layer){.in = full ? from->qkv.codes : from->qkvz.codes,
                                 .out = full ? from->o.codes : from->out.codes,
                                 .out_scores = scores,
                                 .gate_up = from->gate.codes,
                                 .down = from->down.codes,
                                 .shared_in = from->shared_gate.codes,
                                 .shared_out = from->shared_down.codes,
                                 .router = from->router.codes,
                                 .input_norm = from->input_norm,
                                 .post_norm = from->post_norm,
                                 .q_norm = from->q_norm,
                                 .k_norm = from->k_norm,
                                 .conv = from->conv,
                                 .decay_rate = from->decay_rate,
                                 .dt_bias = from->dt_bias,
                                 .gdn_norm = from->gdn_norm};
}

/* Router times output projection, made by the card from both as they lie there. */
static int fuse(struct backend_model *m, const struct decode_layer *layers, lily_err *err) {
    const struct shape *s = model_shape(m);
    CUfunction f;
    int rc = cuda_function(m->d, m->modules, "decode_fuse", "decode_fuse", 0, &f, err);
    for (int32_t l = 0; l < m->w->layers && rc == LILY_OK; l++) {
        struct decode_layer w = layers[l];
        void *arguments[] = {&w.router, &w.post_norm, &w.out, &w.out_scores};
        int32_t slices = out_slices(s, shape_is_attention(s, l));
        rc = cuda_launch(m, f, (unsigned)score_tiles(s), (unsigned)slices, 1, DECODE_FUSE_THREADS,
                         0, arguments, err);
    }
    return rc;
}

static int fill_table(struct backend_model *m, lily_err *err) {
    struct decode_args *a = &m->decode->args;
    size_t n = (size_t)m->w->layers;
    struct decode_layer *layers = calloc(n, sizeof *layers);
    CUdeviceptr *scores = calloc(n, sizeof *scores);
    int rc = layers && scores ? LILY_OK : ERR_NOMEM(err, "CUDA decode");
    if (rc == LILY_OK) {
        place(m, m->decode->block, a, scores);
        for (int32_t l = 0; l < m->w->layers; l++) layers[l] = layer_of(m, l, scores[l]);
        CUresult r = m->d->to_device(a->layers, layers, n * sizeof *layers, m->stream);
        rc = cuda_check(m->d, r, "decode step", err);
    }
    if (rc == LILY_OK) rc = fuse(m, layers, err);
    if (rc == LILY_OK) rc = cuda_check(m->d, m->d->stream_wait(m->stream), "decode step", err);
    free(layers);
    free(scores);
    return rc;
}

static int fill(struct backend_model *m, lily_err *err) {
    struct cuda_decode *x = m->decode;
    struct decode_args *a = &x->args;
    CUresult r = m->d->fill8(x->block, 0, cuda_decode_bytes(m), m->stream);
    int rc = cuda_check(m->d, r, "decode step", err);
    if (rc == LILY_OK) rc = fill_table(m, err);
    a->lm_head = m->dw.lm_head.codes;
    a->embed = m->dw.embed;
    a->final_norm = m->dw.final_norm;
    a->inv_freq = m->dw.inv_freq;
    a->finite = m->x.finite;
    a->logits = m->x.logits;
    a->n_layers = m->w->layers;
    a->vocab_used = m->sampled_below;
    x->per_step = (uint32_t)m->attention_layers * (uint32_t)m->processors;
    return rc;
}

static void close_decode(struct backend_model *m) {
    if (m->decode && m->decode->block) m->d->memory_free(m->decode->block);
    free(m->decode);
    m->decode = NULL;
}

static int open_decode(struct backend_model *m, bool *usable, lily_err *err) {
    *usable = false;
    if (!suits(m)) return LILY_OK;
    m->decode = calloc(1, sizeof *m->decode);
    if (!m->decode) return ERR_NOMEM(err, "CUDA decode");
    int rc = cuda_function(m->d, m->modules, "decode_step", "decode_step", DECODE_SHARED,
                           &m->decode->step, err);
    int blocks = 0;
    if (rc == LILY_OK) {
        rc = cuda_check(m->d,
                        m->d->occupancy(&blocks, m->decode->step, DECODE_THREADS, DECODE_SHARED),
                        "decode step", err);
    }
    if (rc == LILY_OK && blocks < 1) {
        close_decode(m);
        return LILY_OK;
    }
    if (rc == LILY_OK) {
        rc = cuda_memory(m, cuda_decode_bytes(m), "decode step", &m->decode->block, err);
    }
    if (rc == LILY_OK) rc = fill(m, err);
    if (rc != LILY_OK) close_decode(m);
    *usable = rc == LILY_OK;
    return rc;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Stages are not traced inside the kernel. */
static bool takes(const struct backend_model *m, const struct cuda_step *step) {
    return step->n == 1 && !m->options.trace;
}

/* The largest logit is the pick, and no one needs the counts: the kernel has done it, where every
 * id below a limit may be sampled. */
static bool is_argmax(const struct backend_model *m, const struct cuda_slot *slot) {
    return !m->has_holes && slot->temperature < 1e-5f && slot->repetition == 1 &&
           slot->frequency == 0 && slot->presence == 0;
}

/* Its blocks wait for each other, so they must all run at once. A cooperative launch promises that
 * whatever else runs on the card, and costs nothing that could be measured. */
static int launch(struct backend_model *m, lily_err *err) {
    struct cuda_decode *x = m->decode;
    void *arguments[] = {&x->args};
    CUlaunchAttribute together = {.id = CU_LAUNCH_COOPERATIVE, .value = {.number = 1}};
    CUlaunchConfig config = {.grid_x = (unsigned)m->processors,
                             .grid_y = 1,
                             .grid_z = 1,
                             .block_x = DECODE_THREADS,
                             .block_y = 1,
                             .block_z = 1,
                             .shared = DECODE_SHARED,
                             .stream = m->stream,
                             .attributes = &together,
                             .n_attributes = 1};
    int rc =
        cuda_check(m->d, m->d->launch_with(&config, x->step, arguments, NULL), "decode step", err);
    if (rc != LILY_OK) return rc;
    x->args.barrier += x->per_step;
    x->args.step++;
    return LILY_OK;
}

/* Slot and result travel with the kernel: nothing else is queued unless others sample. */
static int queue(struct backend_model *m, struct cuda_step *step, lily_err *err) {
    struct decode_args *a = &m->decode->args;
    a->slot = step->slots[0];
    a->pick = a->slot.sample && is_argmax(m, &a->slot);
    bool others = a->slot.sample && !a->pick;
    a->result = others ? step->results_device : (CUdeviceptr)(uintptr_t)step->results;
    int rc = others ? cuda_step_send(m, step, err) : LILY_OK;
    if (rc == LILY_OK) rc = launch(m, err);
    if (rc != LILY_OK || !others) return rc;
    rc = cuda_run_sampling(m, step->slots_device, 1, true, step->results_device, err);
    return rc == LILY_OK ? cuda_step_fetch(m, step, err) : rc;
}

const struct cuda_path cuda_path_decode = {.name = "persistent sm_90a",
                                           .open = open_decode,
                                           .close = close_decode,
                                           .lean = true,
                                           .takes = takes,
                                           .queue = queue};

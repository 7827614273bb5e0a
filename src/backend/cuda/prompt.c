/* A prompt chunk through the kernels of sm_90a (kernels/prefill_kernels.h): products with weights
 * unpacked into registers, the delta rule in pieces, attention on the tensor cores. The order of
 * stages is that of layers.c; what is traced runs there. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/prefill_kernels.h"

enum {
    DECISIVE_COLS = 2048, /* widest hidden state and most outputs of a product that decides */
    DECISIVE_GROUPS = DECISIVE_COLS / 64 / PREFILL_DECISIVE_PARTS,
    DECISIVE_OUTPUTS = 320
};

/* Every kernel used here, with the most dynamic shared memory it is launched with. */
static const struct {
    const char *file, *kernel;
    size_t shared;
} KERNELS[] = {{"prefill_norm", "prompt_norm", 0},
               {"prefill_norm", "prompt_combine", 0},
               {"prefill_route", "prompt_route", 0},
               {"prefill_route", "prompt_group", 0},
               {"prefill_deltanet", "prompt_convolve", 0},
               {"prefill_deltanet", "delta_pieces", PREFILL_PIECES_SHARED},
               {"prefill_deltanet", "delta_states", PREFILL_STATES_SHARED},
               {"prefill_deltanet", "prompt_gated_norm", 0},
               {"prefill_gemm", "dense_wide", PREFILL_WIDE_SHARED},
               {"prefill_attention", "prompt_attention_rows", 0},
               {"prefill_attention", "prompt_flash", PREFILL_FLASH_SHARED},
               {"prefill_attention", "prompt_join", 0},
#define TILED(name, wgs, n, stages) {"prefill_gemm", name, PREFILL_TILE_SHARED(wgs, n, stages)},
#define EXPERTS(n, stages, at_least)                                                               \
    TILED("prompt_up_" #n, 2, n, stages) TILED("prompt_down_" #n, 2, n, stages)
#define DENSE(wgs, n, stages, at_least, pair, alone) TILED("dense_" #wgs "_" #n, wgs, n, stages)
#define DECISIVE(n, stages)                                                                        \
    {"prefill_small", "prompt_decisive_" #n, PREFILL_DECISIVE_SHARED(n, stages, DECISIVE_GROUPS)},
               PREFILL_DENSE_TILES(DENSE) PREFILL_EXPERT_TILES(EXPERTS)
                   PREFILL_DECISIVE_TILES(DECISIVE)};

enum { N_KERNELS = sizeof KERNELS / sizeof *KERNELS };

struct cuda_prompt {
    CUfunction embed, function[N_KERNELS];
};

bool cuda_prompt_suits(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    if (m->prompt_missing || m->capability != 90 || m->options.trace ||
        m->shared_limit < PREFILL_FLASH_SHARED) {
        return false;
    }
    if (s->experts >= DECISIVE_OUTPUTS || 2 * s->gdn_v_heads > DECISIVE_OUTPUTS ||
        s->experts > 256 || s->hidden > DECISIVE_COLS) {
        return false;
    }
    if (s->top_k != 8 || s->head_dim != 256 || s->rotary_dim != 64 || s->gdn_head_dim != 128) {
        return false;
    }
    bool all = true;
    for (int32_t l = 0; l < m->w->layers; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        bool full = shape_is_attention(s, l);
        const struct cuda_mat *wide[4] = {full ? &w->qkv : &w->qkvz, full ? &w->o : &w->out,
                                          &w->gate, &w->shared_gate};
        const struct cuda_mat *down[2] = {&w->down, &w->shared_down};
        for (int i = 0; i < 4; i++) {
            all &= wide[i]->layout == CUDA_WIDE && prefill_takes(wide[i]->rows, wide[i]->cols);
        }
        for (int i = 0; i < 2; i++) {
            all &= down[i]->layout == CUDA_DOWN && prefill_takes(down[i]->rows, down[i]->cols);
        }
    }
    return all;
}

int cuda_prompt_open(struct backend_model *m, lily_err *err) {
    if (!cuda_prompt_suits(m)) return LILY_OK;
    struct cuda_prompt *p = m->prompt = calloc(1, sizeof *p);
    if (!p) return ERR_NOMEM(err, "CUDA prompt kernels");
    int rc = cuda_function(m->d, m->modules, "portable_norm", "embed", 0, &p->embed, err);
    for (int i = 0; i < N_KERNELS && rc == LILY_OK; i++) {
        rc = cuda_function(m->d, m->modules, KERNELS[i].file, KERNELS[i].kernel, KERNELS[i].shared,
                           &p->function[i], err);
    }
    return rc;
}

void cuda_prompt_close(struct backend_model *m) {
    free(m->prompt);
    m->prompt = NULL;
}

/* The arguments of a launch: addresses of values that outlive the call. */
#define ARGS(...) ((void *[]){__VA_ARGS__})

/* Every kernel but the first begins while the one before it ends, and waits for it itself. */
static int launch(const struct backend_model *m, struct prefill_launch l, void **arguments,
                  lily_err *err) {
    CUlaunchAttribute early = {.id = CU_LAUNCH_PROGRAMMATIC, .value = {.number = 1}};
    CUlaunchConfig config = {.grid_x = l.gx,
                             .grid_y = l.gy,
                             .grid_z = 1,
                             .block_x = l.threads,
                             .block_y = 1,
                             .block_z = 1,
                             .shared = (unsigned)l.shared,
                             .stream = m->stream,
                             .attributes = &early,
                             .n_attributes = 1};
    for (int i = 0; i < N_KERNELS; i++) {
        if (strcmp(KERNELS[i].kernel, l.kernel) != 0) continue;
        CUfunction f = m->prompt->function[i];
        return cuda_check(m->d, m->d->launch_with(&config, f, arguments, NULL), "kernel launch",
                          err);
    }
    return ERR(err, LILY_EBACKEND,
               "CUDA: found no kernel %s, expected it in the table; this is a fault of the "
               "program, please report it",
               l.kernel);
}

/* out[r] = w . in[r]; in is reordered, out rows ldo floats apart. */
static int product(struct backend_model *m, struct cuda_mat w, CUdeviceptr in, CUdeviceptr out,
                   int32_t ldo, int32_t rows, lily_err *err) {
    return launch(m, prefill_dense(rows, w.rows, w.cols, m->processors),
                  ARGS(&in, &w, &out, &ldo, &rows), err);
}

/* The second half of x.normed: what the first lost in rounding. */
static CUdeviceptr low_of(const struct backend_model *m) {
    return m->chunk.normed + (size_t)m->rows * (size_t)model_shape(m)->hidden * sizeof(uint16_t);
}

/* out = w . x.normed in near float32 accuracy, in parts. */
static int decisive(struct backend_model *m, struct cuda_mat w, CUdeviceptr out, int32_t rows,
                    lily_err *err) {
    CUdeviceptr high = m->chunk.normed, low = low_of(m);
    return launch(m, prefill_decisive(rows, w.rows, w.cols, m->processors),
                  ARGS(&high, &low, &m->chunk.sums, &w, &out, &rows), err);
}

/* x += add where given, normed; with inputs for products that decide where `decides`. */
static int norm(struct backend_model *m, CUdeviceptr add, CUdeviceptr weight, bool decides,
                CUdeviceptr counts, int32_t rows, lily_err *err) {
    struct cuda_scratch *x = &m->chunk;
    CUdeviceptr high = decides ? x->normed : 0, low = low_of(m);
    return launch(m, prefill_norm(rows),
                  ARGS(&x->x, &add, &weight, &x->normed_bf, &high, &low, &x->sums, &counts), err);
}

/* ---- mixers ---------------------------------------------------------------------------------- */

static int delta_rule(struct backend_model *m, const struct cuda_run *run, int32_t l,
                      lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->chunk;
    CUdeviceptr decays = x->pieces + x->pieces_at[0], of_w = x->pieces + x->pieces_at[1];
    CUdeviceptr of_p = x->pieces + x->pieces_at[2], of_u = x->pieces + x->pieces_at[3];
    CUdeviceptr slot = run->slots_device, channels = x->channels;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, kind = shape_kind_index(s, l);
    int32_t heads = s->gdn_v_heads, pieces = prefill_pieces(run->slots[0].pos, rows);
    int32_t each = prefill_convolve_each(rows);
    int rc = launch(m, prefill_convolve(rows, 2 * s->gdn_k_heads + heads),
                    ARGS(&x->wide, &width, &w.conv, &slot, &rows, &kind, &channels, &each), err);
    if (rc == LILY_OK) {
        rc = launch(m, prefill_delta_pieces(pieces, heads),
                    ARGS(&channels, &x->scores, &w.decay_rate, &w.dt_bias, &slot, &rows, &decays,
                         &of_w, &of_p, &of_u),
                    err);
    }
    if (rc == LILY_OK) {
        rc = launch(
            m, prefill_delta_states(heads),
            ARGS(&channels, &decays, &of_w, &of_p, &of_u, &slot, &rows, &pieces, &kind, &x->delta),
            err);
    }
    if (rc != LILY_OK) return rc;
    return launch(m, prefill_gated_norm(rows),
                  ARGS(&x->delta, &x->wide, &width, &w.gdn_norm, &x->mix_bf), err);
}

static int deltanet(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->chunk;
    int32_t rows = cuda_run_rows(run);
    int rc = product(m, w->qkvz, x->normed_bf, x->wide, m->proj_width, rows, err);
    if (rc == LILY_OK) rc = decisive(m, w->ba, x->scores, rows, err);
    if (rc == LILY_OK) rc = delta_rule(m, run, l, err);
    if (rc != LILY_OK) return rc;
    return product(m, w->out, x->mix_bf, x->out, model_shape(m)->hidden, rows, err);
}

static int attention(struct backend_model *m, const struct cuda_run *run, int32_t l,
                     lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->chunk;
    CUdeviceptr slot = run->slots_device, queries = x->queries;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, kind = shape_kind_index(s, l);
    int rc = product(m, w.qkv, x->normed_bf, x->wide, width, rows, err);
    if (rc == LILY_OK) {
        rc = launch(
            m, prefill_attention_rows(rows),
            ARGS(&x->wide, &width, &w.q_norm, &w.k_norm, &m->dw.inv_freq, &slot, &kind, &queries),
            err);
    }
    CUdeviceptr parts = x->parts, sums = x->parts_sums;
    int32_t split = prefill_split(run->slots[0].pos, rows, s->kv_heads, m->rows, m->processors);
    if (rc == LILY_OK) {
        rc = launch(m, prefill_flash(rows, s->kv_heads, split),
                    ARGS(&queries, &x->wide, &width, &slot, &rows, &kind, &x->mix_bf, &parts, &sums,
                         &split),
                    err);
    }
    if (rc == LILY_OK && split) {
        rc = launch(m, prefill_join(rows),
                    ARGS(&parts, &sums, &x->wide, &width, &slot, &rows, &x->mix_bf), err);
    }
    return rc == LILY_OK ? product(m, w.o, x->mix_bf, x->out, s->hidden, rows, err) : rc;
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Both halves, of the chosen experts and of the shared one: x.given[place], x.out[row]. Gate and up
 * are one matrix of tiles. */
static int two_halves(struct backend_model *m, int32_t l, int32_t height, struct cuda_groups groups,
                      int32_t rows, lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->chunk;
    uint32_t blocks = prefill_expert_blocks(rows, s->experts, s->top_k, height);
    int32_t widest = s->expert_width > s->shared_width ? s->expert_width : s->shared_width;
    int rc = launch(m, prefill_experts(true, height, blocks, widest, s->hidden),
                    ARGS(&x->normed_bf, &w.gate, &groups, &x->hidden, &w.shared_gate, &rows), err);
    if (rc != LILY_OK) return rc;
    return launch(m, prefill_experts(false, height, blocks, widest, s->hidden),
                  ARGS(&x->hidden, &w.down, &groups, &x->given, &w.shared_down, &x->out, &rows),
                  err);
}

/* The norm behind the experts: of the next layer, or none. */
static int combine(struct backend_model *m, int32_t next, int32_t rows, lily_err *err) {
    struct cuda_scratch *x = &m->chunk;
    CUdeviceptr high = shape_is_attention(model_shape(m), next) ? 0 : x->normed, low = low_of(m);
    CUdeviceptr weight = next < m->w->layers ? m->dw.layer[next].input_norm : 0;
    return launch(m, prefill_combine(rows),
                  ARGS(&x->given, &x->places, &x->routing, &x->scores, &x->out, &x->x, &weight,
                       &x->normed_bf, &high, &low, &x->sums),
                  err);
}

static int experts(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->chunk;
    int32_t rows = cuda_run_rows(run), height = prefill_expert_height(rows, s->experts, s->top_k);
    CUdeviceptr begin = x->experts, count = begin + (size_t)(s->experts + 1) * sizeof(int32_t);
    CUdeviceptr list = count + sizeof(int32_t);
    int rc = decisive(m, w->router, x->scores, rows, err);
    if (rc == LILY_OK) {
        rc = launch(m, prefill_route(rows),
                    ARGS(&x->scores, &x->routing, &rows, &x->counts, &x->places), err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, prefill_group(rows),
                    ARGS(&x->counts, &rows, &height, &begin, &list, &count, &x->pairs, &x->places),
                    err);
    }
    if (rc != LILY_OK) return rc;
    struct cuda_groups sorted = {
        .begin = begin, .blocks = list, .n_blocks = count, .pairs = x->pairs};
    rc = two_halves(m, l, height, sorted, rows, err);
    return rc == LILY_OK ? combine(m, l + 1, rows, err) : rc;
}

int cuda_prompt_layers(struct backend_model *m, const struct cuda_run *run, lily_err *err) {
    struct cuda_scratch *x = &m->chunk;
    int32_t rows = cuda_run_rows(run);
    CUdeviceptr slots = run->slots_device;
    struct cuda_mat table = m->dw.embed;
    int rc = cuda_launch(m, m->prompt->embed, (unsigned)rows, 1, 1, 256, 0,
                         ARGS(&table, &x->ids, &slots, &x->x), err);
    if (rc == LILY_OK) {
        bool decides = !shape_is_attention(model_shape(m), 0);
        rc = norm(m, 0, m->dw.layer[0].input_norm, decides, 0, rows, err);
    }
    for (int32_t l = 0; l < m->w->layers && rc == LILY_OK; l++) {
        bool full = shape_is_attention(model_shape(m), l);
        rc = full ? attention(m, run, l, err) : deltanet(m, run, l, err);
        if (rc == LILY_OK) {
            rc = norm(m, x->out, m->dw.layer[l].post_norm, true, x->counts, rows, err);
        }
        if (rc == LILY_OK) rc = experts(m, run, l, err);
    }
    return rc;
}

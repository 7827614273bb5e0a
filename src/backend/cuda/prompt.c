/* A prompt chunk through the kernels of sm_90a (kernels/prefill_kernels.h): products with weights
 * unpacked into registers, the delta rule in pieces, attention on the tensor cores. The order of
 * stages is that of layers.c; what is traced runs there. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/prefill_kernels.h"

/* Every kernel used here, with the most dynamic shared memory it is launched with. */
static const struct {
    const char *file, *kernel;
    size_t shared;
} KERNELS[] = {{"portable_norm", "embed", 0},
               {"portable_moe", "route", 0},
               {"portable_moe", "combine", 0},
               {"prefill_norm", "prompt_norm", 0},
               {"prefill_route", "prompt_group", 0},
               {"prefill_deltanet", "prompt_convolve", 0},
               {"prefill_deltanet", "delta_pieces", PREFILL_PIECES_SHARED},
               {"prefill_deltanet", "delta_states", PREFILL_STATES_SHARED},
               {"prefill_deltanet", "prompt_gated_norm", 0},
               {"prefill_attention", "prompt_attention_rows", 0},
               {"prefill_attention", "prompt_flash", PREFILL_FLASH_SHARED},
#define TILED(name, wgs, n, stages)     {"prefill_gemm", name, PREFILL_TILE_SHARED(wgs, n, stages)},
#define DENSE(wgs, n, stages, at_least) TILED("dense_" #wgs "_" #n, wgs, n, stages)
#define EXPERTS(n, stages, at_least)                                                               \
    TILED("prompt_up_" #n, 2, n, stages) TILED("prompt_down_" #n, 2, n, stages)
               PREFILL_DENSE_TILES(DENSE) PREFILL_EXPERT_TILES(EXPERTS)};

enum { N_KERNELS = sizeof KERNELS / sizeof *KERNELS };

struct cuda_prompt {
    CUfunction function[N_KERNELS];
    CUdeviceptr block; /* what pieces of the delta rule leave: decays, w, p, u */
    size_t at[4];
};

static bool suits(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    if (m->capability != 90 || m->options.trace || m->shared_limit < PREFILL_FLASH_SHARED) {
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

/* What pieces of the delta rule leave; a chunk may begin between two points of the grid. */
static size_t delta_bytes(const struct backend_model *m, size_t at[4]) {
    return prefill_delta_bytes(m->rows / 64 + 1, model_shape(m)->gdn_v_heads, at);
}

size_t cuda_prompt_bytes(const struct backend_model *m) {
    size_t at[4];
    return suits(m) ? delta_bytes(m, at) : 0;
}

int cuda_prompt_open(struct backend_model *m, lily_err *err) {
    if (!suits(m)) return LILY_OK;
    struct cuda_prompt *p = m->prompt = calloc(1, sizeof *p);
    if (!p) return ERR_NOMEM(err, "CUDA prompt kernels");
    int rc = LILY_OK;
    for (int i = 0; i < N_KERNELS && rc == LILY_OK; i++) {
        rc = cuda_function(m->d, m->modules, KERNELS[i].file, KERNELS[i].kernel, KERNELS[i].shared,
                           &p->function[i], err);
    }
    if (rc == LILY_OK) {
        rc = cuda_memory(m, delta_bytes(m, p->at), "prompt scratch", &p->block, err);
    }
    return rc;
}

void cuda_prompt_close(struct backend_model *m) {
    if (m->prompt && m->prompt->block) m->d->memory_free(m->prompt->block);
    free(m->prompt);
    m->prompt = NULL;
}

/* The arguments of a launch: addresses of values that outlive the call. */
#define ARGS(...) ((void *[]){__VA_ARGS__})

static int launch(const struct backend_model *m, struct prefill_launch l, void **arguments,
                  lily_err *err) {
    for (int i = 0; i < N_KERNELS; i++) {
        if (strcmp(KERNELS[i].kernel, l.kernel) != 0) continue;
        return cuda_launch(m, m->prompt->function[i], l.gx, l.gy, 1, l.threads, l.shared, arguments,
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
    return launch(m, prefill_dense(rows, w.rows, m->processors), ARGS(&in, &w, &out, &ldo, &rows),
                  err);
}

static int norm(struct backend_model *m, CUdeviceptr add, CUdeviceptr weight, int32_t rows,
                lily_err *err) {
    struct cuda_scratch *x = &m->x;
    return launch(m, prefill_norm(rows), ARGS(&x->x, &add, &weight, &x->normed, &x->normed_bf),
                  err);
}

/* ---- mixers ---------------------------------------------------------------------------------- */

static int delta_rule(struct backend_model *m, const struct cuda_run *run, int32_t l,
                      lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    const struct cuda_prompt *p = m->prompt;
    CUdeviceptr slot = run->slots_device, decays = p->block + p->at[0], of_w = p->block + p->at[1];
    CUdeviceptr of_p = p->block + p->at[2], of_u = p->block + p->at[3], channels = x->queries;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, kind = shape_kind_index(s, l);
    int32_t heads = s->gdn_v_heads, pieces = prefill_pieces(run->slots[0].pos, rows);
    int rc = launch(m, prefill_convolve(rows, 2 * s->gdn_k_heads + heads),
                    ARGS(&x->wide, &width, &w.conv, &slot, &rows, &kind, &channels), err);
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
    struct cuda_scratch *x = &m->x;
    int32_t rows = cuda_run_rows(run);
    int rc = product(m, w->qkvz, x->normed_bf, x->wide, m->proj_width, rows, err);
    if (rc == LILY_OK) rc = cuda_run_small(m, run, w->ba, x->scores, err);
    if (rc == LILY_OK) rc = delta_rule(m, run, l, err);
    if (rc != LILY_OK) return rc;
    return product(m, w->out, x->mix_bf, x->out, model_shape(m)->hidden, rows, err);
}

static int attention(struct backend_model *m, const struct cuda_run *run, int32_t l,
                     lily_err *err) {
    const struct shape *s = model_shape(m);
    struct cuda_layer w = m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    CUdeviceptr slot = run->slots_device, queries = x->queries;
    int32_t rows = cuda_run_rows(run), width = m->proj_width, kind = shape_kind_index(s, l);
    int rc = product(m, w.qkv, x->normed_bf, x->wide, width, rows, err);
    if (rc == LILY_OK) {
        rc = launch(
            m, prefill_attention_rows(rows),
            ARGS(&x->wide, &width, &w.q_norm, &w.k_norm, &m->dw.inv_freq, &slot, &kind, &queries),
            err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, prefill_flash(rows, s->kv_heads),
                    ARGS(&queries, &x->wide, &width, &slot, &rows, &kind, &x->mix_bf), err);
    }
    return rc == LILY_OK ? product(m, w.o, x->mix_bf, x->out, s->hidden, rows, err) : rc;
}

/* ---- experts --------------------------------------------------------------------------------- */

/* hidden = silu(gate in) * (up in), out = down hidden, for `blocks` blocks of at most `height`.
 * Gate and up are one matrix of tiles. */
static int two_halves(struct backend_model *m, int32_t height, uint32_t blocks,
                      struct cuda_mat gate_up, struct cuda_mat down, struct cuda_groups groups,
                      int32_t inner, CUdeviceptr hidden, CUdeviceptr out, lily_err *err) {
    int32_t h = model_shape(m)->hidden;
    int rc = launch(m, prefill_experts(true, height, blocks, inner, h),
                    ARGS(&m->x.normed_bf, &gate_up, &groups, &hidden, &inner), err);
    if (rc != LILY_OK) return rc;
    return launch(m, prefill_experts(false, height, blocks, inner, h),
                  ARGS(&hidden, &down, &groups, &out), err);
}

static int experts(struct backend_model *m, const struct cuda_run *run, int32_t l, lily_err *err) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    struct cuda_scratch *x = &m->x;
    int32_t rows = cuda_run_rows(run), height = prefill_expert_height(rows, s->experts, s->top_k);
    CUdeviceptr begin = x->experts, count = begin + (size_t)(s->experts + 1) * sizeof(int32_t);
    CUdeviceptr list = count + sizeof(int32_t), none = 0;
    int rc = cuda_run_small(m, run, w->router, x->scores, err);
    if (rc == LILY_OK) {
        struct prefill_launch route = {"portable_moe", "route", prefill_blocks(rows, 4), 1, 128, 0};
        rc = launch(m, route, ARGS(&x->scores, &x->routing, &rows), err);
    }
    if (rc == LILY_OK) {
        rc = launch(m, prefill_group(),
                    ARGS(&x->routing, &rows, &height, &begin, &list, &count, &x->pairs, &x->places),
                    err);
    }
    if (rc != LILY_OK) return rc;
    struct cuda_groups sorted = {
        .begin = begin, .blocks = list, .n_blocks = count, .pairs = x->pairs};
    rc = two_halves(m, height, prefill_expert_blocks(rows, s->experts, s->top_k, height), w->gate,
                    w->down, sorted, s->expert_width, x->hidden, x->wide, err);
    if (rc != LILY_OK) return rc;
    CUdeviceptr own = x->hidden + (size_t)rows * (size_t)s->top_k * (size_t)s->expert_width * 2;
    struct cuda_groups all = {.n_rows = rows};
    height = prefill_shared_height(rows);
    rc = two_halves(m, height, prefill_blocks(rows, height), w->shared_gate, w->shared_down, all,
                    s->shared_width, own, x->out, err);
    if (rc != LILY_OK) return rc;
    struct prefill_launch combine = {"portable_moe", "combine", (uint32_t)rows, 1, 256, 0};
    return launch(m, combine,
                  ARGS(&x->wide, &x->places, &x->routing, &x->scores, &x->out, &x->x, &none, &none),
                  err);
}

int cuda_prompt_layers(struct backend_model *m, const struct cuda_run *run, lily_err *err) {
    struct cuda_scratch *x = &m->x;
    int32_t rows = cuda_run_rows(run);
    CUdeviceptr slots = run->slots_device;
    struct cuda_mat table = m->dw.embed;
    struct prefill_launch embed = {"portable_norm", "embed", (uint32_t)rows, 1, 256, 0};
    int rc = launch(m, embed, ARGS(&table, &x->ids, &slots, &x->x), err);
    for (int32_t l = 0; l < m->w->layers && rc == LILY_OK; l++) {
        const struct cuda_layer *w = &m->dw.layer[l];
        bool full = shape_is_attention(model_shape(m), l);
        rc = norm(m, 0, w->input_norm, rows, err);
        if (rc == LILY_OK) rc = full ? attention(m, run, l, err) : deltanet(m, run, l, err);
        if (rc == LILY_OK) rc = norm(m, x->out, w->post_norm, rows, err);
        if (rc == LILY_OK) rc = experts(m, run, l, err);
    }
    return rc;
}

/* Opening a model: checks, memory, threads, statistics, and the backend's table. The weights stay
 * where the checkpoint mapped them; only convolution taps and decay rates are copied, 4 MB. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/memory.h"

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_shape(const struct shape *s, lily_err *err) {
    bool fits = s->group == GROUP && s->head_dim == HEAD && s->gdn_head_dim == STATE &&
                s->q_heads == KV_GROUP * s->kv_heads && s->gdn_v_heads == 2 * s->gdn_k_heads &&
                s->conv_taps == CONV_TAPS && s->top_k <= 16 && s->vocab % TILE == 0 &&
                s->hidden <= MAX_COLS && s->q_dim <= MAX_COLS && s->gdn_v_dim <= MAX_COLS &&
                s->expert_width <= MAX_COLS && s->shared_width <= MAX_COLS;
    if (fits) return LILY_OK;
    return ERR(err, LILY_EMODEL,
               "shape %s: found sizes the CPU kernels are not made for; extend "
               "src/backend/cpu/kernels/kernels.h",
               s->name);
}

/* What the integer kernels (4) or the float kernels (4 or 8) can read. */
static int check_mat(const struct mat *m, const char *name, int32_t layer, bool small,
                     lily_err *err) {
    if (m->bits == 4 || (small && m->bits == 8)) return LILY_OK;
    return ERR(err, LILY_EMODEL,
               "layer %d %s: found %d-bit weights, expected %s; let the loader quantise the "
               "checkpoint (lily pack), or use the reference backend",
               layer, name, m->bits, small ? "4 or 8" : "4");
}

static int check_experts(const struct weights *w, int32_t l, lily_err *err) {
    const struct moe_weights *e = &w->layer[l].moe;
    int rc = check_mat(&e->router, "router", l, true, err);
    if (!rc) rc = check_mat(&e->shared_gate, "shared expert gate", l, true, err);
    if (!rc) rc = check_mat(&e->shared_gate_proj, "shared gate_proj", l, false, err);
    if (!rc) rc = check_mat(&e->shared_up_proj, "shared up_proj", l, false, err);
    if (!rc) rc = check_mat(&e->shared_down_proj, "shared down_proj", l, false, err);
    for (int32_t i = 0; i < w->shape->experts && !rc; i++) {
        rc = check_mat(&e->gate[i], "expert gate_proj", l, false, err);
        if (!rc) rc = check_mat(&e->up[i], "expert up_proj", l, false, err);
        if (!rc) rc = check_mat(&e->down[i], "expert down_proj", l, false, err);
    }
    return rc;
}

static int check_mixer(const struct weights *w, int32_t l, lily_err *err) {
    const struct attention_weights *a = &w->layer[l].attention;
    const struct deltanet_weights *d = &w->layer[l].deltanet;
    int rc;
    if (shape_is_attention(w->shape, l)) {
        rc = check_mat(&a->q_proj, "q_proj", l, false, err);
        if (!rc) rc = check_mat(&a->k_proj, "k_proj", l, false, err);
        if (!rc) rc = check_mat(&a->v_proj, "v_proj", l, false, err);
        return rc ? rc : check_mat(&a->o_proj, "o_proj", l, false, err);
    }
    rc = check_mat(&d->in_proj_qkv, "in_proj_qkv", l, false, err);
    if (!rc) rc = check_mat(&d->in_proj_z, "in_proj_z", l, false, err);
    if (!rc) rc = check_mat(&d->in_proj_b, "in_proj_b", l, true, err);
    if (!rc) rc = check_mat(&d->in_proj_a, "in_proj_a", l, true, err);
    return rc ? rc : check_mat(&d->out_proj, "out_proj", l, false, err);
}

static int check_weights(const struct weights *w, lily_err *err) {
    int rc = check_mat(&w->lm_head, "lm_head", -1, false, err);
    for (int32_t l = 0; l < w->layers && !rc; l++) {
        rc = check_mixer(w, l, err);
        if (!rc) rc = check_experts(w, l, err);
    }
    return rc;
}

static int check_options(const struct weights *w, const struct backend_options *o, lily_err *err) {
    if (o->max_sessions >= 1 && o->max_context >= 1 && o->max_context <= w->shape->max_context) {
        return LILY_OK;
    }
    return ERR(err, LILY_EINVAL,
               "CPU backend: found %d session(s) of %d tokens, expected at least 1 of 1 to %d",
               o->max_sessions, o->max_context, w->shape->max_context);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static struct qrows carve_qrows(struct carver *c, int32_t cols, size_t rows) {
    size_t groups = (size_t)cols / GROUP;
    return (struct qrows){.q = carve(c, groups * rows, GROUP_BYTES),
                          .s = carve(c, groups * rows * 2, sizeof(float)),
                          .rows = rows};
}

static void place_lane(const struct backend_model *m, struct lane *lane, struct carver *c) {
    const struct shape *s = model_shape(m);
    struct lane l = {
        .normed = carve(c, (size_t)s->hidden, sizeof(float)),
        .normed_q = carve_qrows(c, s->hidden, 1),
        .routing = carve(c, 2 * (size_t)s->top_k, sizeof(float)),
        .scores = carve(c, KV_GROUP * SPAN, sizeof(float)),
        .queries = carve(c, KV_GROUP * HEAD, sizeof(float)),
        .partial = carve(c, 1, sizeof(struct attend)),
        .running = carve(c, QUERY_TILE, sizeof(struct attend)),
        .gate = carve(c, TOKEN_BLOCK * TILE, sizeof(float)),
        .up = carve(c, TOKEN_BLOCK * TILE, sizeof(float)),
        .tail = carve(c, (CONV_TAPS - 1) * 2 * STATE, sizeof(float)),
        .row = carve(c, (size_t)s->hidden, sizeof(float)),
    };
    if (c->base) *lane = l;
}

/* Every array of the model, for as many threads. */
static void place(struct backend_model *m, int32_t threads, struct carver *c) {
    const struct shape *s = model_shape(m);
    struct scratch *x = &m->x;
    size_t rows = (size_t)m->rows, hidden = (size_t)s->hidden,
           pairs = rows * (size_t)(s->top_k + 1);
    size_t width = (size_t)(s->expert_width > s->shared_width ? s->expert_width : s->shared_width);
    m->inv_freq = carve(c, (size_t)s->rotary_dim / 2, sizeof(float));
    m->taps = carve(c, (size_t)m->gdn_layers * CONV_TAPS * (size_t)s->conv_dim, sizeof(float));
    m->decay_rate = carve(c, (size_t)m->gdn_layers * (size_t)s->gdn_v_heads, sizeof(float));
    x->x = carve(c, rows * hidden, sizeof(float));
    x->normed = carve(c, rows * hidden, sizeof(float));
    x->rope = carve(c, rows * (size_t)s->rotary_dim, sizeof(float));
    x->proj = carve(c, rows * (size_t)m->proj_width, sizeof(float));
    x->mix = carve(c, rows * (size_t)m->mix_width, sizeof(float));
    x->out = carve(c, rows * hidden, sizeof(float));
    x->shared = carve(c, rows * hidden, sizeof(float));
    x->scores = carve(c, rows * (size_t)(s->experts + 1), sizeof(float));
    x->routing = carve(c, rows * 2 * (size_t)s->top_k, sizeof(float));
    x->normed_q = carve_qrows(c, s->hidden, rows);
    x->mix_q = carve_qrows(c, m->mix_width, rows);
    x->hidden_q = carve_qrows(c, (int32_t)width, pairs);
    x->expert_begin = carve(c, (size_t)s->experts + 2, sizeof(int32_t));
    x->pair_row = carve(c, pairs, sizeof(int32_t));
    x->pair_weight = carve(c, pairs, sizeof(float));
    x->spans = carve(c, (size_t)s->kv_heads * (size_t)m->spans, sizeof(struct attend));
    x->logits = carve(c, rows, sizeof(float *));
    x->wanted = carve(c, rows, sizeof(int32_t));
    x->runs = carve(c, rows, sizeof(struct run));
    x->pos = carve(c, rows, sizeof(int32_t));
    x->ids = carve(c, rows, sizeof(int32_t));
    x->finite = carve(c, (size_t)m->options.max_sessions, sizeof(bool));
    x->lane = carve(c, (size_t)threads, sizeof(struct lane));
    for (int32_t t = 0; t < threads; t++) place_lane(m, c->base ? &x->lane[t] : NULL, c);
}

/* Scratch and sessions must fit what is free now; with the weights, which are mapped but read
 * nearly whole by every step, they must fit the machine. */
static int preflight(const struct backend_model *m, lily_err *err) {
    double own = (double)m->block_bytes + (double)m->options.max_sessions *
                                              (double)cpu_session_bytes(m, m->options.max_context);
    double free_now = (double)memory_available(), limit = (double)memory_limit();
    double all = own + (double)m->w->bytes;
    if (own <= free_now && all <= limit) return LILY_OK;
    bool machine = all > limit;
    return ERR(err, LILY_ENOMEM,
               "CPU backend: found %.1f GiB of %s memory, expected %.1f GiB%s for %d session(s) of "
               "%d tokens; ask for a shorter context or fewer sessions, or close other programs",
               (machine ? limit : free_now) / GIB, machine ? "installed" : "free",
               (machine ? all : own) / GIB, machine ? " with the weights" : "",
               m->options.max_sessions, m->options.max_context);
}

static int allocate(struct backend_model *m, int32_t threads, lily_err *err) {
    struct carver c = {0};
    place(m, threads, &c);
    m->block_bytes = c.used;
    int rc = preflight(m, err);
    if (rc != LILY_OK) return rc;
    m->block = pages_new(m->block_bytes);
    if (!m->block) return ERR_NOMEM(err, "CPU backend");
    c = (struct carver){.base = m->block};
    place(m, threads, &c);
    return LILY_OK;
}

/* Convolution taps by tap instead of by channel, and exp(a_log). */
static void prepare_constants(struct backend_model *m) {
    const struct shape *s = model_shape(m);
    for (int32_t l = 0; l < m->w->layers; l++) {
        if (shape_is_attention(s, l)) continue;
        const struct deltanet_weights *d = &m->w->layer[l].deltanet;
        size_t n = (size_t)shape_kind_index(s, l);
        float *taps = m->taps + n * CONV_TAPS * (size_t)s->conv_dim;
        float *rate = m->decay_rate + n * (size_t)s->gdn_v_heads;
        for (int32_t c = 0; c < s->conv_dim; c++) {
            for (int32_t j = 0; j < CONV_TAPS; j++) {
                taps[(size_t)j * (size_t)s->conv_dim + (size_t)c] = d->conv[c * CONV_TAPS + j];
            }
        }
        for (int32_t h = 0; h < s->gdn_v_heads; h++) rate[h] = expf(d->a_log[h]);
    }
    rope_frequencies(s, m->inv_freq);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void cpu_close(struct backend_model *m) {
    if (!m) return;
    cpu_pool_free(m->pool);
    pages_free(m->block, m->block_bytes);
    free(m);
}

static void set_sizes(struct backend_model *m) {
    const struct shape *s = model_shape(m);
    const struct backend_options *o = &m->options;
    m->attention_layers = shape_attention_layers(s, m->w->layers);
    m->gdn_layers = m->w->layers - m->attention_layers;
    m->rows = o->max_context < CHUNK ? o->max_context : CHUNK;
    if (m->rows < o->max_sessions) m->rows = o->max_sessions;
    int32_t gdn = s->conv_dim + s->gdn_v_dim + 2 * s->gdn_v_heads;
    int32_t full = 2 * s->q_dim + 2 * s->kv_dim;
    m->proj_width = ((gdn > full ? gdn : full) + 15) / 16 * 16;
    m->mix_width = s->q_dim > s->gdn_v_dim ? s->q_dim : s->gdn_v_dim;
    m->spans = (o->max_context + SPAN - 1) / SPAN;
}

/* The processor's own name for itself. */
static void device_name(char *out, size_t size) {
    snprintf(out, size, "CPU");
#ifdef __linux__
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "model name", 10) != 0) continue;
        char *name = strchr(line, ':');
        line[strcspn(line, "\n")] = 0;
        if (name) snprintf(out, size, "%.80s", name + 2);
        break;
    }
    if (f) fclose(f);
#endif
}

/* "AMD EPYC, 2 threads, avx512-vnni" */
static void describe(int32_t threads, const struct kernels *k, char *out, size_t size) {
    char name[96];
    device_name(name, sizeof name);
    snprintf(out, size, "%s, %d thread%s, %s", name, threads, threads == 1 ? "" : "s", k->name);
}

static uint64_t mat_bytes(const struct mat *m) {
    uint64_t groups = (uint64_t)m->rows * (uint64_t)(m->cols / GROUP);
    return (uint64_t)m->rows * mat_row_bytes(m) + (m->scales ? 4 * groups : 0);
}

/* Bytes of weights that one token reads in a layer: top_k of the experts. */
static uint64_t layer_bytes(const struct weights *w, int32_t l) {
    const struct attention_weights *a = &w->layer[l].attention;
    const struct deltanet_weights *d = &w->layer[l].deltanet;
    const struct moe_weights *e = &w->layer[l].moe;
    uint64_t routed = mat_bytes(&e->gate[0]) + mat_bytes(&e->up[0]) + mat_bytes(&e->down[0]);
    uint64_t bytes = (uint64_t)w->shape->top_k * routed + mat_bytes(&e->router) +
                     mat_bytes(&e->shared_gate_proj) + mat_bytes(&e->shared_up_proj) +
                     mat_bytes(&e->shared_down_proj) + mat_bytes(&e->shared_gate);
    if (shape_is_attention(w->shape, l)) {
        return bytes + mat_bytes(&a->q_proj) + mat_bytes(&a->k_proj) + mat_bytes(&a->v_proj) +
               mat_bytes(&a->o_proj);
    }
    return bytes + mat_bytes(&d->in_proj_qkv) + mat_bytes(&d->in_proj_z) +
           mat_bytes(&d->in_proj_b) + mat_bytes(&d->in_proj_a) + mat_bytes(&d->out_proj);
}

/* Bytes of weights that one token reads, without norms and convolution taps (0.2 % of it). */
static uint64_t token_bytes(const struct weights *w) {
    uint64_t bytes = mat_bytes(&w->lm_head) + mat_bytes(&w->embed) / (uint64_t)w->embed.rows;
    for (int32_t l = 0; l < w->layers; l++) bytes += layer_bytes(w, l);
    return bytes;
}

/* One thread per physical core, but none with so little to read that the barriers of a step cost
 * more than the reading they divide, as with the stand-in. */
static int32_t default_threads(const struct weights *w) {
    enum { BYTES_A_THREAD = 8 << 20 };
    uint64_t worth = token_bytes(w) / BYTES_A_THREAD;
    uint64_t cores = (uint64_t)cpu_pool_physical_cores();
    return worth < 1 ? 1 : (int32_t)(worth < cores ? worth : cores);
}

int cpu_open_with(const struct kernels *k, const struct weights *w,
                  const struct backend_options *options, struct backend_model **out,
                  lily_err *err) {
    int rc = check_options(w, options, err);
    if (rc == LILY_OK) rc = check_shape(w->shape, err);
    if (rc == LILY_OK) rc = check_weights(w, err);
    if (rc != LILY_OK) return rc;
    struct backend_model *m = calloc(1, sizeof *m);
    if (!m) return ERR_NOMEM(err, "CPU backend");
    m->w = w;
    m->k = k;
    m->options = *options;
    set_sizes(m);
    int32_t threads = options->threads > 0 ? options->threads : default_threads(w);
    rc = allocate(m, threads, err);
    if (rc == LILY_OK) rc = cpu_pool_new(threads, &m->pool, err);
    if (rc != LILY_OK) {
        cpu_close(m);
        return rc;
    }
    prepare_constants(m);
    describe(cpu_pool_threads(m->pool), k, m->device, sizeof m->device);
    *out = m;
    return LILY_OK;
}

static int cpu_open(const struct weights *w, const struct backend_options *options,
                    struct backend_model **out, lily_err *err) {
    return cpu_open_with(kernels_usable()[0], w, options, out, err);
}

static void cpu_probe(struct backend_probe *out) {
    const struct kernels *const *k = kernels_usable();
    out->usable = true;
    describe(cpu_pool_physical_cores(), k[0], out->device, sizeof out->device);
    snprintf(out->reason, sizeof out->reason,
             "runs on any processor; the fastest kernels this one "
             "has are %s (%s)",
             k[0]->name, k[0]->why);
}

/* The state, read here, is written too. */
static void cpu_stats(const struct backend_model *m, struct backend_stats *out) {
    const struct weights *w = m->w;
    *out = (struct backend_stats){
        .weight_bytes = w->bytes,
        .session_bytes = cpu_session_bytes(m, m->options.max_context),
        .scratch_bytes = m->block_bytes,
        .bytes_per_token = token_bytes(w) + cpu_state_bytes(m),
        .kv_bytes_per_depth = cpu_kv_bytes(m, 1),
    };
    snprintf(out->kernels, sizeof out->kernels, "%s", m->k->name);
    snprintf(out->device, sizeof out->device, "%s", m->device);
}

const struct backend backend_cpu = {
    .name = "cpu",
    .probe = cpu_probe,
    .open = cpu_open,
    .close = cpu_close,
    .session_new = cpu_session_new,
    .session_free = cpu_session_free,
    .position = cpu_position,
    .reset = cpu_reset,
    .prefill = cpu_prefill,
    .decode_submit = cpu_decode_submit,
    .decode_wait = cpu_decode_wait,
    .state_bytes = cpu_state_bytes,
    .state_new = cpu_state_new,
    .state_free = cpu_state_free,
    .state_save = cpu_state_save,
    .state_restore = cpu_state_restore,
    .state_export = cpu_state_export,
    .state_import = cpu_state_import,
    .kv_bytes = cpu_kv_bytes,
    .kv_export = cpu_kv_export,
    .kv_import = cpu_kv_import,
    .stats = cpu_stats,
};

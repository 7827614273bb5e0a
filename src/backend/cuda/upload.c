/* The weights in device memory: one allocation (the arena) whose layout is walked twice, first to
 * add it up, then to place it. What is to be copied is a list of pieces in ascending order of their
 * place, so that the arena can be filled in equal chunks: several threads gather a chunk's pieces
 * from the mapped checkpoint into pinned memory (as tiles where the card's kernels want them) and
 * send it while they gather the next. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/tile.h"

enum {
    CHUNK_BYTES = 4 << 20,
    MAX_THREADS = 12,
    BUFFERS = 2,          /* of a thread: one is filled while the other is sent */
    TILED_CAPABILITY = 90 /* the card whose kernels stream tiles */
};

struct piece {
    size_t at; /* in the arena */
    size_t bytes;
    const void *from;        /* NULL: */
    struct cuda_tiles tiles; /* made of these */
};

struct plan {
    struct backend_model *m;
    CUdeviceptr base; /* 0 in the first walk */
    size_t used;
    struct piece *pieces; /* second walk */
    size_t n, room;
    void **owned; /* values made here: widened codes, decay rates */
    size_t n_owned;
    bool failed; /* out of host memory */
};

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_mat(const struct mat *m, const char *name, int32_t layer, lily_err *err) {
    char where[24] = "";
    if (m->bits == 4 || m->bits == 8) return LILY_OK;
    if (layer >= 0) snprintf(where, sizeof where, "layer %d ", layer);
    return ERR(err, LILY_EMODEL,
               "%s%s: found %d-bit weights, expected 4 or 8; let the loader quantise the "
               "checkpoint (lily pack), or use the reference backend",
               where, name, m->bits);
}

static int check_alike(const struct mat *m, int32_t n, const char *name, int32_t layer,
                       lily_err *err) {
    int rc = LILY_OK;
    for (int32_t e = 0; e < n && rc == LILY_OK; e++) {
        rc = check_mat(&m[e], name, layer, err);
        if (rc == LILY_OK && m[e].bits != m[0].bits) {
            rc = ERR(err, LILY_EMODEL,
                     "layer %d %s: found experts of %d and %d bits, expected one width; quantise "
                     "them alike",
                     layer, name, m[0].bits, m[e].bits);
        }
    }
    return rc;
}

static int check_layer(const struct weights *w, int32_t l, lily_err *err) {
    const struct moe_weights *e = &w->layer[l].moe;
    const struct attention_weights *a = &w->layer[l].attention;
    const struct deltanet_weights *d = &w->layer[l].deltanet;
    struct {
        const struct mat *mat;
        const char *name;
    } all[] = {{&e->router, "router"},
               {&e->shared_gate, "shared expert gate"},
               {&e->shared_gate_proj, "shared gate_proj"},
               {&e->shared_up_proj, "shared up_proj"},
               {&e->shared_down_proj, "shared down_proj"},
               {&a->q_proj, "q_proj"},
               {&a->k_proj, "k_proj"},
               {&a->v_proj, "v_proj"},
               {&a->o_proj, "o_proj"},
               {&d->in_proj_qkv, "in_proj_qkv"},
               {&d->in_proj_z, "in_proj_z"},
               {&d->in_proj_b, "in_proj_b"},
               {&d->in_proj_a, "in_proj_a"},
               {&d->out_proj, "out_proj"}};
    size_t first_mixer = 5, first_gdn = 9, end = sizeof all / sizeof *all;
    bool full = shape_is_attention(w->shape, l);
    int rc = LILY_OK;
    for (size_t i = 0; i < end && rc == LILY_OK; i++) {
        bool absent = full ? i >= first_gdn : i >= first_mixer && i < first_gdn;
        if (!absent) rc = check_mat(all[i].mat, all[i].name, l, err);
    }
    int32_t n = w->shape->experts;
    if (rc == LILY_OK) rc = check_alike(e->gate, n, "expert gate_proj", l, err);
    if (rc == LILY_OK) rc = check_alike(e->up, n, "expert up_proj", l, err);
    return rc == LILY_OK ? check_alike(e->down, n, "expert down_proj", l, err) : rc;
}

int cuda_check_weights(const struct weights *w, lily_err *err) {
    int rc = check_mat(&w->embed, "embedding", -1, err);
    if (rc == LILY_OK) rc = check_mat(&w->lm_head, "lm_head", -1, err);
    for (int32_t l = 0; l < w->layers && rc == LILY_OK; l++) rc = check_layer(w, l, err);
    return rc;
}

/* ---- the walk -------------------------------------------------------------------------------- */

/* Room for bytes at the next aligned place; the place as an address. */
static CUdeviceptr room_for(struct plan *p, size_t bytes) {
    size_t at = p->used;
    p->used += cuda_aligned(bytes);
    return p->base + at;
}

/* Notes that bytes belong at an address of the arena; addresses rise from call to call. NULL in the
 * first walk or without memory. */
static struct piece *new_piece(struct plan *p, CUdeviceptr to, size_t bytes) {
    if (!p->base || p->failed) return NULL;
    if (p->n == p->room) {
        size_t room = p->room ? 2 * p->room : 1024;
        struct piece *grown = realloc(p->pieces, room * sizeof *grown);
        if (!grown) {
            p->failed = true;
            return NULL;
        }
        p->pieces = grown;
        p->room = room;
    }
    struct piece *piece = &p->pieces[p->n++];
    *piece = (struct piece){.at = (size_t)(to - p->base), .bytes = bytes};
    return piece;
}

static void copy_to(struct plan *p, CUdeviceptr to, const void *from, size_t bytes) {
    struct piece *piece = new_piece(p, to, bytes);
    if (piece) piece->from = from;
}

/* Memory for values made here, freed after the upload; NULL in the first walk or without memory. */
static void *made(struct plan *p, size_t bytes) {
    if (!p->base || p->failed) return NULL;
    void **grown = realloc(p->owned, (p->n_owned + 1) * sizeof *grown);
    void *values = malloc(bytes);
    if (grown) p->owned = grown;
    if (!grown || !values) {
        free(values);
        p->failed = true;
        return NULL;
    }
    p->owned[p->n_owned++] = values;
    return values;
}

/* 4-bit codes as bytes: the same values with the same scales and biases. */
static const uint8_t *widened(struct plan *p, const struct mat *m) {
    size_t bytes = (size_t)m->rows * mat_row_bytes(m);
    uint8_t *wide = made(p, 2 * bytes);
    for (size_t i = 0; wide && i < bytes; i++) {
        wide[2 * i] = m->data[i] & 15;
        wide[2 * i + 1] = m->data[i] >> 4;
    }
    return wide;
}

/* Matrices of the same input as they are, one below the other. */
static struct cuda_mat place_planar(struct plan *p, const struct mat *const *mats, size_t n) {
    int32_t rows = 0, bits = 4;
    for (size_t i = 0; i < n; i++) {
        rows += mats[i]->rows;
        if (mats[i]->bits > bits) bits = mats[i]->bits;
    }
    struct cuda_mat out = cuda_planar_mat(rows, mats[0]->cols, bits);
    size_t row = (size_t)out.cols * (size_t)out.bits / 8, groups = (size_t)out.cols / 64;
    out.codes = room_for(p, (size_t)out.rows * row);
    out.scales = room_for(p, (size_t)out.rows * groups * 2);
    out.biases = room_for(p, (size_t)out.rows * groups * 2);
    size_t at = 0;
    for (size_t i = 0; i < n && p->base; i++) {
        bool narrow = mats[i]->bits < out.bits;
        const uint8_t *codes = narrow ? widened(p, mats[i]) : mats[i]->data;
        copy_to(p, out.codes + at * row, codes, (size_t)mats[i]->rows * row);
        at += (size_t)mats[i]->rows;
    }
    for (size_t part = 0; part < 2; part++) {
        CUdeviceptr to = part ? out.biases : out.scales;
        for (size_t i = 0; i < n; i++) {
            size_t bytes = (size_t)mats[i]->rows * groups * 2;
            copy_to(p, to, part ? mats[i]->biases : mats[i]->scales, bytes);
            to += bytes;
        }
    }
    return out;
}

/* Whether n matrices below each other can lie as tiles: the card's kernels stream them, and codes
 * have 4 bits (tiles of bytes: any). */
static bool as_tiles(const struct plan *p, enum cuda_layout layout, const struct mat *const *mats,
                     int32_t n, struct cuda_tiles *out) {
    *out = (struct cuda_tiles){.layout = layout, .n = n, .cols = mats[0]->cols};
    bool fit = p->m->capability == TILED_CAPABILITY && out->cols % 128 == 0;
    if (layout == CUDA_DOWN) fit = p->m->capability == TILED_CAPABILITY && mats[0]->rows % 128 == 0;
    for (int32_t i = 0; i < n; i++) {
        out->from[i] = mats[i];
        out->rows += mats[i]->rows;
        fit = fit && (mats[i]->bits == 4 || layout == CUDA_BYTE);
    }
    return fit;
}

static CUdeviceptr place_tiles(struct plan *p, const struct cuda_tiles *t) {
    size_t bytes = cuda_tiles_bytes(t);
    CUdeviceptr to = room_for(p, bytes);
    struct piece *piece = new_piece(p, to, bytes);
    if (piece) piece->tiles = *t;
    return to;
}

/* One below the other, as tiles where that is possible. */
static struct cuda_mat place_tall(struct plan *p, enum cuda_layout layout, bool slices,
                                  const struct mat *const *mats, int32_t n) {
    struct cuda_tiles t;
    if (!as_tiles(p, layout, mats, n, &t)) return place_planar(p, mats, (size_t)n);
    t.slices = slices || layout == CUDA_DOWN;
    return cuda_tiles_mat(&t, place_tiles(p, &t));
}

/* [n] matrices in an array, as one tall one. */
static struct cuda_mat place_array(struct plan *p, const struct mat *m, int32_t n) {
    const struct mat *all[512] = {NULL};
    if (n > 512) n = 512; /* cuda_open refuses such a shape */
    for (int32_t i = 0; i < n; i++) all[i] = &m[i];
    return place_planar(p, all, (size_t)n);
}

/* Experts follow each other without a gap. */
_Static_assert(TILE_WIDE_BYTES % CUDA_ALIGN == 0 && TILE_DOWN_BYTES % CUDA_ALIGN == 0,
               "whole alignments");

/* What n experts read first: gate and up, in tiles row by row in turns. */
static void place_first_half(struct plan *p, const struct mat *gate, const struct mat *up,
                             int32_t n, struct cuda_mat *out_gate, struct cuda_mat *out_up) {
    struct cuda_tiles t;
    bool tiled = as_tiles(p, CUDA_WIDE, (const struct mat *[]){gate, up}, 2, &t);
    if (!tiled) {
        *out_gate = place_array(p, gate, n);
        *out_up = place_array(p, up, n);
        return;
    }
    CUdeviceptr first = 0;
    for (int32_t e = 0; e < n; e++) {
        as_tiles(p, CUDA_WIDE, (const struct mat *[]){&gate[e], &up[e]}, 2, &t);
        t.in_turns = true;
        CUdeviceptr at = place_tiles(p, &t);
        if (e == 0) first = at;
    }
    *out_gate = cuda_tiles_mat(&t, first);
    out_gate->rows = n * gate->rows;
    *out_up = *out_gate;
    out_up->codes += (size_t)tile_wide_codes(1, 0);
    out_up->scales += (size_t)(tile_wide_scale(1, 0) - tile_wide_scale(0, 0));
    out_up->biases += (size_t)(tile_wide_scale(1, 0) - tile_wide_scale(0, 0));
}

static struct cuda_mat place_second_half(struct plan *p, const struct mat *down, int32_t n) {
    struct cuda_tiles t;
    if (!as_tiles(p, CUDA_DOWN, &down, 1, &t)) return place_array(p, down, n);
    CUdeviceptr first = 0;
    for (int32_t e = 0; e < n; e++) {
        t.from[0] = &down[e];
        t.slices = true;
        CUdeviceptr at = place_tiles(p, &t);
        if (e == 0) first = at;
    }
    struct cuda_mat out = cuda_tiles_mat(&t, first);
    out.rows *= n;
    return out;
}

/* qkvz, and below it, in the same tiles where there are any, ba. */
static void place_projections(struct plan *p, const struct deltanet_weights *d,
                              struct cuda_layer *out) {
    const struct mat *all[4] = {&d->in_proj_qkv, &d->in_proj_z, &d->in_proj_b, &d->in_proj_a};
    struct cuda_tiles t;
    int32_t upper = all[0]->rows + all[1]->rows;
    if (!as_tiles(p, CUDA_WIDE, all, 4, &t) || upper % TILE_WIDE_ROWS) {
        out->qkvz = place_tall(p, CUDA_WIDE, false, all, 2);
        out->ba = place_planar(p, all + 2, 2);
        return;
    }
    out->qkvz = out->ba = cuda_tiles_mat(&t, place_tiles(p, &t));
    size_t below = (size_t)(upper / TILE_WIDE_ROWS) * (size_t)out->ba.row_tiles;
    out->qkvz.rows = upper;
    out->ba.rows -= upper;
    out->ba.codes += below;
    out->ba.scales += below;
    out->ba.biases += below;
}

static CUdeviceptr place_floats(struct plan *p, const float *from, int32_t n) {
    size_t bytes = (size_t)n * sizeof(float);
    CUdeviceptr to = room_for(p, bytes);
    copy_to(p, to, from, bytes);
    return to;
}

static CUdeviceptr place_decay_rates(struct plan *p, const float *a_log, int32_t n) {
    float *rate = made(p, (size_t)n * sizeof *rate);
    for (int32_t i = 0; rate && i < n; i++) rate[i] = expf(a_log[i]);
    return place_floats(p, rate, n);
}

static struct cuda_layer place_layer(struct plan *p, int32_t l) {
    const struct weights *w = p->m->w;
    const struct shape *s = w->shape;
    const struct layer_weights *from = &w->layer[l];
    const struct attention_weights *a = &from->attention;
    const struct deltanet_weights *d = &from->deltanet;
    const struct moe_weights *e = &from->moe;
    struct cuda_layer out = {0};
    out.input_norm = place_floats(p, from->input_norm, s->hidden);
    out.post_norm = place_floats(p, from->post_norm, s->hidden);
    if (shape_is_attention(s, l)) {
        const struct mat *qkv[3] = {&a->q_proj, &a->k_proj, &a->v_proj}, *o = &a->o_proj;
        out.qkv = place_tall(p, CUDA_WIDE, false, qkv, 3);
        out.o = place_tall(p, CUDA_WIDE, true, &o, 1);
        out.q_norm = place_floats(p, a->q_norm, s->head_dim);
        out.k_norm = place_floats(p, a->k_norm, s->head_dim);
    } else {
        const struct mat *own = &d->out_proj;
        place_projections(p, d, &out);
        out.out = place_tall(p, CUDA_WIDE, true, &own, 1);
        out.conv = place_floats(p, d->conv, s->conv_taps * s->conv_dim);
        out.decay_rate = place_decay_rates(p, d->a_log, s->gdn_v_heads);
        out.dt_bias = place_floats(p, d->dt_bias, s->gdn_v_heads);
        out.gdn_norm = place_floats(p, d->norm, s->gdn_head_dim);
    }
    out.router =
        place_tall(p, CUDA_BYTE, false, (const struct mat *[]){&e->router, &e->shared_gate}, 2);
    place_first_half(p, e->gate, e->up, s->experts, &out.gate, &out.up);
    out.down = place_second_half(p, e->down, s->experts);
    place_first_half(p, &e->shared_gate_proj, &e->shared_up_proj, 1, &out.shared_gate,
                     &out.shared_up);
    out.shared_down = place_second_half(p, &e->shared_down_proj, 1);
    return out;
}

/* inv_freq[i] = theta^(-2i / rotary_dim): a rounded power, then a rounded reciprocal, as in ref. */
static CUdeviceptr place_frequencies(struct plan *p, const struct shape *s) {
    int32_t n = s->rotary_dim / 2;
    float *f = made(p, (size_t)n * sizeof *f);
    for (int32_t i = 0; f && i < n; i++) {
        f[i] = 1.0f / (float)pow(s->rope_theta, 2.0 * i / s->rotary_dim);
    }
    return place_floats(p, f, n);
}

/* Everything, in order; dw->layer has room for all layers. */
static void walk(struct plan *p, struct cuda_weights *dw) {
    const struct weights *w = p->m->w;
    const struct mat *embed = &w->embed, *head = &w->lm_head;
    dw->embed = place_planar(p, &embed, 1);
    dw->lm_head = place_tall(p, CUDA_WIDE, false, &head, 1);
    dw->final_norm = place_floats(p, w->final_norm, w->shape->hidden);
    dw->inv_freq = place_frequencies(p, w->shape);
    for (int32_t l = 0; l < w->layers; l++) dw->layer[l] = place_layer(p, l);
}

int cuda_weights_plan(struct backend_model *m, lily_err *err) {
    struct plan p = {.m = m};
    m->dw.layer = calloc((size_t)m->w->layers, sizeof *m->dw.layer);
    if (!m->dw.layer) return ERR_NOMEM(err, "CUDA weights");
    walk(&p, &m->dw);
    m->dw.bytes = p.used;
    return LILY_OK;
}

/* ---- the copy -------------------------------------------------------------------------------- */

struct upload {
    struct backend_model *m;
    const struct plan *plan;
    size_t chunks;
    atomic_size_t next; /* chunk to take */
    atomic_size_t done; /* chunks sent */
    atomic_int running;
    atomic_bool stop;
    pthread_mutex_t lock; /* of rc and err */
    int rc;
    lily_err err;
};

struct sender {
    CUstream stream;
    char *buffer[BUFFERS];
    CUevent sent[BUFFERS];
};

static int sender_open(const struct backend_model *m, struct sender *s, lily_err *err) {
    const struct cuda_driver *d = m->d;
    int rc = cuda_check(d, d->stream_new(&s->stream, CU_STREAM_NON_BLOCKING), "upload stream", err);
    for (int i = 0; i < BUFFERS && rc == LILY_OK; i++) {
        void *memory = NULL;
        rc = cuda_pinned(m, CHUNK_BYTES, &memory, err);
        s->buffer[i] = memory;
        if (rc != LILY_OK) break;
        rc = cuda_check(d, d->event_new(&s->sent[i], CU_EVENT_DISABLE_TIMING), "event", err);
    }
    return rc;
}

static void sender_close(const struct cuda_driver *d, struct sender *s) {
    if (s->stream) d->stream_wait(s->stream);
    for (int i = 0; i < BUFFERS; i++) {
        if (s->sent[i]) d->event_free(s->sent[i]);
        if (s->buffer[i]) d->host_free(s->buffer[i]);
    }
    if (s->stream) d->stream_free(s->stream);
}

/* First piece that ends behind an offset of the arena. */
static size_t piece_at(const struct plan *p, size_t offset) {
    size_t low = 0, high = p->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (p->pieces[mid].at + p->pieces[mid].bytes > offset)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

/* The arena's bytes [begin, end); gaps of alignment keep what the buffer held. */
static void gather(const struct plan *p, size_t begin, size_t end, char *out) {
    for (size_t i = piece_at(p, begin); i < p->n && p->pieces[i].at < end; i++) {
        const struct piece *x = &p->pieces[i];
        size_t from = x->at > begin ? x->at : begin;
        size_t to = x->at + x->bytes < end ? x->at + x->bytes : end;
        char *at = out + (from - begin);
        if (x->from)
            memcpy(at, (const char *)x->from + (from - x->at), to - from);
        else
            cuda_tiles_fill(&x->tiles, from - x->at, to - x->at, at);
    }
}

static int send_chunk(struct upload *u, struct sender *s, int slot, size_t chunk, lily_err *err) {
    const struct cuda_driver *d = u->m->d;
    int rc = cuda_check(d, d->event_wait(s->sent[slot]), "upload", err);
    if (rc != LILY_OK) return rc;
    size_t begin = chunk * CHUNK_BYTES, end = begin + CHUNK_BYTES;
    if (end > u->plan->used) end = u->plan->used;
    gather(u->plan, begin, end, s->buffer[slot]);
    rc = cuda_check(d, d->to_device(u->plan->base + begin, s->buffer[slot], end - begin, s->stream),
                    "upload", err);
    if (rc != LILY_OK) return rc;
    return cuda_check(d, d->event_record(s->sent[slot], s->stream), "upload", err);
}

static void *send_chunks(void *arg) {
    struct upload *u = arg;
    const struct cuda_driver *d = u->m->d;
    struct sender s = {0};
    lily_err err;
    int rc = cuda_enter(u->m, &err);
    if (rc == LILY_OK) rc = sender_open(u->m, &s, &err);
    for (int slot = 0; rc == LILY_OK && !atomic_load(&u->stop); slot = (slot + 1) % BUFFERS) {
        size_t chunk = atomic_fetch_add(&u->next, 1);
        if (chunk >= u->chunks) break;
        rc = send_chunk(u, &s, slot, chunk, &err);
        atomic_fetch_add(&u->done, 1);
    }
    if (rc == LILY_OK) rc = cuda_check(d, d->stream_wait(s.stream), "upload", &err);
    sender_close(d, &s);
    if (rc != LILY_OK) {
        pthread_mutex_lock(&u->lock);
        if (u->rc == LILY_OK) {
            u->rc = rc;
            u->err = err;
        }
        pthread_mutex_unlock(&u->lock);
        atomic_store(&u->stop, true);
    }
    atomic_fetch_sub(&u->running, 1);
    return NULL;
}

/* Tells how far the upload is until no thread runs. */
static void watch(struct upload *u) {
    const struct backend_options *o = &u->m->options;
    while (atomic_load(&u->running) > 0) {
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        uint64_t done = (uint64_t)atomic_load(&u->done) * CHUNK_BYTES;
        if (done > u->plan->used) done = u->plan->used;
        if (o->progress && o->progress(o->progress_arg, done, u->plan->used)) {
            pthread_mutex_lock(&u->lock);
            if (u->rc == LILY_OK) u->rc = ERR(&u->err, LILY_ECANCELED, "upload: cancelled");
            pthread_mutex_unlock(&u->lock);
            atomic_store(&u->stop, true);
            break;
        }
    }
}

static int send_all(struct backend_model *m, const struct plan *p, lily_err *err) {
    struct upload u = {.m = m, .plan = p, .chunks = (p->used + CHUNK_BYTES - 1) / CHUNK_BYTES};
    pthread_t threads[MAX_THREADS];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    size_t want = cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (size_t)cores, n = 0;
    if (want > u.chunks) want = u.chunks;
    pthread_mutex_init(&u.lock, NULL);
    for (; n < want; n++) {
        atomic_fetch_add(&u.running, 1);
        if (pthread_create(&threads[n], NULL, send_chunks, &u)) {
            atomic_fetch_sub(&u.running, 1);
            break;
        }
    }
    if (n == 0) { /* no thread to be had: this one does it */
        atomic_fetch_add(&u.running, 1);
        send_chunks(&u);
    }
    watch(&u);
    for (size_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&u.lock);
    const struct backend_options *o = &m->options;
    if (u.rc == LILY_OK && o->progress && o->progress(o->progress_arg, p->used, p->used)) {
        u.rc = ERR(&u.err, LILY_ECANCELED, "upload: cancelled");
    }
    if (u.rc != LILY_OK && err) *err = u.err;
    return u.rc;
}

int cuda_upload(struct backend_model *m, lily_err *err) {
    struct cuda_weights *dw = &m->dw;
    int rc = cuda_memory(m, dw->bytes, "weights", &dw->arena, err);
    if (rc != LILY_OK) return rc;
    struct plan p = {.m = m, .base = dw->arena};
    walk(&p, dw);
    rc = p.failed ? ERR_NOMEM(err, "CUDA upload") : send_all(m, &p, err);
    for (size_t i = 0; i < p.n_owned; i++) free(p.owned[i]);
    free(p.owned);
    free(p.pieces);
    return rc;
}

void cuda_weights_free(struct backend_model *m) {
    if (m->dw.arena) m->d->memory_free(m->dw.arena);
    free(m->dw.layer);
}

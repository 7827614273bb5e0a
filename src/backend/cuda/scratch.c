/* Where the arrays of a step lie in the one allocation that all steps share. A prompt chunk's are
 * large and few of them are alive at once: each says in which stages it is, and takes the lowest
 * place that no array alive with it has (docs/cuda.md, "Scratch"). The order below is the one that
 * leaves the fewest gaps. A decode step's are small and have places of their own. */
#include <assert.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/prefill_kernels.h"

/* Stages of a chunk's layer. What an earlier stage leaves for a later one is alive between them. */
enum {
    GDN_PROJECT = 1 << 0, /* all projections of the normed rows */
    GDN_CONVOLVE = 1 << 1,
    GDN_PIECES = 1 << 2, /* what pieces of the delta rule need of themselves */
    GDN_STATES = 1 << 3, /* the state from piece to piece, or row by row */
    GDN_NORM = 1 << 4,
    GDN_OUT = 1 << 5,
    ATTN_PROJECT = 1 << 6,
    ATTN_ROWS = 1 << 7,
    ATTN_MIX = 1 << 8,
    ATTN_OUT = 1 << 9,
    NORM = 1 << 10, /* behind the mixer */
    ROUTE = 1 << 11,
    UP = 1 << 12, /* first halves of the experts, then second ones */
    DOWN = 1 << 13,
    COMBINE = 1 << 14, /* with the next layer's norm */
    HEAD = 1 << 15,
    ALWAYS = (1 << 16) - 1,
    PROJECT = GDN_PROJECT | ATTN_PROJECT,
    RECURRENT = GDN_CONVOLVE | GDN_PIECES | GDN_STATES,
    EXPERTS = ROUTE | UP | DOWN | COMBINE
};

enum { MOST_ARRAYS = 40 };

struct layout {
    struct {
        CUdeviceptr *at;
        size_t begin, end;
        unsigned alive;
    } list[MOST_ARRAYS];
    int n;
    size_t bytes;
    bool apart; /* every array has a place of its own */
};

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* The lowest place where so many bytes meet nothing that is alive in one of these stages. */
static size_t lowest(const struct layout *l, size_t bytes, unsigned alive) {
    size_t at = 0;
    for (int i = 0; i < l->n;) {
        bool meets =
            l->list[i].alive & alive && at < l->list[i].end && l->list[i].begin < at + bytes;
        if (meets) at = l->list[i].end;
        i = meets ? 0 : i + 1;
    }
    return at;
}

static void place(struct layout *l, CUdeviceptr *at, size_t count, size_t size, unsigned alive) {
    size_t bytes = cuda_aligned(count * size);
    assert(l->n < MOST_ARRAYS);
    if (l->apart) alive = ALWAYS;
    size_t begin = lowest(l, bytes, alive);
    l->list[l->n].at = at;
    l->list[l->n].begin = begin;
    l->list[l->n].end = begin + bytes;
    l->list[l->n++].alive = alive;
    l->bytes = larger(l->bytes, begin + bytes);
}

static size_t finish(const struct layout *l, CUdeviceptr base) {
    for (int i = 0; i < l->n; i++) *l->list[i].at = base + l->list[i].begin;
    return l->bytes;
}

/* Whatever the step: they come first and so lie in one place. */
static void place_common(const struct backend_model *m, struct layout *l, struct cuda_scratch *x) {
    size_t vocab = (size_t)model_shape(m)->vocab, slots = (size_t)m->options.max_sessions;
    place(l, &x->finite, slots + 1, sizeof(int32_t), ALWAYS);
    place(l, &x->sampled, (vocab + 31) / 32, sizeof(uint32_t), ALWAYS);
    place(l, &x->ids, (size_t)m->rows, sizeof(int32_t), ALWAYS);
}

/* Rows of a step of several slots: kernels that take eight or more at once find memory there. */
static size_t decode_rows(const struct backend_model *m) {
    size_t slots = (size_t)m->options.max_sessions;
    return (slots + CUDA_FEW_ROWS - 1) / CUDA_FEW_ROWS * CUDA_FEW_ROWS;
}

static size_t place_decode(const struct backend_model *m, CUdeviceptr base,
                           struct cuda_scratch *x) {
    const struct shape *s = model_shape(m);
    const size_t f = sizeof(float), bf = sizeof(uint16_t), n = sizeof(int32_t);
    size_t rows = decode_rows(m), h = (size_t)s->hidden, pairs = rows * (size_t)s->top_k;
    size_t slots = (size_t)m->options.max_sessions, q_dim = (size_t)s->q_dim;
    size_t v_dim = (size_t)s->gdn_v_dim, experts = (size_t)s->experts;
    size_t gates = 2 * (size_t)s->gdn_v_heads, width = (size_t)m->proj_width;
    size_t inner = larger((size_t)s->expert_width, (size_t)s->shared_width);
    struct layout l = {.apart = true};
    place_common(m, &l, x);
    place(&l, &x->x, rows * h, f, ALWAYS);
    place(&l, &x->normed, rows * h, f, ALWAYS);
    place(&l, &x->normed_bf, rows * h, bf, ALWAYS);
    place(&l, &x->wide, rows * larger(width, (size_t)s->top_k * h), f, ALWAYS);
    place(&l, &x->channels, rows * (size_t)s->conv_dim, f, ALWAYS);
    place(&l, &x->queries, rows * larger(q_dim, (size_t)s->conv_dim), f, ALWAYS);
    place(&l, &x->norms, rows * 2 * (size_t)s->gdn_k_heads, f, ALWAYS);
    place(&l, &x->gates, rows * gates, f, ALWAYS);
    place(&l, &x->delta, rows * larger(v_dim, h), f, ALWAYS);
    place(&l, &x->mix, rows * larger(larger(q_dim, v_dim), h), f, ALWAYS);
    place(&l, &x->mix_bf, rows * larger(q_dim, v_dim), bf, ALWAYS);
    place(&l, &x->out, rows * h, f, ALWAYS);
    place(&l, &x->scores, rows * larger(experts + 1, gates), f, ALWAYS);
    place(&l, &x->routing, rows * 2 * (size_t)s->top_k, f, ALWAYS);
    place(&l, &x->hidden, rows * (size_t)(s->top_k + 1) * inner, f, ALWAYS);
    place(&l, &x->experts, experts + 2 + experts + pairs / 8 + 1, n, ALWAYS);
    place(&l, &x->pairs, pairs, n, ALWAYS);
    place(&l, &x->places, pairs, n, ALWAYS);
    place(&l, &x->partial, slots * (size_t)s->q_heads * CUDA_PARTS * (size_t)(s->head_dim + 2), f,
          ALWAYS);
    place(&l, &x->logits, slots * (size_t)s->vocab, f, ALWAYS);
    place(&l, &x->sampling, slots * 64 * BACKEND_TOP_K, 2 * n, ALWAYS);
    size_t bytes = finish(&l, base);
    x->given = x->wide;
    return bytes;
}

/* What only the kernels of one of the two sets need, or need in another type. */
static void place_mixers(const struct backend_model *m, bool fast, struct layout *l,
                         struct cuda_scratch *x) {
    const struct shape *s = model_shape(m);
    const size_t f = sizeof(float), bf = sizeof(uint16_t), of = fast ? bf : f;
    size_t rows = (size_t)m->rows, q_dim = (size_t)s->q_dim, v_dim = (size_t)s->gdn_v_dim;
    size_t h = (size_t)s->hidden;
    bool traced = m->options.trace != NULL;
    place(l, &x->channels, rows * (size_t)s->conv_dim, of, RECURRENT);
    if (fast) {
        /* A chunk may begin between two points of the grid. */
        int32_t pieces = (m->rows + BACKEND_GRID - 1) / BACKEND_GRID + 1;
        size_t bytes = prefill_delta_bytes(pieces, s->gdn_v_heads, x->pieces_at);
        place(l, &x->pieces, bytes, 1, GDN_PIECES | GDN_STATES);
    }
    place(l, &x->delta, rows * (traced ? larger(v_dim, h) : v_dim), of, GDN_STATES | GDN_NORM);
    place(l, &x->queries, rows * q_dim, of, ATTN_ROWS | ATTN_MIX);
    if (fast) {
        place(l, &x->parts, rows * q_dim, f, ATTN_MIX);
        place(l, &x->parts_sums, rows * 2 * (size_t)s->q_heads, f, ATTN_MIX);
    } else {
        place(l, &x->norms, rows * 2 * (size_t)s->gdn_k_heads, f, RECURRENT);
        place(l, &x->gates, rows * 2 * (size_t)s->gdn_v_heads, f, RECURRENT);
    }
    if (traced) place(l, &x->mix, rows * larger(larger(q_dim, v_dim), h), f, ALWAYS);
}

static void place_routing(const struct backend_model *m, bool fast, struct layout *l,
                          struct cuda_scratch *x) {
    const struct shape *s = model_shape(m);
    const size_t f = sizeof(float), n = sizeof(int32_t);
    size_t rows = (size_t)m->rows, experts = (size_t)s->experts, pairs = rows * (size_t)s->top_k;
    size_t gates = 2 * (size_t)s->gdn_v_heads, parts = fast ? PREFILL_DECISIVE_PARTS : 1;
    if (fast) {
        place(l, &x->sums, rows * (size_t)s->hidden / 64, f, PROJECT | NORM | ROUTE | COMBINE);
        place(l, &x->counts, experts, n, NORM | ROUTE);
    }
    place(l, &x->scores, rows * parts * larger(experts + 1, gates), f,
          GDN_PROJECT | GDN_CONVOLVE | GDN_PIECES | EXPERTS);
    place(l, &x->routing, rows * 2 * (size_t)s->top_k, f, EXPERTS);
    place(l, &x->places, pairs, n, EXPERTS);
    place(l, &x->pairs, pairs, n, ROUTE | UP | DOWN);
    place(l, &x->experts, experts + 2 + experts + pairs / 8 + 1, n, ROUTE | UP | DOWN);
}

static size_t place_chunk(const struct backend_model *m, bool fast, CUdeviceptr base,
                          struct cuda_scratch *x) {
    const struct shape *s = model_shape(m);
    const size_t f = sizeof(float), bf = sizeof(uint16_t), of = fast ? bf : f;
    size_t rows = (size_t)m->rows, h = (size_t)s->hidden, top_k = (size_t)s->top_k;
    size_t inner = top_k * (size_t)s->expert_width + (size_t)s->shared_width;
    size_t mix = larger((size_t)s->q_dim, (size_t)s->gdn_v_dim);
    unsigned gdn = GDN_PROJECT | RECURRENT | GDN_NORM; /* the gate z is among the projections */
    unsigned attention = ATTN_PROJECT | ATTN_ROWS | ATTN_MIX, normed = PROJECT | NORM | ROUTE;
    struct layout l = {.apart = m->options.trace != NULL};
    *x = (struct cuda_scratch){0};
    place_common(m, &l, x);
    place(&l, &x->x, rows * h, f, ALWAYS);
    place(&l, &x->wide, rows * (size_t)m->proj_width, of, gdn | attention);
    place(&l, &x->given, rows * top_k * h, of, DOWN | COMBINE);
    place(&l, &x->mix_bf, rows * mix, bf, GDN_NORM | GDN_OUT | ATTN_MIX | ATTN_OUT);
    place_mixers(m, fast, &l, x);
    place(&l, &x->out, rows * h, of, GDN_OUT | ATTN_OUT | NORM | DOWN | COMBINE);
    place(&l, &x->normed_bf, rows * h, bf, normed | UP | COMBINE | HEAD | (fast ? 0 : DOWN));
    place(&l, &x->normed, rows * h, f, normed | COMBINE | HEAD);
    place(&l, &x->hidden, rows * inner, bf, UP | DOWN);
    place_routing(m, fast, &l, x);
    place(&l, &x->logits, CUDA_HEAD_ROWS * (size_t)s->vocab, f, HEAD);
    return finish(&l, base);
}

size_t cuda_place_scratch(const struct backend_model *m, bool fast, CUdeviceptr base,
                          struct cuda_scratch *step, struct cuda_scratch *chunk) {
    size_t bytes = place_decode(m, base, step);
    return larger(bytes, place_chunk(m, fast, base, chunk));
}

size_t cuda_scratch_bytes(const struct backend_model *m) {
    struct cuda_scratch step, chunk;
    return cuda_place_scratch(m, cuda_prompt_suits(m), 0, &step, &chunk);
}

#include "backend/metal/pace.h"

#include <math.h>

#include "backend/backend.h"

/* The first chunks, of which nothing is known, are those of a slow machine that can hold the model
 * at all: by Apple's data sheets 100 GB/s and 3.6 Tflop/s, of which a good half is assumed to be
 * reached. Attention multiplies in float32 and spends time on the softmax: twice the time of an
 * operation. None of this has been measured on a Mac; chunks that were replace it. */
static const double FIRST_UNIT = 0.5e-12, OPERATIONS_A_BYTE = 20, FIRST_ATTENTION = 2;

enum { FIRST_ROWS = 512, LEAST_ROWS = 8 };

/* The next lower number of rows that a chunk may have: chunks end on the grid of checkpoints, and
 * shorter ones do not step over it. */
static int32_t whole(int32_t rows) {
    int32_t part = BACKEND_GRID;
    if (rows >= BACKEND_GRID) return rows / BACKEND_GRID * BACKEND_GRID;
    while (part > LEAST_ROWS && part > rows) part /= 2;
    return part;
}

static double weights_of(const struct metal_mat *m) {
    return (double)m->rows * (double)m->cols;
}

static double bytes_of(const struct metal_mat *m) {
    return (double)(mat_code_bytes(m) + 2 * mat_scale_bytes(m));
}

/* Matrices that every row is multiplied by, those of one kind of layer left empty in the other. */
static void add_dense(struct metal_pace *p, const struct metal_layer_tensors *w) {
    const struct metal_mat *const dense[] = {
        &w->attention.q,      &w->attention.k, &w->attention.v,      &w->attention.o,
        &w->deltanet.qkv,     &w->deltanet.z,  &w->deltanet.b,       &w->deltanet.a,
        &w->deltanet.out,     &w->router,      &w->shared_gate_proj, &w->shared_up_proj,
        &w->shared_down_proj, &w->shared_gate};
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++) {
        p->row_work += 2 * weights_of(dense[i]);
        p->dense_work += OPERATIONS_A_BYTE * bytes_of(dense[i]);
    }
}

static void add_experts(struct metal_pace *p, const struct metal_layer_tensors *w,
                        const struct shape *s) {
    const struct metal_mat *const experts[] = {&w->gate, &w->up, &w->down};
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        p->row_work += 2 * weights_of(experts[i]) * s->top_k;
        p->expert_work += OPERATIONS_A_BYTE * bytes_of(experts[i]) * s->experts;
    }
}

void metal_pace_new(struct metal_pace *p, const struct metal_layout *l, double target) {
    const struct shape *s = l->shape;
    *p = (struct metal_pace){.unit = FIRST_UNIT,
                             .attention = FIRST_ATTENTION,
                             .target = target,
                             .most = l->rows,
                             .limit = l->rows < FIRST_ROWS ? l->rows : FIRST_ROWS};
    for (int32_t i = 0; i < l->layers; i++) {
        add_dense(p, &l->tensors.layer[i]);
        add_experts(p, &l->tensors.layer[i], s);
    }
    p->expert_share = (double)s->top_k / s->experts;
    p->pair_work = 4.0 * s->q_dim * l->attention_layers; /* q k^T and its product with v */
}

/* Of products and weights; experts as if each row chose at random. */
static double rows_work(const struct metal_pace *p, int32_t n) {
    double chosen = 1 - pow(1 - p->expert_share, n);
    return p->row_work * n + p->dense_work + p->expert_work * chosen;
}

static double attention_work(const struct metal_pace *p, int32_t n, int32_t position) {
    return p->pair_work * n * (position + 0.5 * (n + 1));
}

double metal_pace_foretell(const struct metal_pace *p, int32_t n, int32_t position) {
    return p->unit * (rows_work(p, n) + p->attention * attention_work(p, n, position));
}

int32_t metal_pace_rows(const struct metal_pace *p, int32_t position) {
    int32_t rows = p->limit;
    while (rows > LEAST_ROWS && metal_pace_foretell(p, rows, position) > p->target) {
        rows = whole(rows - 1);
    }
    return rows;
}

/* What was measured in the place of what was assumed, but at most halved at once: one lucky
 * measurement does not lead to a chunk of many times the length. */
static double toward(double old, double measured) {
    return measured > old / 2 ? measured : old / 2;
}

/* The number behind the larger part of the work follows. A chunk much shorter than might have been
 * is mostly the start of its kernels and teaches nothing, unless it took long. */
void metal_pace_took(struct metal_pace *p, int32_t n, int32_t position, double seconds) {
    double rows = rows_work(p, n), attention = attention_work(p, n, position);
    bool telling = 2 * n >= metal_pace_rows(p, position) || seconds > p->target / 2;
    int32_t twice = whole(2 * n < p->most ? 2 * n : p->most);
    if (seconds > 0 && telling) {
        if (rows >= p->attention * attention) {
            p->unit = toward(p->unit, seconds / (rows + p->attention * attention));
        } else {
            p->attention = toward(p->attention, (seconds / p->unit - rows) / attention);
        }
    }
    if (p->limit < twice) p->limit = twice;
}

void metal_pace_failed(struct metal_pace *p, int32_t n) {
    p->limit = whole(n / 2);
}

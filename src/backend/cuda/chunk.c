/* How many rows a prompt chunk may have: what was asked for by time, so that a cancelled request
 * does not wait long. A chunk's time is foretold from its operations and one number, the seconds of
 * an operation, which every chunk long enough to tell corrects. On an H200, by its times at a depth
 * of 65,536, the answer is all rows there is memory for up to a depth of about 250,000 tokens. */
#include "backend/cuda/cuda.h"

/* Seconds of a chunk; as long as a person waits without noticing. */
static const double TARGET = 0.4;

enum {
    FIRST_ROWS = 1024,  /* of a card of which nothing is known */
    TELLING_ROWS = 512, /* fewer are mostly the reading of weights */
    LEAST_ROWS = 128    /* two, so that one between two points of the grid can end on the second */
};

/* Operations of a row's products: two for each weight that it meets. */
static double row_work(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    double h = s->hidden, inner = (double)s->top_k * s->expert_width + s->shared_width;
    double attention = h * (2.0 * s->q_dim + 2.0 * s->kv_dim) + h * s->q_dim;
    double gdn = h * ((double)s->conv_dim + s->gdn_v_dim) + h * s->gdn_v_dim;
    double experts = 3 * h * inner + h * s->experts;
    return 2 * (m->attention_layers * attention + m->gdn_layers * gdn + m->w->layers * experts);
}

/* Of n rows from a position on, with attention's, which grow with the position. */
static double work(const struct backend_model *m, int32_t position, int32_t n) {
    double pair = 4.0 * model_shape(m)->q_dim * m->attention_layers;
    return n * (row_work(m) + pair * (position + 0.5 * n));
}

int32_t cuda_chunk_rows(const struct backend_model *m, int32_t position) {
    int32_t rows = m->rows;
    if (m->operation_seconds == 0) {
        return m->prompt || rows < FIRST_ROWS ? rows : FIRST_ROWS;
    }
    while (rows > LEAST_ROWS && m->operation_seconds * work(m, position, rows) > TARGET) {
        rows -= BACKEND_GRID;
    }
    return rows;
}

/* At most halved at once: one lucky measurement does not lead to a chunk of many times the length.
 */
void cuda_chunk_took(struct backend_model *m, int32_t position, int32_t n, double seconds) {
    double measured = seconds / work(m, position, n), old = m->operation_seconds;
    if (n < TELLING_ROWS && seconds < TARGET / 2) return;
    m->operation_seconds = measured > old / 2 ? measured : old / 2;
}

#include "backend/metal/record.h"

void record_begin_3d(struct graph *g, int32_t kernel, const struct shape *s, uint32_t x, uint32_t y,
                     uint32_t z) {
    const uint32_t groups[3] = {x, y, z}, threads[3] = {metal_kernel_threads(kernel, s), 1, 1};
    graph_begin(g, kernel, groups, threads);
}

void record_begin(struct graph *g, int32_t kernel, const struct shape *s, uint32_t x) {
    record_begin_3d(g, kernel, s, x, 1, 1);
}

void record_in(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes) {
    graph_bind(g, index, buffer, begin);
    graph_read(g, buffer, begin, bytes);
}

void record_out(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes) {
    graph_bind(g, index, buffer, begin);
    graph_write(g, buffer, begin, bytes);
}

void record_in_out(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes) {
    record_in(g, index, buffer, begin, bytes);
    graph_write(g, buffer, begin, bytes);
}

void record_vector(struct graph *g, int32_t index, const struct metal_vector *v) {
    record_in(g, index, METAL_SMALL, v->at, 4 * (uint64_t)v->n);
}

void record_mat(struct graph *g, int32_t index, const struct metal_mat *m) {
    record_in(g, index, m->buffer, m->codes, mat_code_bytes(m));
    record_in(g, index + 1, m->buffer, m->scales, mat_scale_bytes(m));
    record_in(g, index + 2, m->buffer, m->biases, mat_scale_bytes(m));
}

static void bind_mat(struct graph *g, int32_t index, const struct metal_mat *m) {
    graph_bind(g, index, m->buffer, m->codes);
    graph_bind(g, index + 1, m->buffer, m->scales);
    graph_bind(g, index + 2, m->buffer, m->biases);
}

void record_rows(struct graph *g, int32_t index, const struct metal_mat *m, uint64_t rows) {
    uint64_t all = (uint64_t)m->rows, codes = mat_code_bytes(m), scales = mat_scale_bytes(m);
    if (rows > all) rows = all;
    bind_mat(g, index, m);
    graph_read_some(g, m->buffer, m->codes, codes, codes / all * rows);
    graph_read_some(g, m->buffer, m->scales, scales, scales / all * rows);
    graph_read_some(g, m->buffer, m->biases, scales, scales / all * rows);
}

void record_experts(struct graph *g, int32_t index, const struct metal_mat *m, uint64_t items) {
    uint64_t ahead = (uint64_t)(m->items - 1) * m->stride;
    uint64_t codes = mat_code_bytes(m), scales = mat_scale_bytes(m);
    if (items > (uint64_t)m->items) items = (uint64_t)m->items;
    bind_mat(g, index, m);
    graph_read_some(g, m->buffer, m->codes, ahead + codes, codes * items);
    graph_read_some(g, m->buffer, m->scales, ahead + scales, scales * items);
    graph_read_some(g, m->buffer, m->biases, ahead + scales, scales * items);
}

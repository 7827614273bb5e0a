#include "backend/metal/prefill_graph.h"

struct chunk {
    struct graph *g;
    const struct metal_layout *l;
    const struct shape *s;
    struct metal_view v;
    uint64_t n; /* rows */
};

/* Bytes of n rows of so many bfloat16 or float32 values. */
static uint64_t half_rows(const struct chunk *c, int32_t width) {
    return 2 * c->n * (uint64_t)width;
}
static uint64_t rows(const struct chunk *c, int32_t width) {
    return 4 * c->n * (uint64_t)width;
}

static void begin(const struct chunk *c, int32_t kernel, struct prefill_grid grid) {
    record_begin_3d(c->g, kernel, c->s, grid.x, grid.y, grid.z);
}

/* ---- products -------------------------------------------------------------------------------- */

static void gemm(const struct chunk *c, int32_t x, const struct metal_mat *m, int32_t y,
                 enum prefill_gemm_mode mode) {
    const struct prefill_gemm_args args = {(uint32_t)c->n, (uint32_t)m->cols, (uint32_t)m->rows,
                                           mode};
    begin(c, METAL_PREFILL_GEMM, prefill_gemm_grid(args.rows, &args.out_rows, 1));
    record_in(c->g, PREFILL_GEMM_X, x, 0, half_rows(c, m->cols));
    record_mat(c->g, PREFILL_GEMM_CODES, m);
    if (mode == PREFILL_ADD_F32) {
        record_in_out(c->g, PREFILL_GEMM_Y, y, 0, rows(c, m->rows));
    } else {
        record_out(c->g, PREFILL_GEMM_Y, y, 0,
                   mode == PREFILL_STORE_BF16 ? half_rows(c, m->rows) : rows(c, m->rows));
    }
    graph_args(c->g, PREFILL_GEMM_ARGS, &args, sizeof args);
    graph_end(c->g);
}

/* Several matrices applied to x, each with a float32 output of its own. */
static void gemm_multi(const struct chunk *c, const struct metal_mat *const *mats,
                       const int32_t *outs, int32_t parts) {
    struct prefill_multi_args args = {
        .rows = (uint32_t)c->n, .cols = (uint32_t)mats[0]->cols, .parts = (uint32_t)parts};
    for (int32_t p = 0; p < parts; p++) {
        args.out_rows[p] = (uint32_t)mats[p]->rows;
        args.mode[p] = PREFILL_STORE_F32;
    }
    begin(c, METAL_PREFILL_GEMM_MULTI, prefill_gemm_grid(args.rows, args.out_rows, args.parts));
    record_in(c->g, PREFILL_MULTI_X, METAL_P_X, 0, half_rows(c, mats[0]->cols));
    for (int32_t p = 0; p < PREFILL_MULTI_PARTS; p++) {
        int32_t at = p * PREFILL_MULTI_STRIDE;
        if (p < parts) {
            record_mat(c->g, at + PREFILL_MULTI_CODES, mats[p]);
            record_out(c->g, at + PREFILL_MULTI_Y, outs[p], 0, rows(c, mats[p]->rows));
            continue;
        }
        graph_bind(c->g, at + PREFILL_MULTI_CODES, mats[0]->buffer, mats[0]->codes);
        graph_bind(c->g, at + PREFILL_MULTI_CODES + 1, mats[0]->buffer, mats[0]->scales);
        graph_bind(c->g, at + PREFILL_MULTI_CODES + 2, mats[0]->buffer, mats[0]->biases);
        graph_bind(c->g, at + PREFILL_MULTI_Y, outs[0], 0);
    }
    graph_args(c->g, PREFILL_MULTI_ARGS, &args, sizeof args);
    graph_end(c->g);
}

static void norm(const struct chunk *c, const struct metal_vector *weight) {
    const struct prefill_norm_args args = {(uint32_t)c->n};
    int32_t h = c->s->hidden;
    begin(c, METAL_PREFILL_NORM, prefill_row_grid(args.rows, (uint32_t)h));
    record_in(c->g, PREFILL_NORM_H, METAL_P_H, 0, rows(c, h));
    record_vector(c->g, PREFILL_NORM_WEIGHT, weight);
    record_out(c->g, PREFILL_NORM_X, METAL_P_X, 0, half_rows(c, h));
    record_out(c->g, PREFILL_NORM_R, METAL_P_R, 0, rows(c, 1));
    graph_args(c->g, PREFILL_NORM_ARGS, &args, sizeof args);
    graph_end(c->g);
}

/* ---- DeltaNet layers ------------------------------------------------------------------------- */

static void gdn_conv(const struct chunk *c, const struct metal_layer_tensors *w, int32_t layer,
                     const struct prefill_gdn_args *args) {
    const struct shape *s = c->s;
    uint64_t conv = layout_conv_layer(s), at = (uint64_t)shape_kind_index(s, layer) * conv;
    begin(c, METAL_PREFILL_GDN_CONV,
          prefill_gdn_conv_grid(args->rows, (uint32_t)s->conv_dim, (uint32_t)s->gdn_v_heads));
    graph_args(c->g, PREFILL_GDN_CONV_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_GDN_CONV_QKV, METAL_P_QKV, 0, rows(c, s->conv_dim));
    record_in(c->g, PREFILL_GDN_CONV_B, METAL_P_B, 0, rows(c, s->gdn_v_heads));
    record_in(c->g, PREFILL_GDN_CONV_A, METAL_P_A, 0, rows(c, s->gdn_v_heads));
    record_vector(c->g, PREFILL_GDN_CONV_TAPS, &w->deltanet.conv);
    record_vector(c->g, PREFILL_GDN_CONV_A_LOG, &w->deltanet.a_log);
    record_vector(c->g, PREFILL_GDN_CONV_DT_BIAS, &w->deltanet.dt_bias);
    record_in(c->g, PREFILL_GDN_CONV_HISTORY_IN, view_conv(&c->v, c->v.parity), at, conv);
    record_out(c->g, PREFILL_GDN_CONV_HISTORY_OUT, view_conv(&c->v, 1 - c->v.parity), at, conv);
    record_out(c->g, PREFILL_GDN_CONV_CHANNELS, METAL_P_CHANNELS, 0, rows(c, s->conv_dim));
    record_out(c->g, PREFILL_GDN_CONV_GATES, METAL_P_GATES, 0, rows(c, 2 * s->gdn_v_heads));
    graph_end(c->g);
}

static void gdn_scan(const struct chunk *c, int32_t layer, const struct prefill_gdn_args *args) {
    const struct shape *s = c->s;
    uint64_t state = layout_state_layer(s), at = (uint64_t)shape_kind_index(s, layer) * state;
    begin(c, METAL_PREFILL_GDN_SCAN, prefill_gdn_scan_grid((uint32_t)s->gdn_v_heads));
    graph_args(c->g, PREFILL_GDN_SCAN_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_GDN_SCAN_CHANNELS, METAL_P_CHANNELS, 0, rows(c, s->conv_dim));
    record_in(c->g, PREFILL_GDN_SCAN_GATES, METAL_P_GATES, 0, rows(c, 2 * s->gdn_v_heads));
    record_in(c->g, PREFILL_GDN_SCAN_STATE_IN, view_state(&c->v, c->v.parity), at, state);
    record_out(c->g, PREFILL_GDN_SCAN_STATE_OUT, view_state(&c->v, 1 - c->v.parity), at, state);
    record_out(c->g, PREFILL_GDN_SCAN_DELTA, METAL_P_DELTA, 0, rows(c, s->gdn_v_dim));
    graph_end(c->g);
}

/* Projections of a DeltaNet layer's input. */
static void gdn_in(const struct chunk *c, const struct metal_layer_tensors *w) {
    const struct metal_mat *const mats[] = {&w->deltanet.qkv, &w->deltanet.z, &w->deltanet.b,
                                            &w->deltanet.a};
    const int32_t outs[] = {METAL_P_QKV, METAL_P_Z, METAL_P_B, METAL_P_A};
    gemm_multi(c, mats, outs, 4);
}

static void deltanet(const struct chunk *c, const struct metal_layer_tensors *w, int32_t layer) {
    const struct shape *s = c->s;
    const struct prefill_gdn_args args = {.rows = (uint32_t)c->n,
                                          .qkv_stride = (uint32_t)s->conv_dim,
                                          .z_stride = (uint32_t)s->gdn_v_dim,
                                          .ba_stride = (uint32_t)s->gdn_v_heads};
    record_mark(c->g, TRACE_GDN_CONV, layer);
    gdn_in(c, w);
    gdn_conv(c, w, layer, &args);
    record_mark(c->g, TRACE_GDN_DELTA, layer);
    gdn_scan(c, layer, &args);
    record_mark(c->g, TRACE_GDN_NORM, layer);
    begin(c, METAL_PREFILL_GDN_NORM, prefill_gdn_norm_grid(args.rows, (uint32_t)s->gdn_v_heads));
    graph_args(c->g, PREFILL_GDN_NORM_ARGS, &args, sizeof args);
    record_in(c->g, PREFILL_GDN_NORM_DELTA, METAL_P_DELTA, 0, rows(c, s->gdn_v_dim));
    record_in(c->g, PREFILL_GDN_NORM_Z, METAL_P_Z, 0, rows(c, s->gdn_v_dim));
    record_vector(c->g, PREFILL_GDN_NORM_WEIGHT, &w->deltanet.norm);
    record_out(c->g, PREFILL_GDN_NORM_OUT, METAL_P_MIX, 0, half_rows(c, s->gdn_v_dim));
    graph_end(c->g);
    record_mark(c->g, TRACE_MIXER, layer);
    gemm(c, METAL_P_MIX, &w->deltanet.out, METAL_P_H, PREFILL_ADD_F32);
}

/* ---- attention layers ------------------------------------------------------------------------ */

/* Bytes of the layer's cache up to position `to`, from where values begin. */
struct cache {
    int32_t buffer;
    uint64_t row, values, from, to;
};

static struct cache cache_of(const struct chunk *c, int32_t layer) {
    uint64_t row = 2 * (uint64_t)c->s->kv_dim, pos = (uint64_t)c->v.position;
    return (struct cache){view_kv(&c->v, c->s, layer), row, (uint64_t)c->v.context * row, pos * row,
                          (pos + c->n) * row};
}

static void attn_prep(const struct chunk *c, const struct metal_layer_tensors *w,
                      const struct cache *kv, const struct prefill_attn_args *args) {
    const struct shape *s = c->s;
    begin(c, METAL_PREFILL_ATTN_PREP, prefill_attn_prep_grid(args->rows, (uint32_t)s->kv_heads));
    graph_args(c->g, PREFILL_ATTN_PREP_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_ATTN_PREP_QG, METAL_P_QKV, 0, rows(c, 2 * s->q_dim));
    record_in(c->g, PREFILL_ATTN_PREP_K, METAL_P_B, 0, rows(c, s->kv_dim));
    record_in(c->g, PREFILL_ATTN_PREP_V, METAL_P_A, 0, rows(c, s->kv_dim));
    record_vector(c->g, PREFILL_ATTN_PREP_Q_NORM, &w->attention.q_norm);
    record_vector(c->g, PREFILL_ATTN_PREP_K_NORM, &w->attention.k_norm);
    record_vector(c->g, PREFILL_ATTN_PREP_INV_FREQ, &c->l->tensors.inv_freq);
    record_out(c->g, PREFILL_ATTN_PREP_QUERY, METAL_P_QUERY, 0, half_rows(c, s->q_dim));
    graph_bind(c->g, PREFILL_ATTN_PREP_KEYS, kv->buffer, 0);
    graph_write(c->g, kv->buffer, kv->from, kv->to - kv->from);
    graph_bind(c->g, PREFILL_ATTN_PREP_VALUES, kv->buffer, kv->values);
    graph_write(c->g, kv->buffer, kv->values + kv->from, kv->to - kv->from);
    graph_end(c->g);
}

/* Attention in one kernel. Beyond the first span of positions the scratch carries the running
 * result from one span to the next. */
static void attn_whole(const struct chunk *c, const struct cache *kv,
                       const struct prefill_attn_args *args) {
    const struct shape *s = c->s;
    begin(c, METAL_PREFILL_ATTN, prefill_attn_grid(args->rows, (uint32_t)s->kv_heads));
    graph_args(c->g, PREFILL_ATTN_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_ATTN_QUERY, METAL_P_QUERY, 0, half_rows(c, s->q_dim));
    record_in(c->g, PREFILL_ATTN_KEYS, kv->buffer, 0, kv->to);
    record_in(c->g, PREFILL_ATTN_VALUES, kv->buffer, kv->values, kv->to);
    record_in(c->g, PREFILL_ATTN_QG, METAL_P_QKV, 0, rows(c, 2 * s->q_dim));
    record_out(c->g, PREFILL_ATTN_OUT, METAL_P_MIX, 0, half_rows(c, s->q_dim));
    if (prefill_attn_spans(args->rows, args->position) > 1) {
        record_in_out(c->g, PREFILL_ATTN_TOTAL, METAL_P_TOTAL, 0, rows(c, s->q_dim));
    } else {
        graph_bind(c->g, PREFILL_ATTN_TOTAL, METAL_P_TOTAL, 0);
    }
    graph_end(c->g);
}

/* Few tokens at great depth: spans side by side, then joined. */
static void attn_split(const struct chunk *c, const struct cache *kv,
                       const struct prefill_attn_args *args) {
    const struct shape *s = c->s;
    uint64_t spans = prefill_attn_spans(args->rows, args->position);
    uint64_t total = spans * rows(c, s->q_dim), stats = spans * rows(c, 2 * s->q_heads);
    begin(c, METAL_PREFILL_ATTN_SPLIT,
          prefill_attn_split_grid(args->rows, args->position, (uint32_t)s->kv_heads));
    graph_args(c->g, PREFILL_ATTN_SPLIT_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_ATTN_SPLIT_QUERY, METAL_P_QUERY, 0, half_rows(c, s->q_dim));
    record_in(c->g, PREFILL_ATTN_SPLIT_KEYS, kv->buffer, 0, kv->to);
    record_in(c->g, PREFILL_ATTN_SPLIT_VALUES, kv->buffer, kv->values, kv->to);
    record_out(c->g, PREFILL_ATTN_SPLIT_TOTAL, METAL_P_TOTAL, 0, total);
    record_out(c->g, PREFILL_ATTN_SPLIT_STATS, METAL_P_STATS, 0, stats);
    graph_end(c->g);
    begin(c, METAL_PREFILL_ATTN_MERGE, prefill_attn_merge_grid(args->rows, (uint32_t)s->kv_heads));
    graph_args(c->g, PREFILL_ATTN_MERGE_ARGS, args, sizeof *args);
    record_in(c->g, PREFILL_ATTN_MERGE_TOTAL, METAL_P_TOTAL, 0, total);
    record_in(c->g, PREFILL_ATTN_MERGE_STATS, METAL_P_STATS, 0, stats);
    record_in(c->g, PREFILL_ATTN_MERGE_QG, METAL_P_QKV, 0, rows(c, 2 * s->q_dim));
    record_out(c->g, PREFILL_ATTN_MERGE_OUT, METAL_P_MIX, 0, half_rows(c, s->q_dim));
    graph_end(c->g);
}

static struct prefill_attn_args attn_args(const struct chunk *c) {
    const struct shape *s = c->s;
    return (struct prefill_attn_args){.rows = (uint32_t)c->n,
                                      .position = (uint32_t)c->v.position,
                                      .qg_stride = 2 * (uint32_t)s->q_dim,
                                      .kv_stride = (uint32_t)s->kv_dim,
                                      .cache_row = (uint32_t)s->kv_dim,
                                      .cache_head = (uint32_t)s->head_dim};
}

static void attention(const struct chunk *c, const struct metal_layer_tensors *w, int32_t layer) {
    const struct metal_mat *const mats[] = {&w->attention.q, &w->attention.k, &w->attention.v};
    const int32_t outs[] = {METAL_P_QKV, METAL_P_B, METAL_P_A};
    const struct prefill_attn_args args = attn_args(c);
    struct cache kv = cache_of(c, layer);
    record_mark(c->g, TRACE_ATTN_PREP, layer);
    gemm_multi(c, mats, outs, 3);
    attn_prep(c, w, &kv, &args);
    record_mark(c->g, TRACE_ATTN, layer);
    if (prefill_attn_splits(args.rows, args.position, (uint32_t)c->l->rows)) {
        attn_split(c, &kv, &args);
    } else {
        attn_whole(c, &kv, &args);
    }
    record_mark(c->g, TRACE_MIXER, layer);
    gemm(c, METAL_P_MIX, &w->attention.o, METAL_P_H, PREFILL_ADD_F32);
}

/* ---- experts --------------------------------------------------------------------------------- */

static void router(const struct chunk *c, const struct metal_layer_tensors *w) {
    const struct shape *s = c->s;
    const struct prefill_router_args args = {(uint32_t)c->n};
    begin(c, METAL_PREFILL_ROUTER, prefill_router_grid(args.rows, (uint32_t)s->experts));
    record_in(c->g, PREFILL_ROUTER_H, METAL_P_H, 0, rows(c, s->hidden));
    record_in(c->g, PREFILL_ROUTER_R, METAL_P_R, 0, rows(c, 1));
    record_vector(c->g, PREFILL_ROUTER_WEIGHT, &w->post_norm);
    record_mat(c->g, PREFILL_ROUTER_CODES, &w->router);
    record_mat(c->g, PREFILL_ROUTER_GATE_CODES, &w->shared_gate);
    record_out(c->g, PREFILL_ROUTER_IDS, METAL_P_EXPERT_IDS, 0, half_rows(c, s->top_k));
    record_out(c->g, PREFILL_ROUTER_WEIGHTS, METAL_P_WEIGHTS, 0, rows(c, s->top_k));
    record_out(c->g, PREFILL_ROUTER_GATE, METAL_P_GATE, 0, rows(c, 1));
    graph_args(c->g, PREFILL_ROUTER_ARGS, &args, sizeof args);
    graph_end(c->g);
}

static void shared_up(const struct chunk *c, const struct metal_layer_tensors *w) {
    const struct shape *s = c->s;
    const struct prefill_silu_args args = {(uint32_t)c->n, (uint32_t)s->hidden,
                                           (uint32_t)s->shared_width};
    begin(c, METAL_PREFILL_GEMM_SILU, prefill_silu_grid(args.rows, args.out_rows));
    record_in(c->g, PREFILL_SILU_X, METAL_P_X, 0, half_rows(c, s->hidden));
    record_mat(c->g, PREFILL_SILU_GATE_CODES, &w->shared_gate_proj);
    record_mat(c->g, PREFILL_SILU_UP_CODES, &w->shared_up_proj);
    record_out(c->g, PREFILL_SILU_Y, METAL_P_SHARED_ACT, 0, half_rows(c, s->shared_width));
    graph_args(c->g, PREFILL_SILU_ARGS, &args, sizeof args);
    graph_end(c->g);
}

static void route(const struct chunk *c, uint32_t blocks) {
    const struct shape *s = c->s;
    const struct prefill_route_args args = {(uint32_t)c->n, blocks};
    begin(c, METAL_PREFILL_ROUTE, prefill_route_grid((uint32_t)s->experts));
    record_in(c->g, PREFILL_ROUTE_IDS, METAL_P_EXPERT_IDS, 0, half_rows(c, s->top_k));
    record_out(c->g, PREFILL_ROUTE_SORTED, METAL_P_SORTED, 0, rows(c, s->top_k));
    record_out(c->g, PREFILL_ROUTE_BLOCKS, METAL_P_BLOCKS, 0, 16 * (uint64_t)blocks);
    graph_args(c->g, PREFILL_ROUTE_ARGS, &args, sizeof args);
    graph_end(c->g);
}

/* Any expert may be chosen; of more than a few rows nearly all are. */
static void routed(const struct chunk *c, const struct metal_layer_tensors *w, uint32_t blocks) {
    const struct shape *s = c->s;
    const struct prefill_experts_args args = {.expert_stride = (uint32_t)w->gate.stride};
    const uint64_t used = c->n * (uint64_t)s->top_k, table = 16 * (uint64_t)blocks;
    begin(c, METAL_PREFILL_EXPERTS_UP, prefill_up_grid(blocks, (uint32_t)s->expert_width));
    record_in(c->g, PREFILL_UP_X, METAL_P_X, 0, half_rows(c, s->hidden));
    record_experts(c->g, PREFILL_UP_GATE_CODES, &w->gate, used);
    record_experts(c->g, PREFILL_UP_UP_CODES, &w->up, used);
    record_in(c->g, PREFILL_UP_SORTED, METAL_P_SORTED, 0, rows(c, s->top_k));
    record_in(c->g, PREFILL_UP_BLOCKS, METAL_P_BLOCKS, 0, table);
    record_out(c->g, PREFILL_UP_ACT, METAL_P_ACT, 0, half_rows(c, s->top_k * s->expert_width));
    graph_args(c->g, PREFILL_UP_ARGS, &args, sizeof args);
    graph_end(c->g);
    begin(c, METAL_PREFILL_EXPERTS_DOWN, prefill_down_grid(blocks, (uint32_t)s->hidden));
    record_in(c->g, PREFILL_DOWN_ACT, METAL_P_ACT, 0, half_rows(c, s->top_k * s->expert_width));
    record_experts(c->g, PREFILL_DOWN_CODES, &w->down, used);
    record_in(c->g, PREFILL_DOWN_SORTED, METAL_P_SORTED, 0, rows(c, s->top_k));
    record_in(c->g, PREFILL_DOWN_BLOCKS, METAL_P_BLOCKS, 0, table);
    record_in(c->g, PREFILL_DOWN_WEIGHTS, METAL_P_WEIGHTS, 0, rows(c, s->top_k));
    record_out(c->g, PREFILL_DOWN_OUT, METAL_P_PAIRS, 0, half_rows(c, s->top_k * s->hidden));
    graph_args(c->g, PREFILL_DOWN_ARGS, &args, sizeof args);
    graph_end(c->g);
}

/* next: the norm of the layer that follows, NULL after the last one. */
static void combine(const struct chunk *c, const struct metal_vector *next) {
    const struct shape *s = c->s;
    const struct prefill_combine_args args = {(uint32_t)c->n};
    begin(c, next ? METAL_PREFILL_COMBINE_NORM : METAL_PREFILL_COMBINE,
          prefill_row_grid(args.rows, (uint32_t)s->hidden));
    record_in(c->g, PREFILL_COMBINE_PAIRS, METAL_P_PAIRS, 0, half_rows(c, s->top_k * s->hidden));
    record_in(c->g, PREFILL_COMBINE_SHARED, METAL_P_SHARED, 0, half_rows(c, s->hidden));
    record_in(c->g, PREFILL_COMBINE_GATE, METAL_P_GATE, 0, rows(c, 1));
    record_in_out(c->g, PREFILL_COMBINE_H, METAL_P_H, 0, rows(c, s->hidden));
    graph_args(c->g, PREFILL_COMBINE_ARGS, &args, sizeof args);
    if (next) {
        record_vector(c->g, PREFILL_COMBINE_WEIGHT, next);
        record_out(c->g, PREFILL_COMBINE_X, METAL_P_X, 0, half_rows(c, s->hidden));
        record_out(c->g, PREFILL_COMBINE_R, METAL_P_R, 0, rows(c, 1));
    }
    graph_end(c->g);
}

/* Routed and shared expert of routed rows. */
static void feed_forward(const struct chunk *c, const struct metal_layer_tensors *w) {
    const struct shape *s = c->s;
    uint32_t blocks = prefill_max_blocks((uint32_t)c->n, (uint32_t)s->experts, (uint32_t)s->top_k);
    shared_up(c, w);
    route(c, blocks);
    gemm(c, METAL_P_SHARED_ACT, &w->shared_down_proj, METAL_P_SHARED, PREFILL_STORE_BF16);
    routed(c, w, blocks);
}

static void experts(const struct chunk *c, const struct metal_layer_tensors *w, int32_t layer) {
    record_mark(c->g, TRACE_POST_NORM, layer);
    norm(c, &w->post_norm);
    record_mark(c->g, TRACE_ROUTER, layer);
    router(c, w);
    record_mark(c->g, TRACE_EXPERTS, layer);
    feed_forward(c, w);
    record_mark(c->g, TRACE_LAYER, layer);
    bool last = layer + 1 == c->l->layers;
    combine(c, last ? NULL : &c->l->tensors.layer[layer + 1].input_norm);
}

void prefill_record_products(struct graph *g, const struct metal_layout *l, int32_t n) {
    const struct metal_layer_tensors *w = &l->tensors.layer[0];
    struct chunk c = {.g = g, .l = l, .s = l->shape, .n = (uint64_t)(uint32_t)n};
    gdn_in(&c, w);
    gemm(&c, METAL_P_MIX, &w->deltanet.out, METAL_P_H, PREFILL_ADD_F32);
    feed_forward(&c, w);
}

void prefill_record_attention(struct graph *g, const struct metal_layout *l, int32_t layer,
                              int32_t n, int32_t position, bool split) {
    const uint64_t row = 2 * (uint64_t)l->shape->kv_dim, from = row * (uint64_t)position;
    struct chunk c = {.g = g, .l = l, .s = l->shape, .n = (uint64_t)(uint32_t)n};
    c.v.position = position;
    const struct prefill_attn_args args = attn_args(&c);
    const struct cache kv = {METAL_P_CHANNELS, row, from + c.n * row, from, from + c.n * row};
    attn_prep(&c, &l->tensors.layer[layer], &kv, &args);
    if (split) {
        attn_split(&c, &kv, &args);
    } else {
        attn_whole(&c, &kv, &args);
    }
}

void prefill_record(struct graph *g, const struct metal_layout *l, const struct prefill_record *r) {
    struct chunk c = {
        .g = g, .l = l, .s = l->shape, .v = r->session, .n = (uint64_t)(uint32_t)r->n};
    const struct prefill_embed_args args = {(uint32_t)r->n};
    record_mark(g, TRACE_EMBED, -1);
    begin(&c, METAL_PREFILL_EMBED, prefill_row_grid(args.rows, (uint32_t)c.s->hidden));
    record_in(g, PREFILL_EMBED_IDS, METAL_P_IDS, 0, rows(&c, 1));
    record_rows(g, PREFILL_EMBED_CODES, &l->tensors.embed, c.n);
    record_out(g, PREFILL_EMBED_H, METAL_P_H, 0, rows(&c, c.s->hidden));
    graph_args(g, PREFILL_EMBED_ARGS, &args, sizeof args);
    graph_end(g);
    record_mark(g, TRACE_IN_NORM, 0);
    norm(&c, &l->tensors.layer[0].input_norm);
    for (int32_t layer = 0; layer < l->layers; layer++) {
        const struct metal_layer_tensors *w = &l->tensors.layer[layer];
        if (shape_is_attention(c.s, layer)) {
            attention(&c, w, layer);
        } else {
            deltanet(&c, w, layer);
        }
        experts(&c, w, layer);
    }
}

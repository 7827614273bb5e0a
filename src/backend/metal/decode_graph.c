#include "backend/metal/decode_graph.h"

const struct decode_sampling_args decode_no_sampling = {.top_p = 1, .repetition = 1, .top_k = 1};

static void begin(struct graph *g, enum decode_kernel k, const struct shape *s) {
    record_begin(g, (int32_t)k, s, decode_groups(k, s));
}

static uint64_t bytes(int32_t floats) {
    return 4 * (uint64_t)floats;
}

/* ---- DeltaNet layers ------------------------------------------------------------------------- */

static void gdn_delta(struct graph *g, const struct metal_layout *l, const struct metal_view *v,
                      int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    uint64_t n = (uint64_t)shape_kind_index(s, layer), proj = l->bytes[METAL_GDN_PROJ];
    uint64_t conv = layout_conv_layer(s), state = layout_state_layer(s);
    begin(g, DECODE_GDN_DELTA, s);
    record_in(g, DECODE_GDN_DELTA_PROJ, METAL_GDN_PROJ, 0, proj);
    record_vector(g, DECODE_GDN_DELTA_CONV, &w->deltanet.conv);
    record_vector(g, DECODE_GDN_DELTA_A_LOG, &w->deltanet.a_log);
    record_vector(g, DECODE_GDN_DELTA_DT_BIAS, &w->deltanet.dt_bias);
    record_vector(g, DECODE_GDN_DELTA_NORM, &w->deltanet.norm);
    record_in(g, DECODE_GDN_DELTA_CONV_IN, view_conv(v, v->parity), n * conv, conv);
    record_out(g, DECODE_GDN_DELTA_CONV_OUT, view_conv(v, 1 - v->parity), n * conv, conv);
    record_in(g, DECODE_GDN_DELTA_STATE_IN, view_state(v, v->parity), n * state, state);
    record_out(g, DECODE_GDN_DELTA_STATE_OUT, view_state(v, 1 - v->parity), n * state, state);
    record_out(g, DECODE_GDN_DELTA_GATED, METAL_GATED, 0, bytes(s->gdn_v_dim));
    record_out(g, DECODE_GDN_DELTA_SQUARES, METAL_SQUARES, 0, l->bytes[METAL_SQUARES]);
    graph_end(g);
}

static void deltanet(struct graph *g, const struct metal_layout *l, const struct metal_view *v,
                     int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    record_mark(g, TRACE_GDN_NORM, layer);
    begin(g, DECODE_GDN_IN, s);
    record_in(g, DECODE_GDN_IN_H, METAL_H, 0, bytes(s->hidden));
    record_vector(g, DECODE_GDN_IN_NORM, &w->input_norm);
    record_mat(g, DECODE_GDN_IN_QKV, &w->deltanet.qkv);
    record_mat(g, DECODE_GDN_IN_Z, &w->deltanet.z);
    record_mat(g, DECODE_GDN_IN_B, &w->deltanet.b);
    record_mat(g, DECODE_GDN_IN_A, &w->deltanet.a);
    record_out(g, DECODE_GDN_IN_PROJ, METAL_GDN_PROJ, 0, l->bytes[METAL_GDN_PROJ]);
    graph_end(g);
    gdn_delta(g, l, v, layer);
    record_mark(g, TRACE_MIXER, layer);
    begin(g, DECODE_GDN_OUT, s);
    record_in(g, DECODE_GDN_OUT_GATED, METAL_GATED, 0, bytes(s->gdn_v_dim));
    record_in(g, DECODE_GDN_OUT_SQUARES, METAL_SQUARES, 0, l->bytes[METAL_SQUARES]);
    record_mat(g, DECODE_GDN_OUT_PROJ, &w->deltanet.out);
    record_in_out(g, DECODE_GDN_OUT_H, METAL_H, 0, bytes(s->hidden));
    graph_end(g);
}

/* ---- attention layers ------------------------------------------------------------------------ */

/* The blocks of KV rows; returns how many partial results they leave. */
static uint32_t attend(struct graph *g, const struct metal_layout *l, const struct metal_view *v,
                       int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    struct decode_attn_args args;
    enum decode_kernel k = decode_attn_layout((uint32_t)v->position, &args);
    uint64_t row = 2 * (uint64_t)s->kv_dim, at = (uint64_t)v->position * row;
    uint64_t values = (uint64_t)v->context * row;
    int32_t kv = view_kv(v, s, layer);
    record_begin(g, (int32_t)k, s, args.blocks * (uint32_t)s->kv_heads);
    graph_args(g, DECODE_ATTN_ARGS, &args, sizeof args);
    record_in(g, DECODE_ATTN_QKV, METAL_QKV, 0, l->bytes[METAL_QKV]);
    record_vector(g, DECODE_ATTN_Q_NORM, &w->attention.q_norm);
    record_vector(g, DECODE_ATTN_K_NORM, &w->attention.k_norm);
    record_vector(g, DECODE_ATTN_INV_FREQ, &l->tensors.inv_freq);
    record_in(g, DECODE_ATTN_KEYS, kv, 0, at + row);
    record_in(g, DECODE_ATTN_VALUES, kv, values, at + row);
    graph_write(g, kv, at, row);
    graph_write(g, kv, values + at, row);
    record_out(g, DECODE_ATTN_PARTIAL, METAL_PARTIAL, 0, args.blocks * bytes(s->q_dim));
    record_out(g, DECODE_ATTN_STATS, METAL_STATS, 0, args.blocks * bytes(2 * s->q_heads));
    graph_end(g);
    return args.blocks;
}

static void merge(struct graph *g, const struct metal_layout *l, uint32_t blocks) {
    const struct shape *s = l->shape;
    struct decode_merge_args args = {.blocks = blocks};
    begin(g, DECODE_ATTN_MERGE, s);
    graph_args(g, DECODE_ATTN_MERGE_ARGS, &args, sizeof args);
    record_in(g, DECODE_ATTN_MERGE_PARTIAL, METAL_PARTIAL, 0, blocks * bytes(s->q_dim));
    record_in(g, DECODE_ATTN_MERGE_STATS, METAL_STATS, 0, blocks * bytes(2 * s->q_heads));
    record_out(g, DECODE_ATTN_MERGE_MERGED, METAL_MERGED, 0, bytes(s->q_dim));
    record_out(g, DECODE_ATTN_MERGE_MERGED_STATS, METAL_MERGED_STATS, 0, bytes(2 * s->q_heads));
    graph_end(g);
}

static void attention(struct graph *g, const struct metal_layout *l, const struct metal_view *v,
                      int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    record_mark(g, TRACE_ATTN, layer);
    begin(g, DECODE_ATTN_IN, s);
    record_in(g, DECODE_ATTN_IN_H, METAL_H, 0, bytes(s->hidden));
    record_vector(g, DECODE_ATTN_IN_NORM, &w->input_norm);
    record_mat(g, DECODE_ATTN_IN_Q, &w->attention.q);
    record_mat(g, DECODE_ATTN_IN_K, &w->attention.k);
    record_mat(g, DECODE_ATTN_IN_V, &w->attention.v);
    record_out(g, DECODE_ATTN_IN_QKV, METAL_QKV, 0, l->bytes[METAL_QKV]);
    graph_end(g);
    struct decode_merge_args args = {.blocks = attend(g, l, v, layer)};
    bool merged = args.blocks > DECODE_MERGE_ABOVE;
    if (merged) {
        merge(g, l, args.blocks);
        args.blocks = 1;
    }
    record_mark(g, TRACE_MIXER, layer);
    begin(g, DECODE_ATTN_OUT, s);
    graph_args(g, DECODE_ATTN_OUT_ARGS, &args, sizeof args);
    record_in(g, DECODE_ATTN_OUT_PARTIAL, merged ? METAL_MERGED : METAL_PARTIAL, 0,
              args.blocks * bytes(s->q_dim));
    record_in(g, DECODE_ATTN_OUT_STATS, merged ? METAL_MERGED_STATS : METAL_STATS, 0,
              args.blocks * bytes(2 * s->q_heads));
    record_mat(g, DECODE_ATTN_OUT_PROJ, &w->attention.o);
    record_in_out(g, DECODE_ATTN_OUT_H, METAL_H, 0, bytes(s->hidden));
    graph_end(g);
}

/* ---- experts --------------------------------------------------------------------------------- */

static void router(struct graph *g, const struct metal_layout *l, int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    begin(g, DECODE_ROUTER, s);
    record_in(g, DECODE_ROUTER_H, METAL_H, 0, bytes(s->hidden));
    record_vector(g, DECODE_ROUTER_NORM, &w->post_norm);
    record_mat(g, DECODE_ROUTER_LOGITS_W, &w->router);
    record_mat(g, DECODE_ROUTER_SHARED_GATE, &w->shared_gate);
    record_mat(g, DECODE_ROUTER_GATE, &w->shared_gate_proj);
    record_mat(g, DECODE_ROUTER_UP, &w->shared_up_proj);
    record_out(g, DECODE_ROUTER_X, METAL_X, 0, bytes(s->hidden));
    record_out(g, DECODE_ROUTER_LOGITS, METAL_ROUTER_LOGITS, 0, bytes(s->experts + 1));
    record_out(g, DECODE_ROUTER_SHARED, METAL_SHARED, 0, bytes(s->shared_width));
    graph_end(g);
}

static void experts(struct graph *g, const struct metal_layout *l, int32_t layer) {
    const struct shape *s = l->shape;
    const struct metal_layer_tensors *w = &l->tensors.layer[layer];
    const struct decode_experts_args args = {.expert_stride = (uint32_t)w->gate.stride};
    const uint64_t chosen = (uint64_t)s->top_k;
    record_mark(g, TRACE_ROUTER, layer);
    router(g, l, layer);
    record_mark(g, TRACE_LAYER, layer);
    begin(g, DECODE_EXPERTS_UP, s);
    graph_args(g, DECODE_EXPERTS_UP_ARGS, &args, sizeof args);
    record_in(g, DECODE_EXPERTS_UP_X, METAL_X, 0, bytes(s->hidden));
    record_in(g, DECODE_EXPERTS_UP_LOGITS, METAL_ROUTER_LOGITS, 0, bytes(s->experts));
    record_experts(g, DECODE_EXPERTS_UP_GATE, &w->gate, chosen);
    record_experts(g, DECODE_EXPERTS_UP_UP, &w->up, chosen);
    record_out(g, DECODE_EXPERTS_UP_INNER, METAL_INNER, 0, l->bytes[METAL_INNER]);
    graph_end(g);
    begin(g, DECODE_EXPERTS_DOWN, s);
    graph_args(g, DECODE_EXPERTS_DOWN_ARGS, &args, sizeof args);
    record_in(g, DECODE_EXPERTS_DOWN_LOGITS, METAL_ROUTER_LOGITS, 0, bytes(s->experts + 1));
    record_in(g, DECODE_EXPERTS_DOWN_INNER, METAL_INNER, 0, l->bytes[METAL_INNER]);
    record_in(g, DECODE_EXPERTS_DOWN_SHARED, METAL_SHARED, 0, bytes(s->shared_width));
    record_experts(g, DECODE_EXPERTS_DOWN_DOWN, &w->down, chosen);
    record_mat(g, DECODE_EXPERTS_DOWN_SHARED_DOWN, &w->shared_down_proj);
    record_in_out(g, DECODE_EXPERTS_DOWN_H, METAL_H, 0, bytes(s->hidden));
    graph_end(g);
}

/* ---- embedding and head ---------------------------------------------------------------------- */

static void embed(struct graph *g, const struct metal_layout *l, const struct decode_record *r) {
    const struct shape *s = l->shape;
    const struct decode_embed_args args = {.token = r->token, .count = r->count};
    const struct metal_view *v = &r->session;
    int32_t tokens = METAL_TOKEN_0 + v->token_parity, counts = view_counts(v);
    uint64_t at = METAL_SLOT * (uint64_t)v->slot;
    begin(g, DECODE_EMBED, s);
    graph_args(g, DECODE_EMBED_ARGS, &args, sizeof args);
    graph_bind(g, DECODE_EMBED_TOKEN, tokens, at);
    if (r->token < 0) graph_read(g, tokens, at, 4);
    record_rows(g, DECODE_EMBED_CODES, &l->tensors.embed, 1);
    graph_bind(g, DECODE_EMBED_COUNTS, counts, 0);
    if (r->count) {
        graph_read_some(g, counts, 0, bytes(s->vocab), 4);
        graph_write_some(g, counts, 0, bytes(s->vocab), 4);
    }
    record_out(g, DECODE_EMBED_H, METAL_H, 0, bytes(s->hidden));
    graph_end(g);
}

void decode_record_head(struct graph *g, const struct metal_layout *l,
                        const struct decode_record *r, int32_t h, uint64_t row) {
    const struct shape *s = l->shape;
    const struct metal_view *v = &r->session;
    const struct decode_sampling_args *p = &r->sampling;
    const uint64_t looked_at = 4 * DECODE_HEAD_ROWS * 64;
    int32_t logits = METAL_LOGITS_0 + r->result_set, counts = view_counts(v);
    uint64_t all = bytes(s->vocab), first = (uint64_t)v->slot * all;
    uint64_t at = METAL_SLOT * (uint64_t)v->slot, some = all < looked_at ? all : looked_at;
    record_mark(g, TRACE_LOGITS, -1);
    begin(g, DECODE_HEAD, s);
    graph_args(g, DECODE_HEAD_ARGS, p, sizeof *p);
    record_in(g, DECODE_HEAD_H, h, row * bytes(s->hidden), bytes(s->hidden));
    record_vector(g, DECODE_HEAD_NORM, &l->tensors.final_norm);
    record_mat(g, DECODE_HEAD_PROJ, &l->tensors.lm_head);
    graph_bind(g, DECODE_HEAD_COUNTS, counts, 0);
    if (p->penalties) graph_read(g, counts, 0, all);
    record_in(g, DECODE_HEAD_MASK, METAL_MASK, 0, l->bytes[METAL_MASK]);
    record_out(g, DECODE_HEAD_LOGITS, logits, first, all);
    record_out(g, DECODE_HEAD_BEST, METAL_BEST, 0, l->bytes[METAL_BEST]);
    graph_end(g);
    begin(g, DECODE_SAMPLE, s);
    graph_args(g, DECODE_SAMPLE_ARGS, p, sizeof *p);
    graph_bind(g, DECODE_SAMPLE_LOGITS, logits, first);
    graph_read_some(g, logits, first, all, some);
    record_in(g, DECODE_SAMPLE_BEST, METAL_BEST, 0, l->bytes[METAL_BEST]);
    graph_bind(g, DECODE_SAMPLE_COUNTS, counts, 0);
    if (p->penalties) graph_read_some(g, counts, 0, all, some);
    record_in(g, DECODE_SAMPLE_MASK, METAL_MASK, 0, l->bytes[METAL_MASK]);
    record_out(g, DECODE_SAMPLE_TOKEN, METAL_TOKEN_0 + 1 - v->token_parity, at, 4);
    record_out(g, DECODE_SAMPLE_RESULT, METAL_RESULT_0 + r->result_set, at, 8);
    graph_end(g);
}

void decode_record(struct graph *g, const struct metal_layout *l, const struct decode_record *r) {
    record_mark(g, TRACE_EMBED, -1);
    embed(g, l, r);
    for (int32_t layer = 0; layer < l->layers; layer++) {
        if (shape_is_attention(l->shape, layer)) {
            attention(g, l, &r->session, layer);
        } else {
            deltanet(g, l, &r->session, layer);
        }
        experts(g, l, layer);
    }
    decode_record_head(g, l, r, METAL_H, 0);
}

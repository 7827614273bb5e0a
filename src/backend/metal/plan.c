#include "backend/metal/plan.h"

#include "backend/metal/decode_graph.h"
#include "backend/metal/prefill_graph.h"

static int check(const struct shape *s, const struct plan_query *q, lily_err *err) {
    bool layers = q->layers >= s->attention_every && q->layers <= s->layers &&
                  q->layers % s->attention_every == 0;
    if (q->sessions > 1) {
        return ERR(err, LILY_EINVAL,
                   "plan: found %d sessions in a step, expected one: Metal runs them one by one",
                   q->sessions);
    }
    if (layers && q->depth >= 0 && q->tokens >= 1 && q->tokens <= PREFILL_MAX_ROWS &&
        q->depth <= s->max_context - q->tokens) {
        return LILY_OK;
    }
    return ERR(err, LILY_EINVAL,
               "plan: found %d tokens at depth %d of %d layers, expected 1 to %d tokens within a "
               "context of %d and a multiple of %d layers up to %d",
               q->tokens, q->depth, q->layers, PREFILL_MAX_ROWS, s->max_context, s->attention_every,
               s->layers);
}

static void fill(const struct graph_counts *c, struct backend_plan *out) {
    *out = (struct backend_plan){
        .kernels = c->kernels,
        .stages = c->stages,
        .barriers = c->barriers,
        .command_buffers = 1,
        .weight_bytes = c->unique_read[GRAPH_WEIGHTS],
        .state_bytes = c->unique_read[GRAPH_STATE],
        .kv_bytes = c->unique_read[GRAPH_KV],
        .read_bytes = c->traffic_read,
        .written_bytes = c->traffic_written,
    };
}

/* A token in the middle of an answer is read from its slot, and the next one drawn. A chunk ends
 * with the logits of its last row. */
static void record(struct graph *g, const struct metal_layout *l, const struct plan_query *q) {
    struct decode_record r = {
        .session = {.first = l->first_session, .context = l->context, .position = q->depth},
        .token = -1,
        .sampling = decode_no_sampling,
    };
    if (q->tokens == 1) {
        decode_record(g, l, &r);
        return;
    }
    struct prefill_record chunk = {.session = r.session, .n = q->tokens};
    prefill_record(g, l, &chunk);
    decode_record_head(g, l, &r, METAL_P_H, (uint64_t)q->tokens - 1);
}

int metal_plan(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
               lily_err *err) {
    struct metal_layout layout = {0};
    struct graph *g = NULL;
    struct graph_counts counts;
    int rc = check(shape, query, err);
    if (rc != LILY_OK) return rc;
    rc = layout_make(shape, query->layers, NULL, false, PREFILL_MAX_ROWS,
                     query->depth + query->tokens, 1, UINT64_MAX, &layout, err);
    if (rc != LILY_OK) return rc;
    rc = layout_graph(&layout, prefill_most_dispatches(query->layers) + 2, &g, err);
    if (rc != LILY_OK) goto out;
    record(g, &layout, query);
    rc = graph_check(g, err);
    if (rc == LILY_OK) rc = graph_count(g, &counts, err);
    if (rc == LILY_OK) fill(&counts, out);
out:
    graph_free(g);
    layout_free(&layout);
    return rc;
}

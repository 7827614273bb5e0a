/* Mixture of experts (docs/model.md): h = silu(gate x) * (up x) per expert, quantised group by
 * group where it is made, then down h, weighted and added in ascending expert number; the shared
 * expert last. Decode and prefill add in the same order. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <string.h>

/* The rows of a quantised array from `row` on, or its group g alone. */
static struct qrows rows_from(const struct qrows *q, size_t row) {
    return (struct qrows){q->q + row * GROUP_BYTES, q->s + row * 2, q->rows};
}
static struct qrows group_of(const struct qrows *q, int32_t g) {
    size_t at = (size_t)g * q->rows;
    return (struct qrows){q->q + at * GROUP_BYTES, q->s + at * 2, q->rows};
}

struct expert {
    const struct mat *gate, *up, *down;
};

/* Expert e, or the shared one for e = E. */
static struct expert expert_of(const struct moe_weights *moe, int32_t e, int32_t experts) {
    if (e < experts) return (struct expert){&moe->gate[e], &moe->up[e], &moe->down[e]};
    return (struct expert){&moe->shared_gate_proj, &moe->shared_up_proj, &moe->shared_down_proj};
}

/* x += routed + shared for columns [b, e) of a row. */
static void add_columns(float *x, const float *routed, const float *shared, int32_t b, int32_t e) {
    for (int32_t i = b; i < e; i++) x[i] += routed[i] + shared[i];
}

/* ---- one row --------------------------------------------------------------------------------- */

/* The row's experts in ascending order with their weights, the shared one (E) at the end. */
static void row_experts(const struct backend_model *m, const float *routing, int32_t *id,
                        float *weight) {
    int32_t experts = model_shape(m)->experts, top_k = model_shape(m)->top_k;
    for (int32_t n = 0; n < top_k; n++) {
        int32_t e = (int32_t)routing[n], i = n;
        for (; i > 0 && id[i - 1] > e; i--) id[i] = id[i - 1], weight[i] = weight[i - 1];
        id[i] = e;
        weight[i] = routing[top_k + n];
    }
    id[top_k] = experts;
    weight[top_k] = 1.0f / (1.0f + expf(-m->x.scores[experts]));
}

/* This thread's groups of the hidden activations of all experts of the row: the groups of one
 * expert follow each other, so that its rows are read in one go. */
static void row_hidden(struct worker *w, const struct moe_weights *moe, const int32_t *id,
                       const struct qrows *in_q) {
    const struct kernels *k = w->m->k;
    const struct shape *s = model_shape(w->m);
    struct lane *lane = w->lane;
    int32_t groups = s->expert_width / GROUP, begin, end;
    cpu_pool_part(s->top_k * groups + s->shared_width / GROUP, w->thread, w->threads, &begin, &end);
    for (int32_t i = begin; i < end;) {
        int32_t n = i / groups < s->top_k ? i / groups : s->top_k, g = i - n * groups;
        int32_t last = n < s->top_k ? groups : s->shared_width / GROUP;
        if (last > end - n * groups) last = end - n * groups;
        struct expert e = expert_of(moe, id[n], s->experts);
        struct ahead next = {0};
        if (n * groups + last < end) {
            next = (struct ahead){expert_of(moe, id[n + 1], s->experts).gate, 0};
        }
        k->matvec4(e.gate, g * GROUP, last * GROUP, in_q, lane->gate,
                   (struct ahead){e.up, g * GROUP});
        k->matvec4(e.up, g * GROUP, last * GROUP, in_q, lane->up, next);
        k->silu_mul(lane->gate, lane->up, (last - g) * GROUP, lane->gate);
        struct qrows h = group_of(&w->x->hidden_q, g);
        k->quantise(lane->gate, (last - g) * GROUP, &h, (size_t)n);
        i = n * groups + last;
    }
}

void experts_row(struct worker *w, int32_t layer, const struct qrows *in_q) {
    const struct backend_model *m = w->m;
    const struct kernels *k = m->k;
    const struct shape *s = model_shape(m);
    const struct moe_weights *moe = &m->w->layer[layer].moe;
    struct scratch *x = w->x;
    struct lane *lane = w->lane;
    int32_t id[17], begin, end;
    float weight[17];
    row_experts(m, lane->routing, id, weight);

    row_hidden(w, moe, id, in_q);
    cpu_pool_part(s->hidden / ROW_BLOCK, w->thread, w->threads, &begin, &end);
    begin *= ROW_BLOCK, end *= ROW_BLOCK;
    if (begin < end) k->fetch((struct ahead){expert_of(moe, id[0], s->experts).down, begin});
    cpu_pool_barrier(m->pool);

    size_t bytes = (size_t)(end - begin) * sizeof(float);
    memset(x->out + begin, 0, bytes);
    memset(x->shared + begin, 0, bytes);
    for (int32_t n = 0; n <= s->top_k && begin < end; n++) {
        struct ahead next = {0};
        if (n < s->top_k) {
            next = (struct ahead){expert_of(moe, id[n + 1], s->experts).down, begin};
        }
        struct qrows h = rows_from(&x->hidden_q, (size_t)n);
        float *sum = (n < s->top_k ? x->out : x->shared) + begin;
        k->matvec4(expert_of(moe, id[n], s->experts).down, begin, end, &h, lane->row, next);
        k->axpy(weight[n], lane->row, end - begin, sum);
    }
    add_columns(x->x, x->out, x->shared, begin, end);
}

/* ---- many rows ------------------------------------------------------------------------------- */

/* Group g of the hidden activations of pairs [b, e), which lie within one expert. */
static void hidden_group(struct worker *w, const struct expert *expert, int32_t g, int32_t b,
                         int32_t e) {
    const struct kernels *k = w->m->k;
    struct scratch *x = w->x;
    struct lane *lane = w->lane;
    struct qrows h = group_of(&x->hidden_q, g);
    for (int32_t p = b; p < e; p += TOKEN_BLOCK) {
        int32_t n = e - p < TOKEN_BLOCK ? e - p : TOKEN_BLOCK;
        const int32_t *rows = x->pair_row + p;
        k->matmul4(expert->gate, g * GROUP, (g + 1) * GROUP, &x->normed_q, rows, n, lane->gate,
                   GROUP);
        k->matmul4(expert->up, g * GROUP, (g + 1) * GROUP, &x->normed_q, rows, n, lane->up, GROUP);
        k->silu_mul(lane->gate, lane->up, n * GROUP, lane->gate);
        for (int32_t i = 0; i < n; i++) {
            k->quantise(lane->gate + (size_t)i * GROUP, GROUP, &h, (size_t)(p + i));
        }
    }
}

/* Work of reading an expert's group, in rows multiplied: unpacking costs about as much as five. */
enum { READ_COST = 5 };

/* Every thread takes a stretch of the (expert, group) pairs of about equal work. */
static void hidden_part(struct worker *w, const struct moe_weights *moe) {
    const struct shape *s = model_shape(w->m);
    const int32_t *begin = w->x->expert_begin;
    int64_t total = 0, done = 0;
    for (int pass = 0; pass < 2; pass++) {
        int64_t from = total * w->thread / w->threads, to = total * (w->thread + 1) / w->threads;
        for (int32_t e = 0; e <= s->experts; e++) {
            int32_t n = begin[e + 1] - begin[e];
            int32_t groups = (e < s->experts ? s->expert_width : s->shared_width) / GROUP;
            for (int32_t g = 0; n > 0 && g < groups; g++) {
                int64_t cost = n + READ_COST;
                if (pass == 0) {
                    total += cost;
                } else {
                    struct expert expert = expert_of(moe, e, s->experts);
                    if (done >= from && done < to) {
                        hidden_group(w, &expert, g, begin[e], begin[e + 1]);
                    }
                    done += cost;
                }
            }
        }
    }
}

/* Columns [b, e) of expert's output for its rows, weighted into sum [rows][H]. */
static void down_columns(struct worker *w, int32_t expert, const struct mat *down, int32_t b,
                         int32_t e, float *sum) {
    const struct kernels *k = w->m->k;
    const struct scratch *x = w->x;
    size_t hidden = (size_t)model_shape(w->m)->hidden;
    int32_t last = x->expert_begin[expert + 1];
    for (int32_t p = x->expert_begin[expert]; p < last; p += TOKEN_BLOCK) {
        int32_t n = last - p < TOKEN_BLOCK ? last - p : TOKEN_BLOCK;
        struct qrows h = rows_from(&x->hidden_q, (size_t)p);
        for (int32_t c = b; c < e; c += TILE) {
            int32_t width = e - c < TILE ? e - c : TILE;
            k->matmul4(down, c, c + width, &h, NULL, n, w->lane->gate, TILE);
            for (int32_t i = 0; i < n; i++) {
                k->axpy(x->pair_weight[p + i], w->lane->gate + (size_t)i * TILE, width,
                        sum + (size_t)x->pair_row[p + i] * hidden + c);
            }
        }
    }
}

void experts_rows(struct worker *w, int32_t layer) {
    const struct shape *s = model_shape(w->m);
    const struct moe_weights *moe = &w->m->w->layer[layer].moe;
    struct scratch *x = w->x;
    hidden_part(w, moe);
    cpu_pool_barrier(w->m->pool);

    int32_t b, e;
    cpu_pool_part(s->hidden / ROW_BLOCK, w->thread, w->threads, &b, &e);
    b *= ROW_BLOCK, e *= ROW_BLOCK;
    for (int32_t r = 0; r < x->rows; r++) {
        size_t at = (size_t)r * (size_t)s->hidden + (size_t)b, bytes = (size_t)(e - b) * 4;
        memset(x->out + at, 0, bytes);
        memset(x->shared + at, 0, bytes);
    }
    for (int32_t i = 0; i <= s->experts; i++) {
        struct expert expert = expert_of(moe, i, s->experts);
        down_columns(w, i, expert.down, b, e, i < s->experts ? x->out : x->shared);
    }
    for (int32_t r = 0; r < x->rows; r++) {
        size_t at = (size_t)r * (size_t)s->hidden;
        add_columns(x->x + at, x->out + at, x->shared + at, b, e);
    }
}

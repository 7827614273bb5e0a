#include "backend/metal/graph.h"

#include <stdlib.h>
#include <string.h>

enum { BINDINGS_EACH = 20, ACCESSES_EACH = 32, LISTED_EACH = 4, ARGS_EACH = 128 };

int graph_new(int32_t max_dispatches, int32_t buffers, struct graph **out, lily_err *err) {
    size_t n = (size_t)max_dispatches;
    struct graph *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g) return ERR_NOMEM(err, "graph");
    g->max_dispatches = max_dispatches;
    g->max_bindings = max_dispatches * BINDINGS_EACH;
    g->max_accesses = max_dispatches * ACCESSES_EACH;
    g->max_listed = max_dispatches * LISTED_EACH;
    g->max_args = (uint32_t)max_dispatches * ARGS_EACH;
    g->buffers = buffers;
    g->dispatch = calloc(n, sizeof *g->dispatch);
    g->binding = calloc(n * BINDINGS_EACH, sizeof *g->binding);
    g->access = calloc(n * ACCESSES_EACH, sizeof *g->access);
    g->older = calloc(n * ACCESSES_EACH, sizeof *g->older);
    g->listed = calloc(n * LISTED_EACH, sizeof *g->listed);
    g->args = calloc(n * ARGS_EACH, 1);
    g->buffer = calloc((size_t)buffers, sizeof *g->buffer);
    if (!g->dispatch || !g->binding || !g->access || !g->older || !g->listed || !g->args ||
        !g->buffer) {
        graph_free(g);
        return ERR_NOMEM(err, "graph");
    }
    for (int32_t i = 0; i < buffers; i++) g->buffer[i].class = GRAPH_SCRATCH;
    graph_clear(g);
    *out = g;
    return LILY_OK;
}

void graph_free(struct graph *g) {
    if (!g) return;
    free(g->dispatch);
    free(g->binding);
    free(g->access);
    free(g->older);
    free(g->listed);
    free(g->args);
    free(g->buffer);
    free(g);
}

void graph_set_class(struct graph *g, int32_t buffer, enum graph_class class) {
    g->buffer[buffer].class = class;
}

static void forget_uses(struct graph_buffer *b) {
    b->last_use = -1;
    b->written = false;
}

void graph_clear(struct graph *g) {
    g->dispatches = g->bindings = g->accesses = g->n_listed = g->barriers = 0;
    g->args_bytes = 0;
    g->floor = g->highest = 0;
    g->last_barrier = -1;
    g->mark = -1;
    g->open = false;
    g->broken = NULL;
    for (int32_t i = 0; i < g->buffers; i++) {
        forget_uses(&g->buffer[i]);
        g->buffer[i].seen = g->buffer[i].floor = 0;
        g->buffer[i].bound_at = -1;
    }
}

void graph_mark(struct graph *g, int32_t mark) {
    g->mark = mark;
}

static void spoil(struct graph *g, const char *why) {
    if (!g->broken) g->broken = why;
}

int graph_check(const struct graph *g, lily_err *err) {
    if (!g->broken && !g->open) return LILY_OK;
    return ERR(err, LILY_EBACKEND,
               "Metal graph: found %s at dispatch %d, expected a whole recording; this is a fault "
               "of the program, please report it",
               g->broken ? g->broken : "an open dispatch", g->dispatches);
}

/* ---- recording ------------------------------------------------------------------------------- */

void graph_begin(struct graph *g, int32_t kernel, const uint32_t groups[3],
                 const uint32_t threads[3]) {
    if (g->open) spoil(g, "a dispatch begun inside another");
    if (g->dispatches == g->max_dispatches) spoil(g, "too many dispatches");
    if (g->broken) return;
    struct graph_dispatch *d = &g->dispatch[g->dispatches];
    *d = (struct graph_dispatch){.kernel = kernel,
                                 .first_binding = g->bindings,
                                 .first_access = g->accesses,
                                 .first_barrier = g->n_listed,
                                 .mark = g->mark};
    memcpy(d->groups, groups, sizeof d->groups);
    memcpy(d->threads, threads, sizeof d->threads);
    for (int i = 0; i < 3; i++) {
        if (groups[i] == 0 || threads[i] == 0) spoil(g, "an empty grid");
    }
    g->open = true;
}

/* The dispatch being recorded, or NULL. */
static struct graph_dispatch *current(struct graph *g) {
    if (!g->open) spoil(g, "an argument outside a dispatch");
    return g->broken ? NULL : &g->dispatch[g->dispatches];
}

static void add_binding(struct graph *g, struct graph_dispatch *d, struct graph_binding b) {
    for (int32_t i = 0; i < d->bindings; i++) {
        if (g->binding[d->first_binding + i].index == b.index) spoil(g, "an index bound twice");
    }
    if (b.index < 0 || b.index >= GRAPH_BINDINGS) spoil(g, "an index above 30");
    if (g->bindings == g->max_bindings) spoil(g, "too many bindings");
    if (g->broken) return;
    g->binding[g->bindings++] = b;
    d->bindings++;
}

void graph_bind(struct graph *g, int32_t index, int32_t buffer, uint64_t offset) {
    struct graph_dispatch *d = current(g);
    if (!d) return;
    if (buffer < 0 || buffer >= g->buffers) {
        spoil(g, "an unknown buffer");
        return;
    }
    if (offset % 4) spoil(g, "an offset that is no multiple of 4");
    add_binding(g, d, (struct graph_binding){index, buffer, offset});
}

void graph_args(struct graph *g, int32_t index, const void *args, size_t bytes) {
    struct graph_dispatch *d = current(g);
    if (!d) return;
    if (d->args_bytes || bytes == 0 || bytes > GRAPH_MAX_ARGS) spoil(g, "a wrong argument block");
    if (bytes > g->max_args - g->args_bytes) spoil(g, "too many arguments");
    add_binding(g, d, (struct graph_binding){index, -1, 0});
    if (g->broken) return;
    d->args_at = g->args_bytes;
    d->args_bytes = (uint32_t)bytes;
    memcpy(g->args + d->args_at, args, bytes);
    g->args_bytes += (uint32_t)bytes;
}

static void add_access(struct graph *g, struct graph_access a) {
    struct graph_dispatch *d = current(g);
    if (!d || a.begin == a.end) return;
    if (a.buffer < 0 || a.buffer >= g->buffers) {
        spoil(g, "an unknown buffer");
    } else if (a.write && g->buffer[a.buffer].class == GRAPH_WEIGHTS) {
        spoil(g, "a write to weights");
    } else if (a.end < a.begin || a.bytes > a.end - a.begin) {
        spoil(g, "an empty range");
    } else if (g->accesses == g->max_accesses) {
        spoil(g, "too many accesses");
    }
    if (g->broken) return;
    g->access[g->accesses++] = a;
    d->accesses++;
}

void graph_read(struct graph *g, int32_t buffer, uint64_t begin, uint64_t bytes) {
    add_access(g, (struct graph_access){buffer, false, begin, begin + bytes, bytes});
}

void graph_read_some(struct graph *g, int32_t buffer, uint64_t begin, uint64_t extent,
                     uint64_t bytes) {
    add_access(g, (struct graph_access){buffer, false, begin, begin + extent, bytes});
}

void graph_write(struct graph *g, int32_t buffer, uint64_t begin, uint64_t bytes) {
    add_access(g, (struct graph_access){buffer, true, begin, begin + bytes, bytes});
}

void graph_write_some(struct graph *g, int32_t buffer, uint64_t begin, uint64_t extent,
                      uint64_t bytes) {
    add_access(g, (struct graph_access){buffer, true, begin, begin + extent, bytes});
}

/* ---- barriers -------------------------------------------------------------------------------- */

/* Whether an access touches what an earlier one, not yet covered by a barrier, wrote; or writes
 * what it touched. */
static bool conflicts(const struct graph *g, const struct graph_access *a) {
    const struct graph_buffer *b = &g->buffer[a->buffer];
    if (!a->write && !b->written) return false;
    for (int32_t i = b->last_use; i >= 0; i = g->older[i]) {
        const struct graph_access *e = &g->access[i];
        if ((a->write || e->write) && a->begin < e->end && e->begin < a->end) return true;
    }
    return false;
}

/* The buffers through which d conflicts with earlier dispatches, each once; returns how many, at
 * most GRAPH_BARRIER_LIST + 1. */
static int32_t conflicting(const struct graph *g, const struct graph_dispatch *d, int32_t *list) {
    int32_t n = 0;
    for (int32_t i = 0; i < d->accesses && n <= GRAPH_BARRIER_LIST; i++) {
        const struct graph_access *a = &g->access[d->first_access + i];
        bool known = false;
        for (int32_t j = 0; j < n && !known; j++) known = list[j] == a->buffer;
        if (!known && conflicts(g, a)) list[n++] = a->buffer;
    }
    return n;
}

static int32_t buffers_in_use(const struct graph *g) {
    int32_t n = 0;
    for (int32_t i = 0; i < g->buffers; i++) n += g->buffer[i].last_use >= 0;
    return n;
}

static void barrier_on_all(struct graph *g, struct graph_dispatch *d) {
    d->barrier = GRAPH_SCOPE;
    for (int32_t i = 0; i < g->buffers; i++) forget_uses(&g->buffer[i]);
    g->floor = g->highest;
}

static void barrier_on(struct graph *g, struct graph_dispatch *d, const int32_t *list, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        struct graph_buffer *b = &g->buffer[list[i]];
        forget_uses(b);
        b->floor = b->seen;
        g->listed[g->n_listed++] = list[i];
        d->barrier++;
    }
}

/* Whether the newest barrier can cover these buffers too: none was bound since, and there is room.
 * Its list is the last one in g->listed. */
static bool can_join(const struct graph *g, const int32_t *list, int32_t n) {
    if (g->last_barrier < 0) return false;
    const struct graph_dispatch *d = &g->dispatch[g->last_barrier];
    if (d->barrier == GRAPH_SCOPE || d->barrier + n > GRAPH_BARRIER_LIST) return false;
    for (int32_t i = 0; i < n; i++) {
        if (g->buffer[list[i]].bound_at >= g->last_barrier) return false;
    }
    return true;
}

/* When the conflicting buffers are all that are in use, or too many to list, the barrier covers
 * everything. */
static void place_barrier(struct graph *g, struct graph_dispatch *d) {
    int32_t list[GRAPH_BARRIER_LIST + 1], n = conflicting(g, d, list);
    bool room = n <= GRAPH_BARRIER_LIST && n <= g->max_listed - g->n_listed;
    if (n == 0) return;
    if (room && can_join(g, list, n)) {
        barrier_on(g, &g->dispatch[g->last_barrier], list, n);
        return;
    }
    g->barriers++;
    g->last_barrier = g->dispatches;
    d->first_barrier = g->n_listed;
    if (!room || (n > 1 && n == buffers_in_use(g))) {
        barrier_on_all(g, d);
    } else {
        barrier_on(g, d, list, n);
    }
}

static bool is_bound(const struct graph *g, const struct graph_dispatch *d, int32_t buffer) {
    for (int32_t i = 0; i < d->bindings; i++) {
        if (g->binding[d->first_binding + i].buffer == buffer) return true;
    }
    return false;
}

/* A barrier orders all users of a buffer, so a stage follows from what is bound, not from bytes. */
static void place_stage(struct graph *g, struct graph_dispatch *d) {
    int32_t below = g->floor;
    for (int32_t i = 0; i < d->bindings; i++) {
        int32_t buffer = g->binding[d->first_binding + i].buffer;
        if (buffer >= 0 && g->buffer[buffer].floor > below) below = g->buffer[buffer].floor;
    }
    d->stage = below + 1;
    if (d->stage > g->highest) g->highest = d->stage;
    for (int32_t i = 0; i < d->bindings; i++) {
        int32_t buffer = g->binding[d->first_binding + i].buffer;
        if (buffer < 0) continue;
        if (g->buffer[buffer].seen < d->stage) g->buffer[buffer].seen = d->stage;
        g->buffer[buffer].bound_at = g->dispatches;
    }
}

void graph_end(struct graph *g) {
    struct graph_dispatch *d = current(g);
    if (!d) return;
    place_barrier(g, d);
    place_stage(g, d);
    for (int32_t i = 0; i < d->accesses; i++) {
        int32_t at = d->first_access + i;
        const struct graph_access *a = &g->access[at];
        if (!is_bound(g, d, a->buffer)) spoil(g, "an access to a buffer that is not bound");
        struct graph_buffer *b = &g->buffer[a->buffer];
        if (b->class == GRAPH_WEIGHTS) continue; /* nothing writes them */
        g->older[at] = b->last_use;
        b->last_use = at;
        b->written = b->written || a->write;
    }
    g->dispatches++;
    g->open = false;
}

/* ---- counts ---------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
    const struct graph_access *x = a, *y = b;
    if (x->buffer != y->buffer) return x->buffer < y->buffer ? -1 : 1;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Bytes of the union of read ranges. Where data decide which bytes are read, two reads of the same
 * range are taken for the same bytes, and reads of different ranges for different ones. */
static void count_unique(const struct graph *g, struct graph_access *reads, size_t n,
                         struct graph_counts *out) {
    qsort(reads, n, sizeof *reads, by_place);
    int32_t buffer = -1;
    uint64_t end = 0;
    for (size_t i = 0; i < n; i++) {
        struct graph_access a = reads[i];
        enum graph_class class = g->buffer[a.buffer].class;
        if (a.buffer != buffer) {
            buffer = a.buffer;
            end = 0;
        }
        if (a.bytes < a.end - a.begin) {
            if (i == 0 || by_place(&reads[i - 1], &a) != 0) out->unique_read[class] += a.bytes;
            continue;
        }
        if (a.begin < end) a.begin = end;
        if (a.begin < a.end) {
            out->unique_read[class] += a.end - a.begin;
            end = a.end;
        }
    }
}

int graph_count(const struct graph *g, struct graph_counts *out, lily_err *err) {
    struct graph_access *reads = calloc((size_t)g->accesses + 1, sizeof *reads);
    if (!reads) return ERR_NOMEM(err, "Metal graph");
    *out = (struct graph_counts){
        .kernels = g->dispatches, .stages = g->highest, .barriers = g->barriers};
    size_t n = 0;
    for (int32_t i = 0; i < g->accesses; i++) {
        const struct graph_access *a = &g->access[i];
        if (a->write) {
            out->traffic_written += a->bytes;
        } else {
            out->traffic_read += a->bytes;
            reads[n++] = *a;
        }
    }
    count_unique(g, reads, n, out);
    free(reads);
    return LILY_OK;
}

/* A recorded dependency graph: the dispatches of one command buffer in order, the exact bytes each
 * may read and write, and the barriers that follow from them. Pure C without a device, so that a
 * step can be counted on any machine (`lily plan`) and tested on Linux; encode.c hands a graph to a
 * concurrent encoder.
 *
 * Two dispatches must be ordered when one of them writes a byte that the other touches. A barrier
 * stands before the later one only then, and lists only the buffers in question; everything else
 * overlaps. As Metal defines it, a barrier on a buffer orders all earlier uses of that buffer, so a
 * conflict is looked for among the uses since the last barrier that covered the buffer. A dispatch
 * whose conflicts all lie before the newest barrier adds its buffers to that one.
 *
 * Memory is taken once in graph_new. A recording that outgrows it, or names a buffer that is not
 * bound, marks the graph as broken: graph_check tells. */
#ifndef LILY_METAL_GRAPH_H
#define LILY_METAL_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum {
    GRAPH_BINDINGS = 31,     /* argument indices 0 to 30 */
    GRAPH_MAX_ARGS = 256,    /* bytes of one argument block */
    GRAPH_BARRIER_LIST = 16, /* buffers that a barrier lists at most; above: all buffers */
    GRAPH_SCOPE = -1         /* a barrier's count when it covers every buffer */
};

/* What a buffer holds, for the counts. */
enum graph_class {
    GRAPH_WEIGHTS, /* read only */
    GRAPH_STATE,   /* recurrent and convolution state of a session */
    GRAPH_KV,      /* keys and values of a session */
    GRAPH_SCRATCH, /* intermediates of a step */
    GRAPH_TOKENS,  /* token slots, results, logits, counts of the sampler */
    GRAPH_CLASSES
};

/* Bytes [begin, end) of a buffer that a dispatch may touch; `bytes` of them it really does (fewer
 * where data decide, as 8 of 256 experts). */
struct graph_access {
    int32_t buffer;
    bool write;
    uint64_t begin, end, bytes;
};

struct graph_binding {
    int32_t index;
    int32_t buffer;  /* -1: the argument block */
    uint64_t offset; /* bytes */
};

struct graph_dispatch {
    int32_t kernel;     /* row of the kernel table (kernels.h) */
    uint32_t groups[3]; /* threadgroups */
    uint32_t threads[3];
    int32_t first_binding, bindings; /* in graph.binding */
    int32_t first_access, accesses;  /* in graph.access */
    uint32_t args_at, args_bytes;    /* in graph.args; 0 bytes: none */
    int32_t first_barrier, barrier;  /* buffers of the barrier before it, in graph.listed: a count,
                                        0: no barrier, GRAPH_SCOPE: all buffers */
    int32_t stage;                   /* from 1: longest chain of ordered dispatches up to it */
    int32_t mark;                    /* the caller's, see graph_mark; -1: none */
};

struct graph_buffer { /* while recording: uses since the last barrier that covers the buffer */
    enum graph_class class;
    int32_t last_use;    /* in graph.access, -1: none; older ones by graph.older */
    bool written;        /* one of them is a write */
    int32_t bound_at;    /* the latest dispatch that binds it, -1: none */
    int32_t seen, floor; /* stages: of its latest user; below which no later user can be */
};

struct graph {
    struct graph_dispatch *dispatch;
    int32_t dispatches, max_dispatches;
    struct graph_binding *binding;
    int32_t bindings, max_bindings;
    struct graph_access *access;
    int32_t *older; /* [max_accesses] the use of the same buffer before this one, -1: none */
    int32_t accesses, max_accesses;
    uint8_t *args;
    uint32_t args_bytes, max_args;
    int32_t *listed;
    int32_t n_listed, max_listed;
    struct graph_buffer *buffer;
    int32_t buffers;
    int32_t floor, highest; /* stages */
    int32_t barriers;
    int32_t last_barrier; /* the dispatch after the newest one, -1: none */
    int32_t mark;
    bool open;          /* a dispatch is being recorded */
    const char *broken; /* why this recording cannot be used, NULL: it can */
};

struct graph_counts {
    int32_t kernels, stages, barriers;
    uint64_t unique_read[GRAPH_CLASSES]; /* bytes read by any dispatch, each counted once */
    uint64_t traffic_read;               /* bytes each dispatch reads, added up */
    uint64_t traffic_written;
};

/* Room for so many dispatches over buffers 0 .. buffers - 1, all of class GRAPH_SCRATCH. */
int graph_new(int32_t max_dispatches, int32_t buffers, struct graph **out, lily_err *err);
void graph_free(struct graph *g); /* NULL is fine */
void graph_set_class(struct graph *g, int32_t buffer, enum graph_class class);

/* Forgets all dispatches. */
void graph_clear(struct graph *g);

/* One dispatch: begin, then bindings, accesses and arguments in any order, then end. */
void graph_begin(struct graph *g, int32_t kernel, const uint32_t groups[3],
                 const uint32_t threads[3]);
void graph_bind(struct graph *g, int32_t index, int32_t buffer, uint64_t offset);
void graph_args(struct graph *g, int32_t index, const void *args, size_t bytes);
void graph_read(struct graph *g, int32_t buffer, uint64_t begin, uint64_t bytes);
/* `bytes` somewhere within [begin, begin + extent), known only when it runs. */
void graph_read_some(struct graph *g, int32_t buffer, uint64_t begin, uint64_t extent,
                     uint64_t bytes);
void graph_write(struct graph *g, int32_t buffer, uint64_t begin, uint64_t bytes);
void graph_write_some(struct graph *g, int32_t buffer, uint64_t begin, uint64_t extent,
                      uint64_t bytes);
void graph_end(struct graph *g);

/* Later dispatches carry this mark (which stage outputs exist once they have run: trace). */
void graph_mark(struct graph *g, int32_t mark);

/* LILY_EBACKEND with the reason when the recording is broken. */
int graph_check(const struct graph *g, lily_err *err);

int graph_count(const struct graph *g, struct graph_counts *out, lily_err *err);

#endif

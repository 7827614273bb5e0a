/* The Metal backend. Two halves:
 *
 *   recording, pure C, in every build of the program (`lily plan`)
 *     graph.c          dispatches, exact bytes, barriers, stages
 *     tensors.c        where each weight lies          layout.c   which buffers exist
 *     decode_graph.c   one token                       prefill_graph.c  one chunk of a prompt
 *     plan.c           what they cost                  pace.c     rows of a chunk, from its work
 *     kernels.c        the table of kernels            record.c   what the recorders share
 *   the device, where Metal is: the Objective-C runtime from C (objc.h, mtl.h)
 *     device.c         device, libraries, pipelines    source.c   their text
 *     buffers.c        memory, preflight               encode.c   a graph into an encoder
 *     command.c        command buffers, GPU errors     session.c  what a sequence remembers
 *     step.c           prefill and decode              trace.c    stage outputs, for tests
 *     metal.c          opening, statistics, the table  tensor.c   tensor operations, or why not
 *     pressure.c       memory of the machine
 *
 * kernels/ holds the .metal files and the headers they share with this C code.
 *
 * This header is what the second half shares. */
#ifndef LILY_METAL_METAL_H
#define LILY_METAL_METAL_H

#include "backend/backend.h"
#include "backend/metal/buffers.h"
#include "backend/metal/command.h"
#include "backend/metal/decode_graph.h"
#include "backend/metal/device.h"
#include "backend/metal/layout.h"
#include "backend/metal/pace.h"
#include "backend/metal/prefill_graph.h"
#include "backend/metal/pressure.h"

enum { METAL_FLIGHTS = 2, METAL_SLOTS = 8 };

/* A submitted step of one or more slots, which run one after another, METAL_SLOTS of them in a
 * command buffer: so that it stays bounded in time for any number of sessions. */
struct metal_flight {
    struct metal_command *command; /* [commands], room for all sessions' */
    int32_t commands;
    int32_t n;
    int32_t set; /* 0 or 1: which results and logits it writes */
    bool spoilt; /* it follows a step that ended with an error */
    struct metal_flight_slot {
        struct backend_session *session;
        float *logits; /* where wait copies them, NULL: nowhere */
        bool sampled;
        bool had_token; /* the session before */
    } * slot;           /* [sessions] */
};

struct backend_model {
    const struct weights *w; /* the caller's, outlives the model */
    struct backend_options options;
    struct metal_device device;
    struct metal_layout layout;
    struct metal_buffers buffers;
    struct graph *graph;                       /* recorded anew for each step */
    struct metal_flight flight[METAL_FLIGHTS]; /* oldest first */
    int32_t flights;
    bool failed;      /* a step ended with an error: the queue goes once nothing is in flight */
    int32_t next_set; /* of the next flight */
    struct metal_pace pace;
    int32_t sessions;                /* open */
    bool *taken;                     /* [options.max_sessions] session slots */
    struct metal_pressure *pressure; /* what the system says of its memory */
    struct metal_trace_state *trace; /* NULL: nobody traces */
    int32_t trace_mark;              /* of the dispatches whose results are being reported */
    uint64_t token_bytes;            /* weights and state that a token reads at depth 0 */
    bool tensor;                     /* tensor operations multiply, see tensor.h */
    bool tensor_attention;           /* and attend */
    char tensor_reason[192];         /* "off, because ..." */
    char name[128];                  /* device and how it is used, for people */
};

struct backend_session {
    struct backend_model *model;
    int32_t slot;         /* its number among the model's sessions */
    int32_t context;      /* most tokens */
    int32_t position;     /* tokens consumed, steps in flight included */
    int32_t kv_rows;      /* leading positions whose rows are held */
    int32_t parity;       /* of the buffers that hold its state */
    int32_t token_parity; /* of the token slots its last step sampled into */
    bool has_token;       /* that slot holds a token of the last step */
    bool can_rewind;
};

/* A saved state, in ordinary memory: the GPU's is the same. float [recurrent], then [convolution].
 */
struct backend_state {
    size_t bytes;
    uint8_t data[];
};

static inline struct metal_view session_view(const struct backend_session *s) {
    const struct metal_layout *l = &s->model->layout;
    return (struct metal_view){.first = l->first_session + s->slot * l->per_session,
                               .slot = s->slot,
                               .context = s->context,
                               .position = s->position,
                               .parity = s->parity,
                               .token_parity = s->token_parity};
}

/* The bytes of a session's buffer number k, for the CPU. Nothing that uses it is in flight. */
static inline void *session_bytes(const struct backend_session *s, int32_t k) {
    const struct metal_layout *l = &s->model->layout;
    return buffers_contents(&s->model->buffers, l->first_session + s->slot * l->per_session + k);
}

/* session.c, step.c: the backend's functions of the same names */
int metal_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                      lily_err *err);
void metal_session_free(struct backend_session *s);
int32_t metal_position(const struct backend_session *s);
void metal_reset(struct backend_session *s);
int metal_rewind(struct backend_session *s, lily_err *err);
int metal_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err);
size_t metal_state_bytes(const struct backend_model *m);
int metal_state_new(struct backend_model *m, struct backend_state **out, lily_err *err);
void metal_state_free(struct backend_state *state);
int metal_state_save(struct backend_session *s, struct backend_state *to, lily_err *err);
int metal_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                        lily_err *err);
int metal_state_export(const struct backend_state *from, void *out, lily_err *err);
int metal_state_import(struct backend_state *to, const void *in, lily_err *err);
size_t metal_kv_bytes(const struct backend_model *m, int32_t n);
int metal_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err);
int metal_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                    lily_err *err);

int metal_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err);
int metal_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                        lily_err *err);
int metal_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                      lily_err *err);
/* Waits for all steps in flight and drops their results. */
void metal_drain(struct backend_model *m);

/* trace.c: runs the recorded graph in pieces and reports the stages of each to the options' trace;
 * rows of the session from position on. NULL where nobody traces. */
int metal_trace_new(struct backend_model *m, lily_err *err);
void metal_trace_free(struct backend_model *m);
int metal_trace_run(struct backend_model *m, const struct metal_view *view, int32_t rows,
                    bool prefill, int32_t result_set, lily_err *err);

#endif

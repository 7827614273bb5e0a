/* The seam between engine and hardware: a step, not an op. Each backend orders and fuses its own
 * operations; the engine hands over tokens and gets logits or sampled tokens back.
 *
 * One model is opened once per process and shared by its sessions. Calls on one model are made by
 * one thread at a time (the engine's worker); a backend spreads each step over its own threads.
 * Nothing here allocates after session_new except where a function says so. */
#ifndef LILY_BACKEND_BACKEND_H
#define LILY_BACKEND_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/random.h"
#include "model/stages.h"
#include "model/weights.h"

struct backend_model;   /* weights as the device wants them, scratch memory, threads */
struct backend_session; /* one sequence: KV cache, recurrent and convolution state, position */
struct backend_state;   /* one saved state, in the memory the backend likes best (a GPU's own) */

/* Recurrent chunks and state checkpoints lie on this absolute grid of positions. */
enum { BACKEND_GRID = 64 };

struct backend_options {
    int32_t threads;      /* CPU threads, 0: as many as are worth it */
    int32_t max_sessions; /* sessions open at once */
    int32_t max_context;  /* tokens of the largest session */
    /* NULL, or ids that a device may sample: bit v % 32 of sampled[v / 32]; see backend_sampled.
     * Read during open only. */
    const uint32_t *sampled;
    /* Called by open now and then with bytes of weights moved and to move; nonzero cancels
     * (LILY_ECANCELED). May be NULL. */
    int (*progress)(void *arg, uint64_t done, uint64_t total);
    void *progress_arg;
    /* When set, receives every stage's output rows (tests; slow). layer is -1 outside layers. */
    void (*trace)(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                  int32_t n);
    void *trace_arg;
};

struct backend_probe {
    bool usable;
    char device[128]; /* "AMD EPYC, 2 threads, AVX-512 VNNI" */
    char reason[256]; /* why it is usable or not, for `lily doctor` */
};

/* A prefill call advances by one chunk (or less) so that the caller can cancel in between. */
struct prefill_step {
    const int32_t *ids; /* [n] tokens that follow the session's position */
    int32_t n;
    float *logits; /* NULL, or [V]: logits after the last token, written when the call reaches it */
    float *all_logits; /* NULL, or [n, V]: logits after every token of this call (evaluation) */
    int32_t done;      /* out: tokens consumed, 1..n */
};

/* What a device can sample by itself: the pipeline of engine/sampler.h without a logit bias, in
 * float32, over the ids of backend_sampled; ref/sample.c is its readable specification.
 * temperature 0 is argmax; otherwise 1 <= top_k <= BACKEND_TOP_K candidates are kept. */
enum { BACKEND_TOP_K = 64 };
struct backend_sampling {
    float temperature, top_p, min_p;
    float repetition, frequency, presence; /* 1, 0, 0: off */
    int32_t top_k;
    uint64_t stream; /* the pick's number in [0, 1): (random_at(stream, pick) >> 40) * 2^-24 */
};

/* One row of a decode step. Slots of one submit are distinct sessions. */
struct decode_slot {
    struct backend_session *session;
    int32_t token; /* to append; -1: the token this slot's previous step sampled on the device */
    float *logits; /* NULL, or [V] on the host: where decode_wait leaves this step's logits */
    const struct backend_sampling *sampling; /* NULL: the host samples; read during submit only */
    uint64_t pick;                           /* number of this pick in its sequence, from 0 */
};

struct decode_result {
    int32_t token; /* sampled on the device; -1 where the host samples from logits */
    /* false: the hidden state or a logit was NaN or infinite. The session's state is spoilt until
     * reset or state_restore; other slots are good. token is then not to be used, but some id below
     * vocab, so that a step submitted behind it reads no row that is not there. */
    bool finite;
};

/* What one step costs by the backend's own recording of it, without a device (`lily plan`). */
struct plan_query {
    int32_t layers;
    int32_t depth;    /* tokens already in the KV cache */
    int32_t tokens;   /* 1: a decoded token; more: a prompt chunk of so many */
    int32_t sessions; /* that decode in this step, each at that depth; 0: one */
};
struct backend_plan {
    int32_t kernels;  /* launches (CUDA: 1 for a persistent kernel) */
    int32_t stages;   /* sequential stages: launches or phases that wait for an earlier one */
    int32_t barriers; /* Metal: barriers encoded; CUDA: grid-wide synchronisations */
    int32_t command_buffers; /* submissions to the device */
    int32_t host_syncs;      /* times the host must wait for the device before going on */
    uint64_t weight_bytes;   /* unique bytes of weights read */
    uint64_t state_bytes;    /* unique bytes of recurrent and convolution state read */
    uint64_t kv_bytes;       /* unique bytes of KV rows read */
    uint64_t read_bytes;     /* all bytes read, repeats and intermediates included */
    uint64_t written_bytes;
};

enum backend_pressure { BACKEND_PRESSURE_NONE, BACKEND_PRESSURE_WARN, BACKEND_PRESSURE_CRITICAL };

struct backend_stats {
    uint64_t weight_bytes;  /* resident weights */
    uint64_t session_bytes; /* of one session at max_context */
    uint64_t scratch_bytes;
    uint64_t bytes_per_token;    /* weights and state read per decoded token at depth 0 */
    uint64_t kv_bytes_per_depth; /* read per decoded token for each token of depth */
    double bandwidth; /* bytes a second of the device's memory, as its driver tells; 0: unknown */
    char kernels[64]; /* which were chosen: "avx512-vnni"; shows what had to be left out */
    char device[128]; /* as this model uses it; empty: as probe tells it */
};

/* What a backend's self-test found out about one kernel, or about something else. */
enum selftest_status {
    SELFTEST_PASSED,
    SELFTEST_FAILED,
    SELFTEST_UNTESTED, /* it could not be reached, because something before it failed */
    SELFTEST_NOTE      /* nothing that can fail: memory, what is switched on and why */
};
struct selftest_item {
    const char *name; /* the kernel's function */
    enum selftest_status status;
    double error, limit; /* largest difference of a value, in units of its row's root mean square,
                            and what is allowed; limit 0: nothing was measured */
    char note[512];      /* where that was, or why */
};
struct selftest_args {
    const struct weights *w;         /* a few layers of the shape to test at */
    const struct backend *reference; /* what is right: it traces every stage of w */
    int32_t layers, context;         /* the whole model, for the note on memory */
    /* Called for each item in order, during the call only. */
    void (*item)(void *arg, const struct selftest_item *item);
    /* Called now and then with steps done and to do; nonzero cancels (LILY_ECANCELED). May be
     * NULL. */
    int (*progress)(void *arg, uint64_t done, uint64_t total);
    void *arg; /* of both */
};

struct backend {
    const char *name; /* "ref", "cpu", "cuda", "metal" */

    void (*probe)(struct backend_probe *out);

    /* w outlives the model. A memory preflight refuses with need, limit and remedy. */
    int (*open)(const struct weights *w, const struct backend_options *options,
                struct backend_model **out, lily_err *err);
    void (*close)(struct backend_model *m);

    /* A session of at most context tokens, at position 0. Allocates all it will ever need. */
    int (*session_new)(struct backend_model *m, int32_t context, struct backend_session **out,
                       lily_err *err);
    void (*session_free)(struct backend_session *s);
    /* Tokens consumed so far, those of steps in flight included. */
    int32_t (*position)(const struct backend_session *s);
    void (*reset)(struct backend_session *s); /* back to position 0, state zeroed */

    /* After an error the session has read an unknown part of the chunk: reset or restore it. */
    int (*prefill)(struct backend_session *s, struct prefill_step *step, lily_err *err);

    /* Steps in flight: one, or up to two where sample_begin is not NULL. A submit that fails leaves
     * those in flight as they are, and positions where they were (tokens may have been counted:
     * sample_begin starts over). wait ends the oldest, also when it fails; n is that step's. While
     * one is in flight no other function of this table is called for its sessions but submit, wait
     * and position. */
    int (*decode_submit)(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                         lily_err *err);
    int (*decode_wait)(struct backend_model *m, struct decode_result *results, int32_t n,
                       lily_err *err);

    /* Forgets the counts behind the penalties and counts the prompt as seen (repetition; NULL with
     * n 0: none matters). From then on each decode step with sampling counts its input token as
     * output before it picks. NULL where the backend samples nothing itself: then slots have
     * tokens and no sampling. */
    int (*sample_begin)(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err);

    /* Takes back the newest decoded token (a stop was found one step late): position, recurrent and
     * convolution state are those before its submit. Only right after a decode step of this
     * session, once. Counts are not taken back: the answer has ended. NULL where sample_begin is.
     */
    int (*rewind)(struct backend_session *s, lily_err *err);

    /* Recurrent and convolution state at the current position: the part that cannot be truncated.
     * state_new allocates all that a state needs; states are freed before their model. restore sets
     * the position to pos, at most the tokens whose KV the session holds (a token read gives up the
     * rows behind it); from is a saved or imported state. export and import copy state_bytes in a
     * layout of the backend's own. */
    size_t (*state_bytes)(const struct backend_model *m);
    int (*state_new)(struct backend_model *m, struct backend_state **out, lily_err *err);
    void (*state_free)(struct backend_state *state); /* NULL is fine */
    int (*state_save)(struct backend_session *s, struct backend_state *to, lily_err *err);
    int (*state_restore)(struct backend_session *s, const struct backend_state *from, int32_t pos,
                         lily_err *err);
    int (*state_export)(const struct backend_state *from, void *out, lily_err *err);
    int (*state_import)(struct backend_state *to, const void *in, lily_err *err);

    /* KV rows of positions [from, from + n), in a layout of the backend's own. */
    size_t (*kv_bytes)(const struct backend_model *m, int32_t n);
    int (*kv_export)(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err);
    int (*kv_import)(struct backend_session *s, int32_t from, int32_t n, const void *in,
                     lily_err *err);

    void (*stats)(const struct backend_model *m, struct backend_stats *out);

    /* How short of memory the system says it is, asked between steps. Saved states go to disk then,
     * weights never. NULL: the backend does not know. */
    enum backend_pressure (*pressure)(const struct backend_model *m);

    /* NULL where a backend records no plan. */
    int (*plan)(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
                lily_err *err);

    /* Runs every kernel at the shape of args->w and compares (`lily doctor`). An error only when
     * that could not be done; what fails is told by items. NULL where a backend has none. */
    int (*selftest)(const struct selftest_args *args, lily_err *err);
};

/* The checks that every backend makes, in one wording (check.c). Before a session is made, of which
 * there are `sessions`; */
int backend_check_session(const struct backend_options *options, int32_t context, int32_t sessions,
                          lily_err *err);
/* before a token is read at a position; */
int backend_check_token(const struct shape *shape, int32_t token, lily_err *err);
int backend_check_room(int32_t position, int32_t context, lily_err *err);
/* and before states and rows are moved. kv_rows: rows the session holds; context: rows it has room
 * for. */
int backend_check_restore(int32_t pos, int32_t kv_rows, lily_err *err);
int backend_check_export(int32_t from, int32_t n, int32_t kv_rows, lily_err *err);
/* Rows are imported in ascending order: from is at most the number of rows already held. */
int backend_check_import(int32_t from, int32_t n, int32_t kv_rows, int32_t context, lily_err *err);
/* The ids that may be sampled, bit v % 32 of out[v / 32] for v up to vocab: those of the options
 * that are below weights.vocab_used; without options all of these. out has (vocab + 31) / 32. */
void backend_sampled(const struct weights *w, const struct backend_options *options, uint32_t *out);
/* What a device samples, see struct backend_sampling. */
int backend_check_sampling(const struct backend_sampling *sampling, lily_err *err);

extern const struct backend backend_ref;
extern const struct backend backend_cpu;
extern const struct backend backend_metal; /* where LILY_METAL is defined: macOS */
extern const struct backend backend_cuda;  /* where LILY_CUDA is defined: Linux */

/* All backends of this build in order of preference (metal, cuda, cpu), ended by NULL; ref comes
 * last. */
extern const struct backend *const backend_all[];

/* Plans that are recorded on every system, also where backend_all lacks the backend, ended by a
 * NULL name. A backend of backend_all with a plan of its own need not be listed. */
struct backend_planner {
    const char *name;
    int (*plan)(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
                lily_err *err);
};
extern const struct backend_planner backend_plans[];

#endif

/* The CPU backend: the default that runs anywhere. One file per stage, in a token's order:
 *
 *   decode.c     one token: matrix-vector products, every thread on its rows
 *   prefill.c    many rows: matrix-matrix products, experts grouped by routing
 *   norm.c       RMS norms and the quantisation of what enters a product
 *   project.c    products of several matrices, split over the threads
 *   rope.c       rotary positions
 *   attention.c  gated full attention over the KV cache
 *   deltanet.c   convolution, gates, delta rule, gated norm
 *   router.c     scores, the top-8 and their weights, rows grouped by expert
 *   experts.c    routed and shared experts
 *   head.c       embedding rows and logits
 *   cpu.c        opening a model, memory, statistics, the table
 *   session.c    what a sequence remembers
 *   pool.c       threads          kernels/   the inner loops per instruction set
 *
 * Both paths share the kernels' arithmetic, so a row's values depend on its own content and
 * position alone: not on the cut of a prompt, the batch, the path or the number of threads.
 *
 * A step runs as one function on all threads (struct worker); where a stage reads what other
 * threads wrote, a barrier stands before it. Functions that take a worker are called by all
 * threads. */
#ifndef LILY_CPU_CPU_H
#define LILY_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/kernels/kernels.h"
#include "backend/cpu/pool.h"

enum {
    CHUNK = 512,    /* rows of one prefill step */
    TILE = 64,      /* output rows that the expert and head loops take at once */
    QUERY_TILE = 16 /* rows whose attention shares a pass over a span */
};

/* Rows of one session in a step: row first + i holds the token at position pos + i. */
struct run {
    struct backend_session *session;
    int32_t pos;
    int32_t first;
    int32_t n;
};

/* Each thread's own memory. */
struct lane {
    float *normed;          /* [H] decode: every thread norms the row for itself */
    struct qrows normed_q;  /* one row of H */
    float *routing;         /* [2 * top_k] decode: the row's experts and their weights */
    float *scores;          /* [KV_GROUP][SPAN] */
    float *queries;         /* [KV_GROUP][HEAD] scaled */
    struct attend *partial; /* of one span */
    struct attend *running; /* [QUERY_TILE] */
    float *gate, *up;       /* [TOKEN_BLOCK][TILE] */
    float *tail;            /* [3][conv channels of a key head and its value heads] */
    float *row;             /* [H] one product */
    bool finite;            /* no NaN or infinity seen in this step's outputs */
};

/* Shared memory of a step of R = rows rows. */
struct scratch {
    float *x;       /* [R][H] residual stream */
    float *normed;  /* [R][H] */
    float *rope;    /* [R][rotary_dim] cosines, then sines */
    float *proj;    /* [R][proj_width] projections of a mixer, see attention.c and deltanet.c */
    float *mix;     /* [R][mix_width] the mixer's result before its output projection */
    float *out;     /* [R][H] output of the mixer, then of the routed experts */
    float *shared;  /* [R][H] output of the shared expert */
    float *scores;  /* [R][E + 1] router scores, then the shared expert's gate */
    float *routing; /* [R][2 * top_k] ids in descending order of weight, then weights */
    struct qrows normed_q; /* R rows of H */
    struct qrows mix_q;    /* R rows of mix_width */
    struct qrows hidden_q; /* R * (top_k + 1) rows of the experts' width */
    int32_t *expert_begin; /* [E + 2] pairs of expert e: [begin[e], begin[e + 1]); E: shared */
    int32_t *pair_row;     /* [R * (top_k + 1)] */
    float *pair_weight;    /* [R * (top_k + 1)] */
    struct attend *spans;  /* [kv_heads][spans] decode */
    float **logits;        /* [R] where each row's logits go; NULL: not wanted */
    int32_t *wanted;       /* [R] rows with logits, n_wanted of them */
    int32_t n_wanted;
    struct run *runs; /* [R] */
    int32_t n_runs;
    int32_t rows;      /* of this step */
    int32_t *pos;      /* [rows] their positions */
    int32_t *ids;      /* [rows] tokens */
    bool *finite;      /* [max_sessions] decode: whether each slot's outputs are */
    struct lane *lane; /* [threads] */
};

struct backend_model {
    const struct weights *w; /* the caller's, outlives the model */
    struct backend_options options;
    const struct kernels *k;
    char device[128]; /* processor, threads and kernels, for people */
    struct cpu_pool *pool;
    int32_t attention_layers, gdn_layers;
    int32_t sessions;   /* open now */
    int32_t rows;       /* R: most rows of a step */
    int32_t proj_width; /* floats of a row of scratch.proj */
    int32_t mix_width;
    int32_t spans;     /* of the largest context */
    float *inv_freq;   /* [rotary_dim / 2] */
    float *taps;       /* [gdn_layers][CONV_TAPS][conv_dim] */
    float *decay_rate; /* [gdn_layers][gdn_v_heads] exp(a_log) */
    struct scratch x;
    void *block; /* all of the above */
    size_t block_bytes;
    int32_t pending; /* slots submitted, not yet waited for */
};

/* Everything a sequence remembers, in one block. */
struct backend_session {
    struct backend_model *model;
    int32_t context;  /* most tokens */
    int32_t capacity; /* positions with room in keys and values, whole blocks */
    int32_t position; /* tokens consumed */
    int32_t kv_rows;  /* leading positions whose KV rows are held, at least position */
    uint16_t *keys;   /* bf16 [attention_layers][kv_heads][capacity / 16][HEAD][16] */
    uint16_t *values; /* bf16 [attention_layers][kv_heads][capacity / 64][HEAD / 32][64][32] */
    float *state;     /* [gdn_layers][gdn_v_heads][2][STATE][STATE_HALF] */
    float *conv;      /* [gdn_layers][3][conv_dim] last inputs of the convolution, oldest first */
    void *block;
    size_t block_bytes;
};

/* A saved state: [gdn_layers][gdn_v_heads][2][STATE][STATE_HALF] recurrent, then [gdn_layers][3]
 * [conv_dim], float32. Its pages are taken when the first state is saved to it. */
struct backend_state {
    size_t bytes;
    float *data; /* [bytes / 4] */
};

struct worker {
    struct backend_model *m;
    struct scratch *x;
    struct lane *lane;
    int32_t thread, threads;
};

static inline const struct shape *model_shape(const struct backend_model *m) {
    return m->w->shape;
}

/* Opens with one kernel table instead of the best (tests); otherwise the backend's open. */
int cpu_open_with(const struct kernels *k, const struct weights *w,
                  const struct backend_options *options, struct backend_model **out, lily_err *err);

/* prefill.c: the backend's functions of the same names */
int cpu_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err);
int cpu_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                      lily_err *err);
int cpu_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                    lily_err *err);
void prefill_rows(void *model, int32_t thread, int32_t threads);
/* decode.c: the same step for exactly one row. */
void decode_row(void *model, int32_t thread, int32_t threads);

/* When the engine traces: waits for all threads, reports n floats of each row, and lets them go on;
 * otherwise nothing. row r lies at data + r * ld. */
void trace_rows(struct worker *w, enum stage stage, int32_t layer, const float *data, size_t ld,
                int32_t n);

/* session.c: the backend's functions of the same names */
int cpu_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                    lily_err *err);
void cpu_session_free(struct backend_session *s);
int32_t cpu_position(const struct backend_session *s);
void cpu_reset(struct backend_session *s);
size_t cpu_session_bytes(const struct backend_model *m, int32_t context);
size_t cpu_state_bytes(const struct backend_model *m);
int cpu_state_new(struct backend_model *m, struct backend_state **out, lily_err *err);
void cpu_state_free(struct backend_state *state);
int cpu_state_save(struct backend_session *s, struct backend_state *to, lily_err *err);
int cpu_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                      lily_err *err);
int cpu_state_export(const struct backend_state *from, void *out, lily_err *err);
int cpu_state_import(struct backend_state *to, const void *in, lily_err *err);
size_t cpu_kv_bytes(const struct backend_model *m, int32_t n);
int cpu_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err);
int cpu_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                  lily_err *err);
/* First block of keys and values of a head in the n-th attention layer. */
uint16_t *session_keys(const struct backend_session *s, int32_t n, int32_t kv_head);
uint16_t *session_values(const struct backend_session *s, int32_t n, int32_t kv_head);
/* Places of one position inside those blocks: key element d at [d * KEY_BLOCK], value element d at
 * [d / VALUE_LANE * VALUE_BLOCK * VALUE_LANE + d % VALUE_LANE]. */
static inline size_t key_at(int32_t pos) {
    return (size_t)(pos / KEY_BLOCK) * KEY_BLOCK * HEAD + (size_t)(pos % KEY_BLOCK);
}
static inline size_t value_at(int32_t pos) {
    return (size_t)(pos / VALUE_BLOCK) * VALUE_BLOCK * HEAD +
           (size_t)(pos % VALUE_BLOCK) * VALUE_LANE;
}

/* ---- stages ---------------------------------------------------------------------------------- */

/* One output of a projection: rows of mat go to out, row t at out + t * ldo. */
struct product {
    const struct mat *mat;
    float *out;
};

/* project.c: this thread's rows of the output of several 4-bit matrices that share an input, as if
 * they were one tall matrix. No barrier. */
void project(struct worker *w, const struct product *products, int32_t count,
             const struct qrows *in, int32_t rows, size_t ldo);
/* Decode: asks memory for the first rows of this thread's part of such a product, or of the first
 * product of a layer (number `layers`: of the head), before a barrier that would let memory rest.
 */
void project_fetch(struct worker *w, const struct mat *const *mats, int32_t count);
void layer_fetch(struct worker *w, int32_t layer);
/* The same for the small matrices that take float inputs [rows][ldx]. */
void project_float(struct worker *w, const struct product *products, int32_t count, const float *in,
                   size_t ldx, int32_t rows, size_t ldo);

/* norm.c. Decode: the row, into this thread's own lane. Prefill: row r, into the shared rows. */
void norm_own(struct worker *w, const float *weight);
void norm_row(struct worker *w, const float *weight, int32_t r);

/* rope.c */
void rope_frequencies(const struct shape *s, float *inv_freq);
void rope_angles(const float *inv_freq, int32_t pos, int32_t half, float *out); /* [2 * half] */
void rope_turn(float *head, const float *angles, int32_t half);

/* Mixers: normed rows in (float and quantised), scratch.out complete after the last barrier; the
 * caller adds it to the residual stream. */
void attention(struct worker *w, int32_t layer, const struct qrows *in);
void deltanet(struct worker *w, int32_t layer, const float *in, size_t ldx,
              const struct qrows *in_q);

/* router.c: scores[E] -> routing[2 * top_k] */
void router_choose(const float *scores, int32_t experts, int32_t top_k, float *routing);
/* Groups the rows of the step by expert (one thread calls it). */
void router_group(struct backend_model *m);

/* experts.c: one row, or all rows of the step. in_q: the normed rows. They add the experts' sum to
 * the residual stream; a barrier must follow. */
void experts_row(struct worker *w, int32_t layer, const struct qrows *in_q);
void experts_rows(struct worker *w, int32_t layer);

/* head.c */
void embed_row(const struct backend_model *m, int32_t token, float *x);
/* Logits of the wanted rows; notes whether they are finite. */
void head(struct worker *w);

#endif

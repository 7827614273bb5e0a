/* The model in plain C, float32, one token at a time: the readable specification that every other
 * backend is held against. One file per concept, in the order a token meets them:
 *
 *   ref.c        the step: embedding, layers, head; prefill and decode are loops over it
 *   norm.c       RMS norm, L2 norm, softmax
 *   rope.c       rotary positions
 *   attention.c  gated full attention with grouped keys and values (every fourth layer)
 *   deltanet.c   Gated DeltaNet: convolution, gates, delta rule (the other layers)
 *   moe.c        router, routed experts, shared expert (every layer)
 *   head.c       embedding row and logits
 *   sample.c     the next token from the logits, as a device picks it
 *   open.c       opening a model, memory, statistics
 *   session.c    what a sequence remembers: KV rows, recurrent and convolution state
 *
 * One thread, no tricks. Because every token takes the same path whether it came from a prompt or
 * from decoding, any cut of a prompt gives bit-identical results. */
#ifndef LILY_BACKEND_REF_REF_H
#define LILY_BACKEND_REF_REF_H

#include <math.h>

#include "backend/backend.h"

enum { REF_FLIGHTS = 2 }; /* steps in flight */

/* One token's activations. All arrays lie in one block owned by the model. */
struct ref_scratch {
    float *h;      /* [H] residual stream */
    float *normed; /* [H] input of mixer, experts or head */
    float *mixed;  /* [H] output of the mixer or of the experts */
    /* full attention */
    float *rope_cos;   /* [rotary_dim / 2] of this position */
    float *rope_sin;   /* [rotary_dim / 2] */
    float *query_gate; /* [q_heads][2][head_dim] projection: query, then gate, per head */
    float *query;      /* [q_heads][head_dim] */
    float *mix;        /* [q_heads][head_dim] */
    float *scores;     /* [max_context] of one head */
    /* Gated DeltaNet */
    float *channels; /* [conv_dim] projection, then replaced by the convolution's output */
    float *gates;    /* [2][gdn_v_heads] beta, then exp(g) */
    float *z;        /* [gdn_v_heads][128] */
    float *delta;    /* [gdn_v_heads][128] */
    /* experts */
    float *probs;   /* [E] */
    float *routing; /* [2][top_k] chosen ids, then their weights */
    float *inner;   /* [2][max(I, shared_width)] gate and up of one expert */
    float *expert;  /* [H] output of one expert */
    float *shared;  /* [H] */
    /* sampling */
    float *logits;    /* [V] of a step whose logits the host does not want */
    float *penalised; /* [V] */
};

/* A step that ran when it was submitted and whose results wait to be handed over. */
struct ref_flight {
    struct decode_result *results; /* [max_sessions] of which [n] are used */
    int32_t n;
};

struct backend_model {
    const struct weights *w; /* the caller's, outlives the model */
    struct backend_options options;
    int32_t attention_layers;
    int32_t gdn_layers;
    int32_t sessions; /* open now */
    struct ref_flight
        flight[REF_FLIGHTS]; /* [flights] submitted, not yet waited for, oldest first */
    int32_t flights;
    float *inv_freq;   /* [rotary_dim / 2] */
    uint32_t *sampled; /* [(V + 31) / 32] bits of the ids that may be sampled */
    struct ref_scratch x;
    float *block; /* all of x, and inv_freq */
    size_t block_bytes;
};

/* Everything a sequence remembers. The KV rows are per position and can be cut off anywhere; the
 * recurrent and convolution state hold the whole past in a fixed size and cannot. */
struct backend_session {
    struct backend_model *model;
    int32_t context;  /* most tokens it can hold */
    int32_t position; /* tokens consumed */
    int32_t kv_rows;  /* leading positions whose KV rows are held, at least position */
    float *keys;      /* [attention_layers][context][kv_dim] after norm and RoPE */
    float *values;    /* [attention_layers][context][kv_dim] */
    float *state;     /* [gdn_layers][gdn_v_heads][128 key][128 value] */
    float *conv;      /* [gdn_layers][3][conv_dim] last inputs of the convolution, oldest first */
    float *before;    /* state and conv before the last decoded token */
    bool can_rewind;  /* the last change was a decoded token */
    int32_t *counts;  /* [V] 0: not seen, 1: in the prompt only, 1 + n: n times as output */
    int32_t sampled;  /* by the last step; -1: it sampled nothing */
};

/* A saved state in ordinary memory. */
struct backend_state {
    size_t bytes;
    float data[]; /* state, then conv */
};

/* open.c: the backend's functions of the same names */
int ref_open(const struct weights *w, const struct backend_options *options,
             struct backend_model **out, lily_err *err);
void ref_close(struct backend_model *m);
void ref_probe(struct backend_probe *out);
void ref_stats(const struct backend_model *m, struct backend_stats *out);

/* norm.c: y[n] = x / sqrt(mean(x^2) + eps) * weight[n]; y may be x. */
void ref_rms_norm(const float *x, const float *weight, float *y, int32_t n, float eps);
/* x[n] <- x / sqrt(sum(x^2) + 1e-6) * factor */
void ref_l2_norm(float *x, int32_t n, float factor);
/* x[n] <- exp(x) / sum(exp(x)) */
void ref_softmax(float *x, int32_t n);

/* rope.c */
void ref_rope_frequencies(const struct shape *s, float *inv_freq);
void ref_rope_angles(const float *inv_freq, int32_t pos, int32_t half, float *cosines,
                     float *sines);
void ref_rope(float *head, const float *cosines, const float *sines, int32_t half);

/* Mixers and experts: in[H] -> out[H] for the token at s->position. They move the session's state
 * and KV rows of that layer forward. */
void ref_attention(struct backend_session *s, int32_t layer, const float *in, float *out);
void ref_deltanet(struct backend_session *s, int32_t layer, const float *in, float *out);
void ref_moe(struct backend_session *s, int32_t layer, const float *in, float *out);

/* deltanet.c, exported for its test. One value head and one token: state[128][128], q, k, v and out
 * of width n. */
void ref_delta_rule(float *state, const float *q, const float *k, const float *v, float beta,
                    float decay, float *out, int32_t n);

/* moe.c, exported for its test: the top_k largest of softmax(scores[experts]) with ties to the
 * lower index. routing[2][top_k]: ids in descending order of weight, then weights that sum to 1.
 * scores become probabilities. */
void ref_route(float *scores, int32_t experts, int32_t top_k, float *routing);

/* head.c */
void ref_embed(const struct weights *w, int32_t token, float *h);
void ref_logits(const struct weights *w, const float *normed, float *logits);
bool ref_finite(const float *x, int32_t n);

/* sample.c: the token that pick number pick takes from logits[n], all finite, after counts[n] of
 * the sequence so far. Of the bits sampled at least one is set; x[n] is scratch. */
int32_t ref_sample(const struct backend_sampling *p, uint64_t pick, const float *logits,
                   const int32_t *counts, const uint32_t *sampled, int32_t n, float *x);

/* session.c: the backend's functions of the same names */
int ref_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                    lily_err *err);
void ref_session_free(struct backend_session *s);
int32_t ref_position(const struct backend_session *s);
void ref_reset(struct backend_session *s);
size_t ref_state_bytes(const struct backend_model *m);
int ref_state_new(struct backend_model *m, struct backend_state **out, lily_err *err);
void ref_state_free(struct backend_state *state);
int ref_state_save(struct backend_session *s, struct backend_state *to, lily_err *err);
int ref_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                      lily_err *err);
int ref_state_export(const struct backend_state *from, void *out, lily_err *err);
int ref_state_import(struct backend_state *to, const void *in, lily_err *err);
int ref_rewind(struct backend_session *s, lily_err *err);
int ref_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err);
size_t ref_kv_bytes(const struct backend_model *m, int32_t n);
int ref_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err);
int ref_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                  lily_err *err);

/* Reports a stage's output row to the test that asked for it. */
static inline void ref_trace(const struct backend_session *s, enum stage stage, int32_t layer,
                             const float *row, int32_t n) {
    const struct backend_options *o = &s->model->options;
    if (o->trace) o->trace(o->trace_arg, stage, layer, s->position, row, n);
}

static inline float ref_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}
static inline float ref_silu(float x) {
    return x * ref_sigmoid(x);
}
/* log(1 + e^x); equal to x in float32 from 20 on, where e^x need not be computed. */
static inline float ref_softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

#endif

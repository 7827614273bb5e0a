/* Which buffers exist and how large they are: everything a graph can name, without a device. One
 * buffer number names one MTLBuffer. All are made when the model is opened, those of a session when
 * it is; nothing is allocated in a step.
 *
 *   fixed       small float32 weights, scratch of a step, token slots, results (METAL_BUFFER_MAP)
 *   sessions    of each: counts, two of each kind of state, keys and values of attention layers
 *   windows     the quantised weights (tensors.h)
 *
 * There is no buffer for dequantised weights. */
#ifndef LILY_METAL_LAYOUT_H
#define LILY_METAL_LAYOUT_H

#include "backend/metal/graph.h"
#include "backend/metal/tensors.h"

/* name, label, class, bytes. s: the shape; R rows of a prompt chunk, B blocks of partial attention,
 * N sessions, all uint64_t. */
#define METAL_BUFFER_MAP(XX)                                                                       \
    XX(METAL_SMALL, "small weights", GRAPH_WEIGHTS, t->small_bytes)                                \
    XX(METAL_MASK, "mask", GRAPH_WEIGHTS, (V + 31) / 32 * 4)                                       \
    /* decode: one token */                                                                        \
    XX(METAL_H, "h", GRAPH_SCRATCH, 4 * H)                                                         \
    XX(METAL_GDN_PROJ, "gdn proj", GRAPH_SCRATCH, 4 * (CD + VD + 2 * VH))                          \
    XX(METAL_GATED, "gated", GRAPH_SCRATCH, 4 * VD)                                                \
    XX(METAL_SQUARES, "squares", GRAPH_SCRATCH, 16 * VH)                                           \
    XX(METAL_QKV, "qkv", GRAPH_SCRATCH, 8 * (QD + KV))                                             \
    XX(METAL_PARTIAL, "partial", GRAPH_SCRATCH, 4 * B * QD)                                        \
    XX(METAL_STATS, "stats", GRAPH_SCRATCH, 8 * B * QH)                                            \
    XX(METAL_MERGED, "merged", GRAPH_SCRATCH, 4 * QD)                                              \
    XX(METAL_MERGED_STATS, "merged stats", GRAPH_SCRATCH, 8 * QH)                                  \
    XX(METAL_X, "x", GRAPH_SCRATCH, 4 * H)                                                         \
    XX(METAL_ROUTER_LOGITS, "router logits", GRAPH_SCRATCH, 4 * (E + 1))                           \
    XX(METAL_SHARED, "shared", GRAPH_SCRATCH, 4 * W)                                               \
    XX(METAL_INNER, "inner", GRAPH_SCRATCH, 4 * K * I)                                             \
    XX(METAL_BEST, "best", GRAPH_SCRATCH, 4 * ((V + 127) / 128))                                   \
    /* a step's slots: two token slots by the session's parity, results by the step's */           \
    XX(METAL_TOKEN_0, "token slots 0", GRAPH_TOKENS, METAL_SLOT *N)                                \
    XX(METAL_TOKEN_1, "token slots 1", GRAPH_TOKENS, METAL_SLOT *N)                                \
    XX(METAL_RESULT_0, "results 0", GRAPH_TOKENS, METAL_SLOT *N)                                   \
    XX(METAL_RESULT_1, "results 1", GRAPH_TOKENS, METAL_SLOT *N)                                   \
    XX(METAL_LOGITS_0, "logits 0", GRAPH_TOKENS, 4 * V * N)                                        \
    XX(METAL_LOGITS_1, "logits 1", GRAPH_TOKENS, 4 * V * N)                                        \
    /* prefill: a chunk of R rows */                                                               \
    XX(METAL_P_IDS, "chunk ids", GRAPH_TOKENS, 4 * R)                                              \
    XX(METAL_P_H, "chunk h", GRAPH_SCRATCH, 4 * R * H)                                             \
    XX(METAL_P_X, "chunk x", GRAPH_SCRATCH, 2 * R * H)                                             \
    XX(METAL_P_R, "chunk r", GRAPH_SCRATCH, 4 * R)                                                 \
    XX(METAL_P_QKV, "chunk qkv", GRAPH_SCRATCH, 4 * R * (CD > 2 * QD ? CD : 2 * QD))               \
    XX(METAL_P_Z, "chunk z", GRAPH_SCRATCH, 4 * R * VD)                                            \
    XX(METAL_P_B, "chunk b", GRAPH_SCRATCH, 4 * R * (KV > VH ? KV : VH))                           \
    XX(METAL_P_A, "chunk a", GRAPH_SCRATCH, 4 * R * (KV > VH ? KV : VH))                           \
    XX(METAL_P_CHANNELS, "chunk channels", GRAPH_SCRATCH, 4 * R * CD)                              \
    XX(METAL_P_GATES, "chunk gates", GRAPH_SCRATCH, 8 * R * VH)                                    \
    XX(METAL_P_DELTA, "chunk delta", GRAPH_SCRATCH, 4 * R * VD)                                    \
    XX(METAL_P_QUERY, "chunk query", GRAPH_SCRATCH, 2 * R * QD)                                    \
    XX(METAL_P_MIX, "chunk mix", GRAPH_SCRATCH, 2 * R * (QD > VD ? QD : VD))                       \
    XX(METAL_P_TOTAL, "chunk total", GRAPH_SCRATCH, 4 * R * QD)                                    \
    XX(METAL_P_STATS, "chunk stats", GRAPH_SCRATCH, 8 * R * QH)                                    \
    XX(METAL_P_EXPERT_IDS, "chunk expert ids", GRAPH_SCRATCH, 2 * R * K)                           \
    XX(METAL_P_WEIGHTS, "chunk expert weights", GRAPH_SCRATCH, 4 * R * K)                          \
    XX(METAL_P_GATE, "chunk shared gate", GRAPH_SCRATCH, 4 * R)                                    \
    XX(METAL_P_SORTED, "chunk sorted", GRAPH_SCRATCH, 4 * R * K)                                   \
    XX(METAL_P_BLOCKS, "chunk blocks", GRAPH_SCRATCH, 16 * blocks)                                 \
    XX(METAL_P_ACT, "chunk act", GRAPH_SCRATCH, 2 * R * K * I)                                     \
    XX(METAL_P_PAIRS, "chunk pairs", GRAPH_SCRATCH, 2 * R * K * H)                                 \
    XX(METAL_P_SHARED_ACT, "chunk shared act", GRAPH_SCRATCH, 2 * R * W)                           \
    XX(METAL_P_SHARED, "chunk shared", GRAPH_SCRATCH, 2 * R * H)

enum {
#define METAL_BUFFER_ENUM(name, label, class, bytes) name,
    METAL_BUFFER_MAP(METAL_BUFFER_ENUM)
#undef METAL_BUFFER_ENUM
        METAL_FIXED
};

enum { METAL_SLOT = 16 }; /* bytes between the slots of two sessions */

/* Buffers of a session, in this order; keys, then values of attention layer n are in the n-th of
 * the first. */
enum {
    SESSION_COUNTS,  /* uint32 [V], see decode_args.h */
    SESSION_STATE_0, /* float [gdn_layers][v_heads][128 values][128 keys] */
    SESSION_STATE_1,
    SESSION_CONV_0, /* float [gdn_layers][3][conv_dim] */
    SESSION_CONV_1,
    SESSION_KV /* bf16 [context][kv_dim] keys, then as many values; one for each layer */
};

struct metal_layout {
    const struct shape *shape;
    int32_t layers, attention_layers, gdn_layers;
    int32_t rows;     /* most rows of a prompt chunk */
    int32_t context;  /* tokens of the largest session */
    int32_t sessions; /* open at once */
    int32_t per_session;
    int32_t first_session, first_window, buffers;
    uint64_t bytes[METAL_FIXED];
    struct metal_tensors tensors;
};

/* w NULL: a plan's 4-bit weights. in_place and max_buffer as in tensors_place. The caller ends *out
 * with layout_free. */
int layout_make(const struct shape *shape, int32_t layers, const struct weights *w, bool in_place,
                int32_t rows, int32_t context, int32_t sessions, uint64_t max_buffer,
                struct metal_layout *out, lily_err *err);
void layout_free(struct metal_layout *l);

/* Label and class of a buffer by its number. */
const char *layout_label(const struct metal_layout *l, int32_t buffer);
enum graph_class layout_class(const struct metal_layout *l, int32_t buffer);

/* Bytes of buffer number k of a session with room for context tokens, and of all of them. */
uint64_t layout_session_buffer(const struct metal_layout *l, int32_t k, int32_t context);
uint64_t layout_session_bytes(const struct metal_layout *l, int32_t context);
/* Of all fixed buffers but the small weights. */
uint64_t layout_scratch_bytes(const struct metal_layout *l);

/* Recurrent and convolution state of one layer, and of all. */
uint64_t layout_state_layer(const struct shape *s);
uint64_t layout_conv_layer(const struct shape *s);
static inline uint64_t layout_state_bytes(const struct metal_layout *l) {
    return (uint64_t)l->gdn_layers * (layout_state_layer(l->shape) + layout_conv_layer(l->shape));
}

/* An empty graph over these buffers. */
int layout_graph(const struct metal_layout *l, int32_t max_dispatches, struct graph **out,
                 lily_err *err);

#endif

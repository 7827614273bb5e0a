#include "backend/metal/layout.h"

#include "backend/metal/kernels.h"

uint64_t layout_state_layer(const struct shape *s) {
    return 4 * (uint64_t)s->gdn_v_dim * (uint64_t)s->gdn_head_dim;
}

uint64_t layout_conv_layer(const struct shape *s) {
    return 4 * (uint64_t)(s->conv_taps - 1) * (uint64_t)s->conv_dim;
}

static void fixed_sizes(struct metal_layout *l) {
    const struct shape *s = l->shape;
    const struct metal_tensors *t = &l->tensors;
    const uint64_t H = (uint64_t)s->hidden, V = (uint64_t)s->vocab, E = (uint64_t)s->experts,
                   K = (uint64_t)s->top_k, I = (uint64_t)s->expert_width,
                   W = (uint64_t)s->shared_width, QD = (uint64_t)s->q_dim,
                   QH = (uint64_t)s->q_heads, KV = (uint64_t)s->kv_dim, CD = (uint64_t)s->conv_dim,
                   VD = (uint64_t)s->gdn_v_dim, VH = (uint64_t)s->gdn_v_heads,
                   R = (uint64_t)l->rows, N = (uint64_t)l->sessions,
                   B = decode_attn_max_blocks((uint32_t)l->context),
                   blocks =
                       prefill_max_blocks((uint32_t)R, (uint32_t)s->experts, (uint32_t)s->top_k);
#define METAL_BUFFER_BYTES(name, label, class, size) l->bytes[name] = (size);
    METAL_BUFFER_MAP(METAL_BUFFER_BYTES)
#undef METAL_BUFFER_BYTES
}

int layout_make(const struct shape *shape, int32_t layers, const struct weights *w, bool in_place,
                int32_t rows, int32_t context, int32_t sessions, uint64_t max_buffer,
                struct metal_layout *out, lily_err *err) {
    *out = (struct metal_layout){.shape = shape,
                                 .layers = layers,
                                 .attention_layers = shape_attention_layers(shape, layers),
                                 .rows = rows,
                                 .context = context,
                                 .sessions = sessions};
    out->gdn_layers = layers - out->attention_layers;
    out->per_session = SESSION_KV + out->attention_layers;
    out->first_session = METAL_FIXED;
    out->first_window = out->first_session + sessions * out->per_session;
    int rc = tensors_place(shape, layers, w, in_place, max_buffer, out->first_window, &out->tensors,
                           err);
    if (rc != LILY_OK) return rc;
    out->buffers = out->first_window + out->tensors.windows;
    fixed_sizes(out);
    return LILY_OK;
}

void layout_free(struct metal_layout *l) {
    tensors_free(&l->tensors);
    *l = (struct metal_layout){0};
}

static int32_t session_part(const struct metal_layout *l, int32_t buffer) {
    return (buffer - l->first_session) % l->per_session;
}

const char *layout_label(const struct metal_layout *l, int32_t buffer) {
    static const char *const fixed[] = {
#define METAL_BUFFER_LABEL(name, label, class, bytes) label,
        METAL_BUFFER_MAP(METAL_BUFFER_LABEL)
#undef METAL_BUFFER_LABEL
    };
    static const char *const parts[] = {"counts", "state 0", "state 1", "conv 0", "conv 1"};
    if (buffer < METAL_FIXED) return fixed[buffer];
    if (buffer >= l->first_window) return "weights";
    int32_t part = session_part(l, buffer);
    return part < SESSION_KV ? parts[part] : "keys and values";
}

enum graph_class layout_class(const struct metal_layout *l, int32_t buffer) {
    static const enum graph_class fixed[] = {
#define METAL_BUFFER_CLASS(name, label, class, bytes) class,
        METAL_BUFFER_MAP(METAL_BUFFER_CLASS)
#undef METAL_BUFFER_CLASS
    };
    if (buffer < METAL_FIXED) return fixed[buffer];
    if (buffer >= l->first_window) return GRAPH_WEIGHTS;
    int32_t part = session_part(l, buffer);
    if (part >= SESSION_KV) return GRAPH_KV;
    return part == SESSION_COUNTS ? GRAPH_TOKENS : GRAPH_STATE;
}

uint64_t layout_session_buffer(const struct metal_layout *l, int32_t k, int32_t context) {
    uint64_t gdn = (uint64_t)l->gdn_layers;
    switch (k) {
    case SESSION_COUNTS:
        return 4 * (uint64_t)l->shape->vocab;
    case SESSION_STATE_0:
    case SESSION_STATE_1:
        return gdn * layout_state_layer(l->shape);
    case SESSION_CONV_0:
    case SESSION_CONV_1:
        return gdn * layout_conv_layer(l->shape);
    default:
        return 4 * (uint64_t)context * (uint64_t)l->shape->kv_dim;
    }
}

uint64_t layout_session_bytes(const struct metal_layout *l, int32_t context) {
    uint64_t bytes = 0;
    for (int32_t k = 0; k < l->per_session; k++) bytes += layout_session_buffer(l, k, context);
    return bytes;
}

uint64_t layout_scratch_bytes(const struct metal_layout *l) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < METAL_FIXED; i++) bytes += i == METAL_SMALL ? 0 : l->bytes[i];
    return bytes;
}

int layout_graph(const struct metal_layout *l, int32_t max_dispatches, struct graph **out,
                 lily_err *err) {
    int rc = graph_new(max_dispatches, l->buffers, out, err);
    for (int32_t i = 0; i < l->buffers && rc == LILY_OK; i++) {
        graph_set_class(*out, i, layout_class(l, i));
    }
    return rc;
}

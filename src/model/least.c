#include "model/least.h"

/* Scales and biases of a matrix: two bfloat16 numbers a group. */
static uint64_t group_bytes(const struct shape *s, int32_t rows, int32_t cols) {
    return (uint64_t)rows * (uint64_t)(cols / s->group) * 4;
}

static uint64_t bytes_4(const struct shape *s, int32_t rows, int32_t cols) {
    return (uint64_t)rows * (uint64_t)cols / 2 + group_bytes(s, rows, cols);
}

static uint64_t bytes_8(const struct shape *s, int32_t rows, int32_t cols) {
    return (uint64_t)rows * (uint64_t)cols + group_bytes(s, rows, cols);
}

/* The projections of a layer's mixer. */
static uint64_t mixer_bytes(const struct shape *s, bool attention) {
    int32_t h = s->hidden;
    if (attention) {
        return bytes_4(s, 2 * s->q_dim, h) + 2 * bytes_4(s, s->kv_dim, h) + bytes_4(s, h, s->q_dim);
    }
    return bytes_4(s, s->conv_dim, h) + bytes_4(s, s->gdn_v_dim, h) +
           2 * bytes_4(s, s->gdn_v_heads, h) + bytes_4(s, h, s->gdn_v_dim);
}

static uint64_t expert_bytes(const struct shape *s, int32_t width) {
    return 2 * bytes_4(s, width, s->hidden) + bytes_4(s, s->hidden, width);
}

/* Numbers of a layer that are not quantised: norms, and the convolution, decay and gate of the
 * recurrent layers. Two bytes each, as checkpoints store them. */
static uint64_t small_bytes(const struct shape *s, bool attention) {
    int32_t mixer = attention ? 2 * s->head_dim
                              : s->conv_taps * s->conv_dim + 2 * s->gdn_v_heads + s->gdn_head_dim;
    return 2 * (uint64_t)(2 * s->hidden + mixer);
}

struct least shape_least(const struct shape *s, int32_t layers, int32_t tokens) {
    int64_t choices = (int64_t)s->top_k * tokens;
    uint64_t experts = (uint64_t)(choices < s->experts ? choices : s->experts);
    uint64_t attention = (uint64_t)shape_attention_layers(s, layers);
    uint64_t recurrent = (uint64_t)layers - attention;
    struct least out = {
        .weight_bytes = (uint64_t)tokens * bytes_4(s, 1, s->hidden) +
                        bytes_4(s, s->vocab, s->hidden) + 2 * (uint64_t)s->hidden +
                        attention * (mixer_bytes(s, true) + small_bytes(s, true)) +
                        recurrent * (mixer_bytes(s, false) + small_bytes(s, false)),
        .state_bytes = recurrent * (uint64_t)s->gdn_v_heads * (uint64_t)s->gdn_head_dim *
                       (uint64_t)s->gdn_head_dim * sizeof(float),
        .conv_bytes =
            recurrent * (uint64_t)(s->conv_taps - 1) * (uint64_t)s->conv_dim * sizeof(float),
        .kv_bytes_token = attention * 2 * (uint64_t)s->kv_dim * 2,
    };
    out.weight_bytes +=
        (uint64_t)layers *
        (experts * expert_bytes(s, s->expert_width) + expert_bytes(s, s->shared_width) +
         bytes_8(s, s->experts, s->hidden) + bytes_8(s, 1, s->hidden));
    return out;
}

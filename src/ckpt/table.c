#include "ckpt/table.h"

#include <stdio.h>
#include <string.h>

#define DIM(field, n)                                                                              \
    { offsetof(struct shape, field), n }
#define ONE                                                                                        \
    { 0, DIM_ONE }
#define LAYER(field)       offsetof(struct layer_weights, field)
#define MODEL(field)       offsetof(struct weights, field)
#define MATRIX(cls, bits_) .kind = KIND_MATRIX, .class = cls, .bits = bits_, .suffix = ".weight"
#define EXPERTS(fused, n, of, each)                                                                \
    .kind = KIND_EXPERTS, .class = CLASS_EXPERTS, .bits = 4, .suffix = ".weight",                  \
    .hf_fused = fused, .part = n, .parts = of, .hf_each = each
#define VECTOR(suf) .kind = KIND_VECTOR, .class = CLASS_SMALL, .suffix = suf, .cols = ONE
#define NORM        VECTOR(".weight"), .zero_centred = true

const struct tensor_role tensor_roles[] = {
    {"embed_tokens", .place = IN_MODEL, MATRIX(CLASS_EMBED, 4), .rows = DIM(vocab, 1),
     .cols = DIM(hidden, 1), .target = MODEL(embed)},

    {"input_layernorm", .place = IN_EVERY_LAYER, NORM, .rows = DIM(hidden, 1),
     .target = LAYER(input_norm)},

    {"self_attn.q_proj", .place = IN_ATTENTION, MATRIX(CLASS_ATTENTION, 4), .rows = DIM(q_dim, 2),
     .cols = DIM(hidden, 1), .target = LAYER(attention.q_proj)},
    {"self_attn.k_proj", .place = IN_ATTENTION, MATRIX(CLASS_ATTENTION, 4), .rows = DIM(kv_dim, 1),
     .cols = DIM(hidden, 1), .target = LAYER(attention.k_proj)},
    {"self_attn.v_proj", .place = IN_ATTENTION, MATRIX(CLASS_ATTENTION, 4), .rows = DIM(kv_dim, 1),
     .cols = DIM(hidden, 1), .target = LAYER(attention.v_proj)},
    {"self_attn.o_proj", .place = IN_ATTENTION, MATRIX(CLASS_ATTENTION, 4), .rows = DIM(hidden, 1),
     .cols = DIM(q_dim, 1), .target = LAYER(attention.o_proj)},
    {"self_attn.q_norm", .place = IN_ATTENTION, NORM, .rows = DIM(head_dim, 1),
     .target = LAYER(attention.q_norm)},
    {"self_attn.k_norm", .place = IN_ATTENTION, NORM, .rows = DIM(head_dim, 1),
     .target = LAYER(attention.k_norm)},

    {"linear_attn.in_proj_qkv", .place = IN_DELTANET, MATRIX(CLASS_DELTANET, 4),
     .rows = DIM(conv_dim, 1), .cols = DIM(hidden, 1), .target = LAYER(deltanet.in_proj_qkv)},
    {"linear_attn.in_proj_z", .place = IN_DELTANET, MATRIX(CLASS_DELTANET, 4),
     .rows = DIM(gdn_v_dim, 1), .cols = DIM(hidden, 1), .target = LAYER(deltanet.in_proj_z)},
    {"linear_attn.in_proj_b", .place = IN_DELTANET, MATRIX(CLASS_DELTANET, 4),
     .rows = DIM(gdn_v_heads, 1), .cols = DIM(hidden, 1), .target = LAYER(deltanet.in_proj_b)},
    {"linear_attn.in_proj_a", .place = IN_DELTANET, MATRIX(CLASS_DELTANET, 4),
     .rows = DIM(gdn_v_heads, 1), .cols = DIM(hidden, 1), .target = LAYER(deltanet.in_proj_a)},
    {"linear_attn.out_proj", .place = IN_DELTANET, MATRIX(CLASS_DELTANET, 4),
     .rows = DIM(hidden, 1), .cols = DIM(gdn_v_dim, 1), .target = LAYER(deltanet.out_proj)},
    {"linear_attn.conv1d", .place = IN_DELTANET, .kind = KIND_CONV, .class = CLASS_SMALL,
     .suffix = ".weight", .rows = DIM(conv_dim, 1), .cols = DIM(conv_taps, 1),
     .target = LAYER(deltanet.conv)},
    {"linear_attn.A_log", .place = IN_DELTANET, VECTOR(""), .rows = DIM(gdn_v_heads, 1),
     .target = LAYER(deltanet.a_log)},
    {"linear_attn.dt_bias", .place = IN_DELTANET, VECTOR(""), .rows = DIM(gdn_v_heads, 1),
     .target = LAYER(deltanet.dt_bias)},
    {"linear_attn.norm", .place = IN_DELTANET, VECTOR(".weight"), .rows = DIM(gdn_head_dim, 1),
     .target = LAYER(deltanet.norm)},

    {"post_attention_layernorm", .place = IN_EVERY_LAYER, NORM, .rows = DIM(hidden, 1),
     .target = LAYER(post_norm)},
    {"mlp.gate", .place = IN_EVERY_LAYER, MATRIX(CLASS_ROUTER, 8), .rows = DIM(experts, 1),
     .cols = DIM(hidden, 1), .target = LAYER(moe.router)},
    {"mlp.switch_mlp.gate_proj", .place = IN_EVERY_LAYER,
     EXPERTS("mlp.experts.gate_up_proj", 0, 2, "gate_proj"), .rows = DIM(expert_width, 1),
     .cols = DIM(hidden, 1), .target = LAYER(moe.gate)},
    {"mlp.switch_mlp.up_proj", .place = IN_EVERY_LAYER,
     EXPERTS("mlp.experts.gate_up_proj", 1, 2, "up_proj"), .rows = DIM(expert_width, 1),
     .cols = DIM(hidden, 1), .target = LAYER(moe.up)},
    {"mlp.switch_mlp.down_proj", .place = IN_EVERY_LAYER,
     EXPERTS("mlp.experts.down_proj", 0, 1, "down_proj"), .rows = DIM(hidden, 1),
     .cols = DIM(expert_width, 1), .target = LAYER(moe.down)},
    {"mlp.shared_expert.gate_proj", .place = IN_EVERY_LAYER, MATRIX(CLASS_SHARED, 4),
     .rows = DIM(shared_width, 1), .cols = DIM(hidden, 1), .target = LAYER(moe.shared_gate_proj)},
    {"mlp.shared_expert.up_proj", .place = IN_EVERY_LAYER, MATRIX(CLASS_SHARED, 4),
     .rows = DIM(shared_width, 1), .cols = DIM(hidden, 1), .target = LAYER(moe.shared_up_proj)},
    {"mlp.shared_expert.down_proj", .place = IN_EVERY_LAYER, MATRIX(CLASS_SHARED, 4),
     .rows = DIM(hidden, 1), .cols = DIM(shared_width, 1), .target = LAYER(moe.shared_down_proj)},
    {"mlp.shared_expert_gate", .place = IN_EVERY_LAYER, MATRIX(CLASS_SHARED_GATE, 8), .rows = ONE,
     .cols = DIM(hidden, 1), .target = LAYER(moe.shared_gate)},

    {"norm", .place = IN_MODEL, NORM, .rows = DIM(hidden, 1), .target = MODEL(final_norm)},
    {"lm_head", .place = IN_MODEL, MATRIX(CLASS_LM_HEAD, 4), .rows = DIM(vocab, 1),
     .cols = DIM(hidden, 1), .target = MODEL(lm_head)},
};
const int tensor_role_count = sizeof tensor_roles / sizeof *tensor_roles;

const char *tensor_class_name(enum tensor_class c) {
    static const char *const names[CLASS_COUNT] = {
        [CLASS_EXPERTS] = "routed experts",
        [CLASS_DELTANET] = "GDN projections",
        [CLASS_ATTENTION] = "full-attention projections",
        [CLASS_LM_HEAD] = "lm_head",
        [CLASS_EMBED] = "embed_tokens",
        [CLASS_SHARED] = "shared experts",
        [CLASS_ROUTER] = "routers",
        [CLASS_SHARED_GATE] = "shared_expert_gate",
        [CLASS_SMALL] = "norms, conv1d, A_log, dt_bias",
    };
    return names[c];
}

static int32_t dim(struct tensor_dim d, const struct shape *s) {
    if (d.times == DIM_ONE) return 1;
    int32_t value;
    memcpy(&value, (const char *)s + d.field, sizeof value);
    return value * d.times;
}

int32_t tensor_rows(const struct tensor_role *r, const struct shape *s) {
    return dim(r->rows, s);
}

int32_t tensor_cols(const struct tensor_role *r, const struct shape *s) {
    return dim(r->cols, s);
}

int32_t tensor_items(const struct tensor_role *r, const struct shape *s) {
    return r->kind == KIND_EXPERTS ? s->experts : 1;
}

bool tensor_in_layer(const struct tensor_role *r, const struct shape *s, int32_t layer) {
    switch (r->place) {
    case IN_MODEL:
        return layer < 0;
    case IN_EVERY_LAYER:
        return layer >= 0;
    case IN_ATTENTION:
        return layer >= 0 && shape_is_attention(s, layer);
    case IN_DELTANET:
        return layer >= 0 && !shape_is_attention(s, layer);
    }
    return false;
}

void tensor_walk_start(struct tensor_walk *w, const struct shape *s, int32_t layers) {
    *w = (struct tensor_walk){.shape = s, .layers = layers, .layer = -1, .index = -1};
}

/* The table has embed_tokens first and the final tensors last, with the layers' rows between. */
bool tensor_walk_next(struct tensor_walk *w) {
    for (;;) {
        if (++w->index == tensor_role_count) return false;
        const struct tensor_role *r = &tensor_roles[w->index];
        bool model_row = r->place == IN_MODEL;
        if (model_row && w->layer >= 0) {
            /* Past the rows of a layer: the next layer begins at the first layer row. */
            if (w->layer + 1 < w->layers) {
                w->layer++;
                w->index = 0;
                continue;
            }
            w->layer = -1;
        } else if (!model_row && w->layer < 0) {
            w->layer = 0;
        }
        if (!tensor_in_layer(r, w->shape, w->layer)) continue;
        w->role = r;
        return true;
    }
}

const char *tensor_path(const struct tensor_role *r, int32_t layer, char *out, size_t size) {
    if (layer < 0) {
        snprintf(out, size, "%s", r->name);
    } else {
        snprintf(out, size, "layers.%d.%s", layer, r->name);
    }
    return out;
}

/* name without its prefix, when it has it. */
static const char *skip_prefix(const char *name, const char *prefix) {
    size_t n = strlen(prefix);
    return strncmp(name, prefix, n) == 0 ? name + n : name;
}

/* Does rest begin with stem, and go on with nothing but a suffix such as ".scales"? */
static bool is_stem(const char *rest, const char *stem) {
    size_t n = strlen(stem);
    return strncmp(rest, stem, n) == 0 &&
           (!rest[n] || (rest[n] == '.' && !strchr(rest + n + 1, '.')));
}

const struct tensor_role *tensor_role_of_name(const char *name) {
    name = skip_prefix(name, "language_model.");
    name = skip_prefix(name, "model.");
    name = skip_prefix(name, "language_model.");
    bool in_layer = strncmp(name, "layers.", 7) == 0;
    if (in_layer) {
        name += 7;
        name += strspn(name, "0123456789");
        if (*name++ != '.') return NULL;
    }
    for (int i = 0; i < tensor_role_count; i++) {
        const struct tensor_role *r = &tensor_roles[i];
        if (in_layer == (r->place == IN_MODEL)) continue;
        if (is_stem(name, r->name) || (r->hf_fused && is_stem(name, r->hf_fused))) return r;
        /* mlp.experts.7.gate_proj.weight */
        const char *expert = skip_prefix(name, "mlp.experts.");
        if (!r->hf_each || expert == name) continue;
        size_t digits = strspn(expert, "0123456789");
        if (digits && expert[digits] == '.' && is_stem(expert + digits + 1, r->hf_each)) return r;
    }
    return NULL;
}

static void *slot(const struct tensor_role *r, const struct weights *w, int32_t layer) {
    char *base = layer < 0 ? (char *)(uintptr_t)w : (char *)&w->layer[layer];
    return base + r->target;
}

const struct mat *tensor_mats(const struct tensor_role *r, const struct weights *w, int32_t layer) {
    if (r->kind == KIND_MATRIX) return slot(r, w, layer);
    if (r->kind == KIND_EXPERTS) return *(const struct mat **)slot(r, w, layer);
    return NULL;
}

const float *tensor_floats(const struct tensor_role *r, const struct weights *w, int32_t layer) {
    if (r->kind == KIND_MATRIX || r->kind == KIND_EXPERTS) return NULL;
    return *(const float **)slot(r, w, layer);
}

void tensor_set_mats(const struct tensor_role *r, struct weights *w, int32_t layer,
                     const struct mat *m) {
    if (r->kind == KIND_MATRIX) {
        *(struct mat *)slot(r, w, layer) = *m;
    } else {
        *(const struct mat **)slot(r, w, layer) = m;
    }
}

void tensor_set_floats(const struct tensor_role *r, struct weights *w, int32_t layer,
                       const float *values) {
    *(const float **)slot(r, w, layer) = values;
}

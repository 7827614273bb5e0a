#include "ckpt/config.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "ckpt/json.h"

/* The integers of config.json that must equal the shape's. */
static const struct {
    const char *key;
    size_t field; /* in struct shape */
} dims[] = {
    {"hidden_size", offsetof(struct shape, hidden)},
    {"vocab_size", offsetof(struct shape, vocab)},
    {"num_attention_heads", offsetof(struct shape, q_heads)},
    {"num_key_value_heads", offsetof(struct shape, kv_heads)},
    {"head_dim", offsetof(struct shape, head_dim)},
    {"linear_num_key_heads", offsetof(struct shape, gdn_k_heads)},
    {"linear_num_value_heads", offsetof(struct shape, gdn_v_heads)},
    {"linear_key_head_dim", offsetof(struct shape, gdn_head_dim)},
    {"linear_value_head_dim", offsetof(struct shape, gdn_head_dim)},
    {"linear_conv_kernel_dim", offsetof(struct shape, conv_taps)},
    {"num_experts", offsetof(struct shape, experts)},
    {"num_experts_per_tok", offsetof(struct shape, top_k)},
    {"moe_intermediate_size", offsetof(struct shape, expert_width)},
    {"shared_expert_intermediate_size", offsetof(struct shape, shared_width)},
};
enum { DIM_COUNT = sizeof dims / sizeof *dims };

static int32_t shape_dim(const struct shape *s, int i) {
    int32_t value;
    memcpy(&value, (const char *)s + dims[i].field, sizeof value);
    return value;
}

static int dims_different(const json_t *text, const struct shape *s) {
    int n = 0;
    for (int i = 0; i < DIM_COUNT; i++) {
        const json_t *v = json_object_get(text, dims[i].key);
        n += !json_is_integer(v) || json_integer_value(v) != shape_dim(s, i);
    }
    return n;
}

enum { SHOWN = 64 };

/* A value as the file has it, in out[SHOWN]: what is read as 0 because it is of another type must
 * not be told as a 0. Strings are quoted only where quotes tell something. */
static const char *shown(const json_t *v, bool quoted, char *out) {
    if (!v || (json_is_string(v) && !quoted)) {
        snprintf(out, SHOWN, "%s", v ? json_string_value(v) : "missing");
        return out;
    }
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));
    snprintf(out, SHOWN, "%s", text ? text : "(unreadable)");
    free(text);
    return out;
}

/* "qwen3.6-35b-a3b or mini" */
static const char *shape_names(char *out, size_t size) {
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; shape_all[i] && used < size; i++) {
        used +=
            (size_t)snprintf(out + used, size - used, "%s%s", i ? " or " : "", shape_all[i]->name);
    }
    return out;
}

/* Says in which fields a config differs from the nearest shape. */
static int refuse_dims(const char *what, const json_t *text, const struct shape *near,
                       int different, struct faults *f) {
    char names[96], found[SHOWN];
    struct buf b = {0};
    bool fits = true;
    int listed = 0;
    for (int i = 0; i < DIM_COUNT && listed < 3; i++) {
        const json_t *v = json_object_get(text, dims[i].key);
        if (json_is_integer(v) && json_integer_value(v) == shape_dim(near, i)) continue;
        fits = fits && buf_printf(&b, "%s%s %s (expected %d)", listed++ ? ", " : "", dims[i].key,
                                  shown(v, true, found), shape_dim(near, i));
    }
    int rc = fits ? fault(f, LILY_EMODEL,
                          "%s: found a model with %s%s, expected the shape of %s; use "
                          "Qwen3.6-35B-A3B (MLX 4-bit or bf16), the only model this program runs",
                          what, b.data, different > listed ? " and more differences" : "",
                          shape_names(names, sizeof names))
                  : ERR_NOMEM(f->err, what);
    buf_free(&b);
    return rc;
}

/* The architecture by its name, before its numbers: the clearest refusal for a wrong family. */
static int check_family(const char *what, const json_t *root, const json_t *text, bool *known,
                        struct faults *f) {
    static const char *const types[] = {"qwen3_5_moe", "qwen3_5_moe_text"};
    const char *type = json_string_value(json_object_get(text, "model_type"));
    if (!type) type = json_string_value(json_object_get(root, "model_type"));
    *known = false;
    for (size_t i = 0; type && i < sizeof types / sizeof *types; i++) {
        if (strcmp(type, types[i]) == 0) *known = true;
    }
    if (*known && json_object_get(text, "num_experts")) return 0;
    *known = false;
    bool dense = !json_object_get(text, "num_experts");
    char hidden[SHOWN], layers[SHOWN];
    return fault(f, LILY_EMODEL,
                 "%s: found a %s model (model_type %.60s, hidden_size %s, %s layers), expected the "
                 "mixture-of-experts model "
                 "qwen3_5_moe; use Qwen3.6-35B-A3B (MLX 4-bit or bf16), the only model this "
                 "program runs",
                 what, dense ? "dense" : "different", type ? type : "missing",
                 shown(json_object_get(text, "hidden_size"), true, hidden),
                 shown(json_object_get(text, "num_hidden_layers"), true, layers));
}

static int check_layers(const char *what, const json_t *text, struct config *c, struct faults *f) {
    const json_t *v = json_object_get(text, "num_hidden_layers");
    json_int_t n = json_integer_value(v);
    int32_t every = c->shape->attention_every;
    char found[SHOWN];
    if (!json_is_integer(v) || n < every || n > c->shape->layers || n % every != 0) {
        return fault(f, LILY_EMODEL,
                     "%s: found num_hidden_layers %s, expected a multiple of %d up to %d; use an "
                     "unmodified checkpoint",
                     what, shown(v, true, found), every, c->shape->layers);
    }
    c->layers = (int32_t)n;
    v = json_object_get(text, "full_attention_interval");
    if (v && (!json_is_integer(v) || json_integer_value(v) != every)) {
        return fault(f, LILY_EMODEL,
                     "%s: found full_attention_interval %s, expected %d; use an unmodified "
                     "checkpoint",
                     what, shown(v, true, found), every);
    }
    const json_t *types = json_object_get(text, "layer_types");
    if (!types || json_is_null(types)) return 0;
    for (int32_t l = 0; l < c->layers; l++) {
        const json_t *entry = json_array_get(types, (size_t)l);
        const char *type = json_string_value(entry);
        const char *want = shape_is_attention(c->shape, l) ? "full_attention" : "linear_attention";
        if (type && strcmp(type, want) == 0) continue;
        return fault(f, LILY_EMODEL,
                     "%s: found layer_types[%d] = %s, expected %s; use an unmodified checkpoint",
                     what, l, shown(json_is_array(types) ? entry : types, false, found), want);
    }
    return 0;
}

static int check_number(const char *what, const json_t *text, const char *key, double want,
                        bool required, struct faults *f) {
    const json_t *v = json_object_get(text, key);
    if (!v && !required) return 0;
    double got = json_number_value(v);
    if (json_is_number(v) && fabs(got - want) <= 1e-6 * fabs(want)) return 0;
    char found[SHOWN];
    if (json_is_number(v)) {
        snprintf(found, sizeof found, "%g", got);
    } else {
        shown(v, true, found);
    }
    return fault(f, LILY_EMODEL, "%s: found %s %s, expected %g; use an unmodified checkpoint", what,
                 key, found, want);
}

/* Booleans and names that select other mathematics. Absent means the wanted value: Hugging Face's
 * own defaults for this architecture. */
static int check_switches(const char *what, const json_t *text, struct faults *f) {
    static const struct {
        const char *key;
        bool want;
    } flags[] = {
        {"attention_bias", false}, {"attn_output_gate", true},    {"tie_word_embeddings", false},
        {"norm_topk_prob", true},  {"use_sliding_window", false},
    };
    char found[SHOWN];
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        const json_t *v = json_object_get(text, flags[i].key);
        if (!v || (json_is_boolean(v) && json_is_true(v) == flags[i].want)) continue;
        int rc = fault(f, LILY_EMODEL, "%s: found %s %s, expected %s; use an unmodified checkpoint",
                       what, flags[i].key, shown(v, true, found), flags[i].want ? "true" : "false");
        if (rc != 0) return rc;
    }
    const json_t *act = json_object_get(text, "hidden_act");
    if (act && (!json_is_string(act) || strcmp(json_string_value(act), "silu") != 0)) {
        return fault(f, LILY_EMODEL,
                     "%s: found hidden_act %s, expected silu; use an unmodified checkpoint", what,
                     shown(act, false, found));
    }
    if (json_array_size(json_object_get(text, "mlp_only_layers")) > 0) {
        return fault(f, LILY_EMODEL,
                     "%s: found dense layers in mlp_only_layers, expected experts in every layer; "
                     "use an unmodified checkpoint",
                     what);
    }
    return 0;
}

/* Rotary embedding: rope_parameters in new files, rope_theta and rope_scaling in older ones. */
static int check_rope(const char *what, const json_t *text, const struct shape *s,
                      struct faults *f) {
    const json_t *rope = json_object_get(text, "rope_parameters");
    const json_t *scaling = json_object_get(text, "rope_scaling");
    const json_t *where = json_is_object(rope) ? rope : text;
    const json_t *kinds = json_is_object(rope) ? rope : scaling;
    const json_t *type = json_object_get(kinds, "rope_type");
    if (!type || json_is_null(type)) type = json_object_get(kinds, "type");
    const char *kind = json_string_value(type);
    bool given = type && !json_is_null(type);
    if (given && (!kind || (strcmp(kind, "default") != 0 && strcmp(kind, "mrope") != 0))) {
        char found[SHOWN];
        return fault(f, LILY_EMODEL,
                     "%s: found rope_type %s, expected default; remove the context extension from "
                     "the config",
                     what, shown(type, false, found));
    }
    int rc = check_number(what, where, "rope_theta", s->rope_theta, true, f);
    if (rc != 0) return rc;
    /* The factor may stand beside rope_parameters instead of inside. */
    if (!json_object_get(where, "partial_rotary_factor")) where = text;
    return check_number(what, where, "partial_rotary_factor",
                        (double)s->rotary_dim / (double)s->head_dim, true, f);
}

static int find_shape(const char *what, const json_t *text, struct config *c, struct faults *f) {
    const struct shape *near = NULL;
    int least = DIM_COUNT + 1;
    for (int i = 0; shape_all[i]; i++) {
        int n = dims_different(text, shape_all[i]);
        if (n >= least) continue;
        near = shape_all[i];
        least = n;
    }
    if (least == 0) {
        c->shape = near;
        return 0;
    }
    return refuse_dims(what, text, near, least, f);
}

/* Files of before there were modes do not name one. */
static bool is_affine(const json_t *mode) {
    return !mode || (json_is_string(mode) && strcmp(json_string_value(mode), "affine") == 0);
}

/* The quantisation as a whole: MLX affine, 4 bits, groups of 64, or none. */
static int check_quantisation(const char *what, struct config *c, struct faults *f) {
    const json_t *q = json_object_get(c->root, "quantization");
    const json_t *foreign = json_object_get(c->root, "quantization_config");
    char found[SHOWN], bits_found[SHOWN], group_found[SHOWN];
    c->bits = 16;
    if (q && !json_is_object(q) && !json_is_null(q)) {
        c->bits = 0;
        return fault(f, LILY_EMODEL,
                     "%s: found quantization %s, expected an object with bits and group_size; use "
                     "an unmodified checkpoint",
                     what, shown(q, true, found));
    }
    if (!json_is_object(q) && json_is_object(foreign)) {
        const char *method = json_string_value(json_object_get(foreign, "quant_method"));
        if (method || !json_object_get(foreign, "bits")) {
            c->bits = 0;
            return fault(f, LILY_EMODEL,
                         "%s: found weights quantised by %.40s, expected MLX affine 4-bit or bf16; "
                         "use the MLX 4-bit or the bf16 checkpoint",
                         what, method ? method : "an unnamed method");
        }
        q = foreign;
    }
    if (!json_is_object(q)) return 0;
    const json_t *bits = json_object_get(q, "bits"), *group = json_object_get(q, "group_size");
    const json_t *mode = json_object_get(q, "mode");
    if (!is_affine(mode) || json_integer_value(bits) != 4 ||
        json_integer_value(group) != c->shape->group) {
        c->bits = 0;
        return fault(f, LILY_EMODEL,
                     "%s: found quantization %s with %s bits in groups of %s, expected affine with "
                     "4 bits in groups of %d; use the MLX 4-bit checkpoint, or let this program "
                     "quantise the bf16 one",
                     what, mode ? shown(mode, false, found) : "affine",
                     shown(bits, true, bits_found), shown(group, true, group_found),
                     c->shape->group);
    }
    c->quantised = true;
    c->bits = 4;
    c->overrides = q;
    return 0;
}

int config_module_bits(const struct config *c, const char *module, int32_t *bits,
                       struct faults *f) {
    *bits = c->bits;
    const json_t *o = json_object_get(c->overrides, module);
    if (!o) return 0;
    if (json_is_false(o)) {
        *bits = 16;
        return 0;
    }
    if (json_is_true(o)) return 0;
    const json_t *mode = json_object_get(o, "mode"), *group = json_object_get(o, "group_size");
    const json_t *given = json_object_get(o, "bits");
    json_int_t n = json_integer_value(given);
    char found[SHOWN], bits_found[SHOWN], group_found[SHOWN];
    if (!json_is_object(o)) {
        *bits = 0;
        return fault(f, LILY_EMODEL,
                     "config.json: quantization of %.120s: found %s, expected an object, true or "
                     "false; use the MLX 4-bit checkpoint",
                     module, shown(o, true, found));
    }
    if (!is_affine(mode) || (group && json_integer_value(group) != c->shape->group) ||
        (n != 4 && n != 8)) {
        *bits = 0;
        return fault(f, LILY_EMODEL,
                     "config.json: quantization of %.120s: found %s, %s bits, groups of %s, "
                     "expected affine, 4 or 8 bits, groups of %d; use the MLX 4-bit checkpoint",
                     module, mode ? shown(mode, false, found) : "affine",
                     shown(given, true, bits_found), group ? shown(group, true, group_found) : "64",
                     c->shape->group);
    }
    *bits = (int32_t)n;
    return 0;
}

static int check_all(const char *what, struct config *c, struct faults *f) {
    const json_t *text = json_object_get(c->root, "text_config");
    if (!json_is_object(text)) text = c->root;
    bool known;
    int rc = check_family(what, c->root, text, &known, f);
    if (rc != 0 || !known) return rc;
    rc = find_shape(what, text, c, f);
    if (rc != 0 || !c->shape) return rc;
    rc = check_layers(what, text, c, f);
    if (rc == 0) rc = check_switches(what, text, f);
    if (rc == 0) rc = check_rope(what, text, c->shape, f);
    if (rc == 0) rc = check_number(what, text, "rms_norm_eps", c->shape->norm_eps, true, f);
    if (rc == 0) rc = check_quantisation(what, c, f);
    return rc;
}

int config_parse(const char *what, const char *text, size_t n, struct config *out,
                 struct faults *f) {
    *out = (struct config){0};
    lily_err err = {0};
    int rc = json_parse_object(what, text, n, &out->root, &err);
    if (rc != 0) return fault_from(f, rc, &err);
    rc = check_all(what, out, f);
    /* A shape without usable layers cannot be bound; only an inspection gets here. */
    if (rc == 0 && out->layers == 0) out->shape = NULL;
    if (rc != 0) config_close(out);
    return rc;
}

void config_close(struct config *c) {
    json_decref(c->root);
    *c = (struct config){0};
}

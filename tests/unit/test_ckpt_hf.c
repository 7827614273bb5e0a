/* Hugging Face folders in bfloat16: a small one made here (fused experts, one tensor per expert,
 * both prefixes), and the reference folder's random checkpoint when REFERENCE names one. */
#include "ckpt_fixture.h"

#include "base/bf16.h"
#include "ckpt/quantise.h"
#include "ckpt/safetensors.h"
#include "ckpt/synth_texts.h"
#include "ckpt/table.h"

/* ---- a folder written here ------------------------------------------------------------------- */

struct layout {
    const char *prefix;
    bool each_expert;
    bool float_decay; /* A_log in float32, as some files of this family have it */
};

/* Values that repeat nowhere: a hash of name and index, about +-0.1. */
static uint16_t value_of(const char *name, size_t i) {
    uint32_t h = 2166136261u;
    for (const char *p = name; *p; p++) h = (h ^ (uint8_t)*p) * 16777619u;
    h = (h ^ (uint32_t)i) * 2654435761u;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    return f32_to_bf16(((float)(h >> 8) * 0x1p-24f - 0.5f) * 0.2f);
}

static void add(struct fx_tensors *t, const char *name, const size_t *dims, int rank) {
    size_t n = 1;
    json_t *shape = json_array();
    for (int i = 0; i < rank; i++) {
        n *= dims[i];
        json_array_append_new(shape, json_integer((json_int_t)dims[i]));
    }
    size_t at = t->n;
    fx_append(t, name, "BF16", n, 2);
    json_object_set_new(json_object_get(t->header, name), "shape", shape);
    for (size_t i = 0; i < n; i++) {
        uint16_t v = value_of(name, i);
        memcpy(t->data + at + 2 * i, &v, 2);
    }
}

static void add_float(struct fx_tensors *t, const char *name, size_t n) {
    size_t at = t->n;
    fx_append(t, name, "F32", n, 4);
    for (size_t i = 0; i < n; i++) {
        float v = bf16_to_f32(value_of(name, i)) + 0x1p-20f; /* needs more than bfloat16 */
        memcpy(t->data + at + 4 * i, &v, 4);
    }
}

static void add_experts(struct fx_tensors *t, const struct tensor_role *r, int32_t layer,
                        const struct layout *how) {
    const struct shape *s = &shape_mini;
    size_t rows = (size_t)tensor_rows(r, s), cols = (size_t)tensor_cols(r, s);
    char name[192];
    for (int32_t e = 0; how->each_expert && e < s->experts; e++) {
        snprintf(name, sizeof name, "%slayers.%d.mlp.experts.%d.%s.weight", how->prefix, layer, e,
                 r->hf_each);
        add(t, name, (size_t[]){rows, cols}, 2);
    }
    if (how->each_expert || r->part > 0) return;
    snprintf(name, sizeof name, "%slayers.%d.%s", how->prefix, layer, r->hf_fused);
    add(t, name, (size_t[]){(size_t)s->experts, rows * (size_t)r->parts, cols}, 3);
}

static const char *make_folder(const char *name, const struct layout *how) {
    const struct shape *s = &shape_mini;
    mkdir(fx_path("%s", name), 0755);
    struct fx_tensors t = {.header = json_object()};
    struct tensor_walk w;
    tensor_walk_start(&w, s, 4);
    while (tensor_walk_next(&w)) {
        const struct tensor_role *r = w.role;
        char path[128], full[192];
        tensor_path(r, w.layer, path, sizeof path);
        snprintf(full, sizeof full, "%s%s%s", r->class == CLASS_LM_HEAD ? "" : how->prefix, path,
                 r->suffix);
        size_t rows = (size_t)tensor_rows(r, s), cols = (size_t)tensor_cols(r, s);
        if (r->kind == KIND_EXPERTS) {
            add_experts(&t, r, w.layer, how);
        } else if (how->float_decay && strcmp(r->name, "linear_attn.A_log") == 0) {
            add_float(&t, full, rows);
        } else if (r->kind == KIND_CONV) {
            add(&t, full, (size_t[]){rows, 1, cols}, 3);
        } else {
            add(&t, full, (size_t[]){rows, cols}, r->kind == KIND_VECTOR ? 1 : 2);
        }
    }
    fx_store(fx_path("%s/model.safetensors", name), &t, 0);
    struct texts texts;
    int32_t used;
    lily_err err = {0};
    assert_int_equal(synth_texts_make(s, 4, &texts, &used, &err), 0);
    json_t *config = json_loads(texts.file[TEXT_CONFIG].data, 0, NULL);
    json_object_del(config, "quantization");
    fx_write_json(fx_path("%s/config.json", name), config);
    fx_write_text(fx_path("%s/tokenizer.json", name), texts.file[TEXT_TOKENIZER].data);
    synth_texts_free(&texts);
    return fx_path("%s", name);
}

static void check_bf16(const struct mat *m, const char *name, size_t first) {
    assert_int_equal(m->bits, 16);
    assert_null(m->scales);
    for (size_t i = 0; i < (size_t)m->rows * (size_t)m->cols; i++) {
        uint16_t v;
        memcpy(&v, m->data + 2 * i, 2);
        if (v != value_of(name, first + i)) fail_msg("%s: value %zu differs", name, first + i);
    }
}

static void check_experts(const struct moe_weights *moe, const struct layout *how, int32_t layer) {
    char name[3][192];
    const size_t gate = 64 * 256, down = 256 * 64;
    for (size_t e = 0; e < 32; e += 31) {
        size_t first[3] = {e * 2 * gate, e * 2 * gate + gate, e * down};
        const char *const each[] = {"gate_proj", "up_proj", "down_proj"};
        for (int k = 0; k < 3; k++) {
            snprintf(name[k], sizeof name[k], "%slayers.%d.mlp.experts.%s", how->prefix, layer,
                     k < 2 ? "gate_up_proj" : "down_proj");
            if (!how->each_expert) continue;
            snprintf(name[k], sizeof name[k], "%slayers.%d.mlp.experts.%zu.%s.weight", how->prefix,
                     layer, e, each[k]);
            first[k] = 0;
        }
        check_bf16(&moe->gate[e], name[0], first[0]);
        check_bf16(&moe->up[e], name[1], first[1]);
        check_bf16(&moe->down[e], name[2], first[2]);
    }
}

static void test_layouts(void **state) {
    (void)state;
    const struct layout layouts[] = {{"model.language_model.", false, false},
                                     {"model.language_model.", true, true},
                                     {"model.", false, true},
                                     {"model.", true, false}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const struct layout *how = &layouts[i];
        const char *path = make_folder("hf", how);
        struct ckpt *c = fx_load_ok(path, true);
        assert_string_equal(fx_warnings, "");
        assert_string_equal(ckpt_kind(c), "Hugging Face bf16 folder");
        const struct weights *w = ckpt_weights(c);
        char name[192];
        check_bf16(&w->lm_head, "lm_head.weight", 0);
        snprintf(name, sizeof name, "%slayers.3.self_attn.k_proj.weight", how->prefix);
        check_bf16(&w->layer[3].attention.k_proj, name, 0);
        check_experts(&w->layer[2].moe, how, 2);
        /* Zero-centred norms get their 1, in float32; the gated norm and the rest do not. */
        snprintf(name, sizeof name, "%slayers.1.input_layernorm.weight", how->prefix);
        assert_true(w->layer[1].input_norm[9] == 1.0f + bf16_to_f32(value_of(name, 9)));
        snprintf(name, sizeof name, "%slayers.3.self_attn.k_norm.weight", how->prefix);
        assert_true(w->layer[3].attention.k_norm[9] == 1.0f + bf16_to_f32(value_of(name, 9)));
        snprintf(name, sizeof name, "%snorm.weight", how->prefix);
        assert_true(w->final_norm[9] == 1.0f + bf16_to_f32(value_of(name, 9)));
        snprintf(name, sizeof name, "%slayers.1.linear_attn.norm.weight", how->prefix);
        assert_true(w->layer[1].deltanet.norm[9] == bf16_to_f32(value_of(name, 9)));
        snprintf(name, sizeof name, "%slayers.1.linear_attn.A_log", how->prefix);
        assert_true(w->layer[1].deltanet.a_log[3] ==
                    bf16_to_f32(value_of(name, 3)) + (how->float_decay ? 0x1p-20f : 0));
        snprintf(name, sizeof name, "%slayers.1.linear_attn.conv1d.weight", how->prefix);
        assert_true(w->layer[1].deltanet.conv[4 * 7 + 2] == bf16_to_f32(value_of(name, 4 * 7 + 2)));
        ckpt_free(c);
        fx_remove(path);
    }
}

/* ---- quantised at load and by packing ---------------------------------------------------------
 */

static void check_quantised(const struct mat *wide, const struct mat *narrow, int32_t bits) {
    assert_int_equal(wide->bits, 16);
    assert_int_equal(narrow->bits, bits);
    size_t groups = (size_t)wide->rows * (size_t)(wide->cols / 64);
    size_t bytes = groups * 64 * (size_t)bits / 8;
    uint8_t *codes = malloc(bytes);
    uint16_t *scales = malloc(2 * groups), *biases = malloc(2 * groups);
    assert_int_equal(quantise_groups(wide->data, groups, bits, codes, scales, biases), SIZE_MAX);
    assert_memory_equal(codes, narrow->data, bytes);
    assert_memory_equal(scales, narrow->scales, 2 * groups);
    assert_memory_equal(biases, narrow->biases, 2 * groups);
    free(codes);
    free(scales);
    free(biases);
}

/* Every matrix quantised, every norm 1 + w rounded to bfloat16 as a converted file stores it. */
static void check_against_bf16(const struct ckpt *wide, const struct ckpt *narrow) {
    const struct weights *a = ckpt_weights(wide), *b = ckpt_weights(narrow);
    struct tensor_walk walk;
    tensor_walk_start(&walk, a->shape, a->layers);
    while (tensor_walk_next(&walk)) {
        const struct tensor_role *r = walk.role;
        const struct mat *m = tensor_mats(r, a, walk.layer);
        int32_t bits = r->class == CLASS_ROUTER || r->class == CLASS_SHARED_GATE ? 8 : 4;
        for (int32_t i = 0; m && i < tensor_items(r, a->shape); i++) {
            check_quantised(&m[i], &tensor_mats(r, b, walk.layer)[i], bits);
        }
        if (m) continue;
        const float *x = tensor_floats(r, a, walk.layer), *y = tensor_floats(r, b, walk.layer);
        for (int32_t i = 0; i < tensor_rows(r, a->shape) * tensor_cols(r, a->shape); i++) {
            float want = r->zero_centred ? bf16_to_f32(f32_to_bf16(x[i])) : x[i];
            assert_true(y[i] == want);
        }
    }
}

static void check_all_ways(const char *folder) {
    struct ckpt *wide = fx_load_ok(folder, true), *narrow = fx_load_ok(folder, false);
    assert_string_equal(ckpt_kind(narrow), "Hugging Face bf16 folder");
    check_against_bf16(wide, narrow);
    assert_string_not_equal(ckpt_identity(wide), ckpt_identity(narrow));
    assert_true(ckpt_weights(narrow)->bytes * 7 / 2 < ckpt_weights(wide)->bytes);
    ckpt_free(narrow);
    lily_err err = {0};
    const char *packed = fx_path("packed.lily");
    if (ckpt_pack(folder, packed, NULL, &err) != 0) fail_msg("%s", err.msg);
    narrow = fx_load_ok(packed, false);
    check_against_bf16(wide, narrow);
    ckpt_free(narrow);
    ckpt_free(wide);
}

static void test_quantised(void **state) {
    (void)state;
    check_all_ways(make_folder("q", &(struct layout){"model.language_model.", false, false}));
}

static void test_bad_weight(void **state) {
    (void)state;
    const char *path = make_folder("bad", &(struct layout){"model.", false, false});
    struct fx_tensors t = fx_open(fx_path("bad/model.safetensors"));
    uint16_t nan = 0x7fc0;
    memcpy(fx_tensor(&t, "model.layers.2.mlp.experts.gate_up_proj", NULL) + 2 * 123456, &nan, 2);
    fx_store(fx_path("bad/model.safetensors"), &t, 0);
    lily_err err = {0};
    struct ckpt *c;
    for (int keep = 0; keep < 2; keep++) {
        assert_int_equal(fx_load(path, keep, &c, &err), LILY_EFORMAT);
        fx_message_has(err.msg, "bad/model.safetensors: tensor "
                                "model.layers.2.mlp.experts.gate_up_proj: found a value");
        fx_message_has(err.msg, "at index 123456, expected finite numbers; ");
    }
    mkdir(fx_path("out"), 0755);
    assert_int_equal(ckpt_pack(path, fx_path("out/x.lily"), NULL, &err), LILY_EFORMAT);
    fx_message_has(err.msg, "at index 123456");
    fx_only(fx_path("out"), NULL);
}

/* ---- the reference checkpoint ---------------------------------------------------------------- */

static void test_reference(void **state) {
    char path[512];
    snprintf(path, sizeof path, "%s/golden", *state ? (const char *)*state : "");
    if (!*state || !file_is_dir(path)) {
        print_message("%s is absent\n", path);
        skip();
    }
    struct ckpt *c = fx_load_ok(path, true);
    const struct weights *w = ckpt_weights(c);
    assert_ptr_equal(w->shape, &shape_mini);
    assert_int_equal(w->layers, 8);
    assert_int_equal(w->bytes, 43475040); /* total_size of its index */
    assert_int_equal(w->vocab_used, 4096);
    fx_message_has(fx_warnings, "no tokenizer.json");
    ckpt_free(c);
    check_all_ways(path);
    lily_err err = {0};
    char *text;
    assert_int_equal(ckpt_inspect(path, NULL, &text, &err), 0);
    fx_message_has(text, "\"ok\": true");
    free(text);
}

int main(void) {
    /* The reference folder's place is the one thing a test takes from its environment. */
    char *reference = getenv("REFERENCE");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_quantised),
        cmocka_unit_test(test_bad_weight),
        cmocka_unit_test_prestate(test_reference, reference),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}

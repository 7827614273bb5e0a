/* Synthetic checkpoints: deterministic, the same as folder and as packed file, sane statistics; and
 * the arithmetic of the real shape's sizes, without writing 20 GB. */
#include "ckpt_fixture.h"

#include <math.h>

#include "ckpt/packed.h"
#include "ckpt/synth_texts.h"
#include "ckpt/table.h"

static void synth(const char *out, uint64_t seed, bool packed) {
    lily_err err = {0};
    struct ckpt_synth_options o = {.shape = "mini", .layers = 4, .seed = seed, .packed = packed};
    if (ckpt_synth(out, &o, &err) != 0) fail_msg("%s", err.msg);
}

static void same_file(const char *a, const char *b, bool same) {
    size_t n, m;
    char *x = fx_read(a, &n), *y = fx_read(b, &m);
    assert_int_equal(n == m && memcmp(x, y, n) == 0, same);
    free(x);
    free(y);
}

static void test_deterministic(void **state) {
    (void)state;
    synth(fx_path("a"), 1, false);
    synth(fx_path("b"), 1, false);
    synth(fx_path("c"), 2, false);
    same_file(fx_path("a/model.safetensors"), fx_path("b/model.safetensors"), true);
    same_file(fx_path("a/model.safetensors"), fx_path("c/model.safetensors"), false);
    same_file(fx_path("a/tokenizer.json"), fx_path("c/tokenizer.json"), true);
}

/* Packing the folder gives the sections of the packed file. */
static void test_folder_equals_packed(void **state) {
    (void)state;
    lily_err err = {0};
    synth(fx_path("f"), 7, false);
    synth(fx_path("p.lily"), 7, true);
    assert_int_equal(ckpt_pack(fx_path("f"), fx_path("q.lily"), NULL, &err), 0);
    json_t *sections[2];
    const char *const files[] = {"p.lily", "q.lily"};
    for (int i = 0; i < 2; i++) {
        size_t n;
        char *data = fx_read(fx_path("%s", files[i]), &n);
        json_t *root = json_loadb(data + 64, *(uint32_t *)(void *)(data + 12), 0, NULL);
        sections[i] = json_incref(json_object_get(root, "sections"));
        json_decref(root);
        free(data);
    }
    assert_true(json_array_size(sections[0]) == 3 + 4 * 2);
    assert_true(json_equal(sections[0], sections[1]));
    json_decref(sections[0]);
    json_decref(sections[1]);
}

struct moments {
    double sum, squares, n, negative_scales, groups;
};

static void add_matrix(struct moments *s, const struct mat *m) {
    float row[2048];
    for (int32_t r = 0; r < m->rows; r++) {
        mat_row(m, r, row);
        for (int32_t i = 0; i < m->cols; i++) {
            assert_true(isfinite(row[i]));
            s->sum += (double)row[i];
            s->squares += (double)row[i] * (double)row[i];
        }
        s->n += m->cols;
        for (int32_t g = 0; g < m->cols / 64; g++) {
            s->negative_scales += m->scales[(size_t)r * (size_t)(m->cols / 64) + (size_t)g] >> 15;
            s->groups++;
        }
    }
}

static void check_spread(const struct mat *m, int32_t n, double want) {
    struct moments s = {0};
    for (int32_t i = 0; i < n; i++) add_matrix(&s, &m[i]);
    double mean = s.sum / s.n, spread = sqrt(s.squares / s.n - mean * mean);
    assert_true(fabs(mean) < 0.05 * want);
    assert_true(spread > 0.9 * want && spread < 1.1 * want);
    if (s.groups > 500) {
        double share = s.negative_scales / s.groups;
        assert_true(share > 0.4 && share < 0.6);
    }
}

static void check_floats(const float *v, int32_t n, double low, double high) {
    assert_non_null(v);
    double least = 1e9, most = -1e9;
    for (int32_t i = 0; i < n; i++) {
        least = fmin(least, (double)v[i]);
        most = fmax(most, (double)v[i]);
    }
    assert_true(least >= low && most <= high);
    assert_true(n < 8 || least < most);
}

static void test_statistics(void **state) {
    (void)state;
    synth(fx_path("s"), 5, false);
    struct ckpt *c = fx_load_ok(fx_path("s"), false);
    const struct weights *w = ckpt_weights(c);
    check_spread(&w->embed, 1, 0.5);
    check_spread(&w->lm_head, 1, 1 / sqrt(256));
    const struct layer_weights *gdn = &w->layer[0], *att = &w->layer[3];
    check_spread(&gdn->moe.router, 1, 3 / sqrt(256));
    check_spread(gdn->moe.gate, 32, 1 / sqrt(256));
    check_spread(gdn->moe.down, 32, 1 / sqrt(64));
    check_spread(&gdn->deltanet.in_proj_qkv, 1, 1 / sqrt(256));
    check_spread(&gdn->deltanet.out_proj, 1, 1 / sqrt(512));
    check_spread(&att->attention.o_proj, 1, 1 / sqrt(2048));
    check_floats(gdn->input_norm, 256, 0.1, 1.9);
    check_floats(gdn->deltanet.norm, 128, 0.1, 1.9);
    check_floats(gdn->deltanet.a_log, 4, -0.7, 2.75);
    check_floats(gdn->deltanet.dt_bias, 4, -4.5, 0.5);
    check_floats(gdn->deltanet.conv, 1024 * 4, -2.5, 2.5);
    check_floats(att->attention.q_norm, 256, 0.1, 1.9);
    /* Rows differ: no two experts, and no two rows of one, are copies. */
    float x[256], y[256];
    mat_row(&gdn->moe.gate[0], 0, x);
    mat_row(&gdn->moe.gate[1], 0, y);
    assert_memory_not_equal(x, y, sizeof x);
    mat_row(&gdn->moe.gate[0], 1, y);
    assert_memory_not_equal(x, y, sizeof x);
    ckpt_free(c);
}

static void test_tokenizer(void **state) {
    (void)state;
    synth(fx_path("t"), 5, false);
    json_t *root = fx_read_json(fx_path("t/tokenizer.json"));
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    assert_int_equal(json_object_size(vocab), 4040); /* each id below the control tokens its own */
    /* GPT-2's alphabet: '!' is 0, 'a' 64, space is U+0120, newline U+010A (198 in the real one). */
    assert_int_equal(json_integer_value(json_object_get(vocab, "!")), 0);
    assert_int_equal(json_integer_value(json_object_get(vocab, "a")), 64);
    assert_int_equal(json_integer_value(json_object_get(vocab, "\xc4\xa0")), 220);
    assert_int_equal(json_integer_value(json_object_get(vocab, "\xc4\x8a")), 198);
    json_t *added = json_object_get(root, "added_tokens");
    assert_int_equal(json_array_size(added), 33);
    json_t *end = json_array_get(added, 2);
    assert_string_equal(json_string_value(json_object_get(end, "content")), "<|im_end|>");
    assert_int_equal(json_integer_value(json_object_get(end, "id")), 4042);
    json_decref(root);
    /* The real shape's published ids: <|im_end|> is 248046, 248077 the first without a token. */
    struct texts texts;
    int32_t used;
    lily_err err = {0};
    assert_int_equal(synth_texts_make(&shape_qwen36_35b_a3b, 40, &texts, &used, &err), 0);
    assert_int_equal(used, 248077);
    fx_message_has(texts.file[TEXT_GENERATION_CONFIG].data, "248046");
    synth_texts_free(&texts);
}

static int32_t recipe(const void *arg, const struct tensor_role *r, int32_t layer) {
    (void)arg;
    (void)layer;
    return r->bits;
}

/* The published checkpoint's bytes per class (MLX 4-bit, small tensors in bfloat16). */
static void test_real_sizes(void **state) {
    (void)state;
    const struct shape *s = &shape_qwen36_35b_a3b;
    const uint64_t published[CLASS_COUNT] = {
        [CLASS_EXPERTS] = 18119393280, [CLASS_DELTANET] = 568442880, [CLASS_ATTENTION] = 153354240,
        [CLASS_LM_HEAD] = 286064640,   [CLASS_EMBED] = 286064640,    [CLASS_SHARED] = 70778880,
        [CLASS_ROUTER] = 22282240,     [CLASS_SHARED_GATE] = 87040,  [CLASS_SMALL] = 2319616,
    };
    struct packed_plan p;
    lily_err err = {0};
    assert_int_equal(packed_plan_make(s, 40, recipe, NULL, &p, &err), 0);
    uint64_t bytes[CLASS_COUNT] = {0}, total = 0;
    int tensors = 0;
    for (int i = 0; i < p.n_tensors; i++) {
        const struct packed_tensor *t = &p.tensors[i];
        bool small = t->bits == 32;
        uint64_t one = packed_code_bytes(&p, t) + 2 * packed_scale_bytes(&p, t);
        bytes[t->role->class] += (small ? one / 2 : one) * (uint64_t)tensor_items(t->role, s);
        tensors += small ? 1 : 3;
    }
    for (int i = 0; i < CLASS_COUNT; i++) {
        assert_int_equal(bytes[i], published[i]);
        total += bytes[i];
    }
    assert_int_equal(total, 19508787456);
    assert_int_equal(tensors, 1757);
    /* One expert is a whole number of pages, so the experts pack without a gap. */
    packed_plan_place(&p, PACKED_ALIGN);
    for (int i = 0; i < p.n_tensors; i++) {
        if (p.tensors[i].stride) assert_int_equal(p.tensors[i].stride, 1769472);
    }
    assert_true(p.file_bytes < 19508787456 + 4 * 1024 * 1024);
    packed_plan_free(&p);
}

/* Names of every format lead to the row they belong to. */
static void test_names(void **state) {
    (void)state;
    const struct {
        const char *name;
        enum tensor_class class;
    } names[] = {
        {"language_model.model.embed_tokens.scales", CLASS_EMBED},
        {"lm_head.weight", CLASS_LM_HEAD},
        {"model.language_model.layers.39.mlp.experts.gate_up_proj", CLASS_EXPERTS},
        {"model.layers.0.mlp.experts.255.down_proj.weight", CLASS_EXPERTS},
        {"language_model.model.layers.3.mlp.switch_mlp.up_proj.biases", CLASS_EXPERTS},
        {"model.language_model.layers.7.mlp.shared_expert_gate.weight", CLASS_SHARED_GATE},
        {"model.language_model.layers.7.mlp.shared_expert.gate_proj.weight", CLASS_SHARED},
        {"model.language_model.layers.7.mlp.gate.weight", CLASS_ROUTER},
        {"model.layers.1.linear_attn.A_log", CLASS_SMALL},
        {"model.norm.weight", CLASS_SMALL},
        {"model.layers.1.linear_attn.in_proj_a.weight", CLASS_DELTANET},
        {"model.layers.3.self_attn.q_proj.weight", CLASS_ATTENTION},
        {"model.layers.3.self_attn.q_norm.weight", CLASS_SMALL},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct tensor_role *r = tensor_role_of_name(names[i].name);
        if (!r) fail_msg("no role for %s", names[i].name);
        assert_int_equal(r->class, names[i].class);
    }
    const char *const unknown[] = {"vision_tower.blocks.0.norm1.weight",
                                   "mtp.fc.weight",
                                   "model.layers.x.mlp.gate.weight",
                                   "layers.",
                                   "",
                                   "model.layers.3.self_attn.q_proj.lora.weight"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        assert_null(tensor_role_of_name(unknown[i]));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_deterministic), cmocka_unit_test(test_folder_equals_packed),
        cmocka_unit_test(test_statistics),    cmocka_unit_test(test_tokenizer),
        cmocka_unit_test(test_real_sizes),    cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}

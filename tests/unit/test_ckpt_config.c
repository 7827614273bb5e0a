/* config.json: both published kinds are understood; every field the mathematics depends on is
 * compared; another model is refused with what was found and what to do. */
#include "ckpt_fixture.h"

#include "ckpt/config.h"
#include "ckpt/synth_texts.h"

/* The config of a synthetic checkpoint: MLX's layout with text_config and quantization. */
static json_t *mlx_config(const struct shape *s, int32_t layers) {
    struct texts t;
    int32_t used;
    lily_err err = {0};
    assert_int_equal(synth_texts_make(s, layers, &t, &used, &err), 0);
    json_t *root = json_loads(t.file[TEXT_CONFIG].data, 0, NULL);
    synth_texts_free(&t);
    assert_non_null(root);
    return root;
}

static int parse(json_t *root, struct config *c, lily_err *err) {
    char *text = json_dumps(root, 0);
    struct faults f = {.err = err};
    int rc = config_parse("x/config.json", text, strlen(text), c, &f);
    free(text);
    return rc;
}

/* Takes over root. */
static void refused(json_t *root, const char *part, const char *other) {
    struct config c;
    lily_err err = {0};
    int rc = parse(root, &c, &err);
    if (rc == 0) fail_msg("accepted, should name %s", part);
    assert_int_equal(rc, LILY_EMODEL);
    fx_message_has(err.msg, "x/config.json: found ");
    fx_message_has(err.msg, ", expected ");
    fx_message_has(err.msg, ";");
    fx_message_has(err.msg, part);
    if (other) fx_message_has(err.msg, other);
    json_decref(root);
}

static void test_mlx(void **state) {
    (void)state;
    for (int i = 0; shape_all[i]; i++) {
        json_t *root = mlx_config(shape_all[i], 8);
        struct config c;
        lily_err err = {0};
        if (parse(root, &c, &err) != 0) fail_msg("%s", err.msg);
        assert_ptr_equal(c.shape, shape_all[i]);
        assert_int_equal(c.layers, 8);
        assert_true(c.quantised);
        struct faults f = {.err = &err};
        int32_t bits;
        assert_int_equal(
            config_module_bits(&c, "language_model.model.layers.7.mlp.gate", &bits, &f), 0);
        assert_int_equal(bits, 8);
        assert_int_equal(config_module_bits(&c, "language_model.lm_head", &bits, &f), 0);
        assert_int_equal(bits, 4);
        config_close(&c);
        json_decref(root);
    }
}

static void test_text_config_alone(void **state) {
    (void)state;
    json_t *root = mlx_config(&shape_mini, 8);
    json_t *text = json_object_get(root, "text_config");
    struct config c;
    lily_err err = {0};
    if (parse(text, &c, &err) != 0) fail_msg("%s", err.msg);
    assert_ptr_equal(c.shape, &shape_mini);
    assert_false(c.quantised);
    assert_int_equal(c.bits, 16);
    config_close(&c);
    json_decref(root);
}

/* The published files, when the reference folder is there. */
static void test_published(void **state) {
    (void)state;
    const char *const names[] = {"data/config.json", "data/mlx-community-4bit/config.json"};
    const char *reference = *state;
    char path[512];
    snprintf(path, sizeof path, "%s/%s", reference ? reference : "", names[0]);
    if (!reference || !file_exists(path)) {
        print_message("%s is absent\n", path);
        skip();
    }
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", reference, names[i]);
        json_t *root = fx_read_json(path);
        struct config c;
        lily_err err = {0};
        if (parse(root, &c, &err) != 0) fail_msg("%s", err.msg);
        assert_ptr_equal(c.shape, &shape_qwen36_35b_a3b);
        assert_int_equal(c.layers, 40);
        assert_int_equal(c.quantised, i == 1);
        config_close(&c);
        json_decref(root);
    }
}

static void test_every_dimension(void **state) {
    (void)state;
    const char *const keys[] = {
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_t *root = mlx_config(&shape_qwen36_35b_a3b, 40);
        json_t *text = json_object_get(root, "text_config");
        json_object_set_new(text, keys[i], json_integer(77));
        char found[64];
        snprintf(found, sizeof found, "%s 77 (expected ", keys[i]);
        refused(root, found, "Qwen3.6-35B-A3B");
        if (strcmp(keys[i], "num_experts") == 0) continue; /* missing: a dense model, see below */
        root = mlx_config(&shape_qwen36_35b_a3b, 40);
        json_object_del(json_object_get(root, "text_config"), keys[i]);
        snprintf(found, sizeof found, "%s missing", keys[i]);
        refused(root, found, NULL);
    }
}

struct change {
    const char *key;
    json_t *value;
    const char *part;
};

/* Each change alone makes another model of it. */
static void test_other_mathematics(void **state) {
    (void)state;
    struct change changes[] = {
        {"num_hidden_layers", json_integer(42), "num_hidden_layers 42"},
        {"num_hidden_layers", json_integer(6), "num_hidden_layers 6"},
        {"num_hidden_layers", json_integer(0), "num_hidden_layers 0"},
        {"num_hidden_layers", json_string("8"), "num_hidden_layers"},
        {"full_attention_interval", json_integer(3), "full_attention_interval 3"},
        {"layer_types", json_pack("[s]", "full_attention"), "layer_types[0] = full_attention"},
        {"layer_types", json_array(), "layer_types[0] = missing"},
        {"attention_bias", json_true(), "attention_bias true"},
        {"attn_output_gate", json_false(), "attn_output_gate false"},
        {"tie_word_embeddings", json_true(), "tie_word_embeddings true"},
        {"norm_topk_prob", json_false(), "norm_topk_prob false"},
        {"hidden_act", json_string("gelu"), "hidden_act gelu"},
        {"mlp_only_layers", json_pack("[i]", 0), "mlp_only_layers"},
        {"rms_norm_eps", json_real(1e-5), "rms_norm_eps 1e-05"},
        {"rope_parameters",
         json_pack("{s:f, s:f, s:s}", "rope_theta", 1e7, "partial_rotary_factor", 0.25, "rope_type",
                   "yarn"),
         "rope_type yarn"},
        {"rope_parameters",
         json_pack("{s:f, s:f}", "rope_theta", 1e6, "partial_rotary_factor", 0.25),
         "rope_theta 1e+06"},
        {"rope_parameters",
         json_pack("{s:f, s:f}", "rope_theta", 1e7, "partial_rotary_factor", 0.5),
         "partial_rotary_factor 0.5"},
        {"model_type", json_string("qwen3_next"), "model_type qwen3_next"},
        /* Another type is told as it is, not as the 0 that it would be read as. */
        {"num_hidden_layers", json_real(8), "num_hidden_layers 8.0,"},
        {"num_hidden_layers", json_string("8"), "num_hidden_layers \"8\","},
        {"num_hidden_layers", json_integer(1000000000), "num_hidden_layers 1000000000,"},
        {"num_hidden_layers", json_null(), "num_hidden_layers null,"},
        {"full_attention_interval", json_string("4"), "full_attention_interval \"4\","},
        {"hidden_size", json_string("256"), "hidden_size \"256\" (expected 256)"},
        {"rms_norm_eps", json_string("1e-6"), "rms_norm_eps \"1e-6\","},
        {"hidden_act", json_integer(1), "hidden_act 1,"},
        {"attention_bias", json_integer(0), "attention_bias 0,"},
        {"rope_parameters",
         json_pack("{s:f, s:f, s:i}", "rope_theta", 1e7, "partial_rotary_factor", 0.25, "rope_type",
                   5),
         "rope_type 5,"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        json_t *root = mlx_config(&shape_mini, 8);
        json_object_set_new(json_object_get(root, "text_config"), changes[i].key, changes[i].value);
        refused(root, changes[i].part, NULL);
    }
}

static void test_other_models(void **state) {
    (void)state;
    /* Qwen3.6-27B: dense, model_type qwen3_5. */
    refused(json_pack("{s:s, s:{s:s, s:i, s:i}}", "model_type", "qwen3_5", "text_config",
                      "model_type", "qwen3_5_text", "hidden_size", 5120, "num_hidden_layers", 64),
            "found a dense model", "hidden_size 5120, 64 layers");
    refused(json_pack("{s:s, s:i, s:i}", "model_type", "llama", "hidden_size", 4096,
                      "num_hidden_layers", 32),
            "model_type llama", NULL);
    refused(json_object(), "model_type missing", NULL);
}

static void set_quantization(json_t *root, json_t *q) {
    json_object_set_new(root, "quantization", q);
}

static void test_other_quantisations(void **state) {
    (void)state;
    json_t *root = mlx_config(&shape_mini, 8);
    set_quantization(root, json_pack("{s:i, s:i}", "bits", 8, "group_size", 64));
    refused(root, "8 bits in groups of 64", "4 bits");
    root = mlx_config(&shape_mini, 8);
    set_quantization(root,
                     json_pack("{s:i, s:i, s:s}", "bits", 4, "group_size", 32, "mode", "mxfp4"));
    refused(root, "mxfp4", "affine");
    root = mlx_config(&shape_mini, 8);
    set_quantization(root, json_pack("{s:i, s:i}", "bits", 4, "group_size", 128));
    refused(root, "groups of 128", NULL);
    root = mlx_config(&shape_mini, 8);
    json_object_del(root, "quantization");
    json_object_set_new(root, "quantization_config", json_pack("{s:s}", "quant_method", "fp8"));
    refused(root, "quantised by fp8", NULL);
    /* Of another type: told as it is, and no reason to take the weights for unquantised. */
    root = mlx_config(&shape_mini, 8);
    set_quantization(root, json_pack("{s:f, s:i}", "bits", 4.0, "group_size", 64));
    refused(root, "affine with 4.0 bits in groups of 64", NULL);
    root = mlx_config(&shape_mini, 8);
    set_quantization(root, json_pack("{s:i, s:i, s:i}", "bits", 4, "group_size", 64, "mode", 5));
    refused(root, "quantization 5 with 4 bits", NULL);
    root = mlx_config(&shape_mini, 8);
    set_quantization(root, json_pack("[i]", 4));
    refused(root, "quantization [4]", NULL);
}

/* An override of a kind that no kernel knows is refused where the module is used. */
static void test_overrides(void **state) {
    (void)state;
    json_t *root = mlx_config(&shape_mini, 8);
    json_t *q = json_object_get(root, "quantization");
    json_object_set_new(q, "six", json_pack("{s:i, s:i}", "bits", 6, "group_size", 64));
    json_object_set_new(q, "wide", json_pack("{s:i, s:i}", "bits", 8, "group_size", 32));
    json_object_set_new(q, "mx", json_pack("{s:i, s:s}", "bits", 4, "mode", "mxfp4"));
    json_object_set_new(q, "odd", json_integer(4));
    json_object_set_new(q, "off", json_false());
    json_object_set_new(q, "on", json_true());
    struct config c;
    lily_err err = {0};
    assert_int_equal(parse(root, &c, &err), 0);
    json_decref(root);
    struct faults f = {.err = &err};
    int32_t bits;
    const char *const bad[] = {"six", "wide", "mx", "odd"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(config_module_bits(&c, bad[i], &bits, &f), LILY_EMODEL);
        fx_message_has(err.msg, bad[i]);
        fx_message_has(err.msg, i == 3 ? "found 4," : i == 0 ? "6 bits" : "affine");
    }
    assert_int_equal(config_module_bits(&c, "off", &bits, &f), 0);
    assert_int_equal(bits, 16);
    assert_int_equal(config_module_bits(&c, "on", &bits, &f), 0);
    assert_int_equal(bits, 4);
    config_close(&c);
}

static void test_wrong_json(void **state) {
    (void)state;
    const char *const texts[] = {"", "{", "[]", "{\"a\":1,\"a\":1}", "{\"a\":\"\xc3\"}"};
    for (int i = 0; i < 5; i++) {
        struct config c;
        lily_err err = {0};
        struct faults f = {.err = &err};
        assert_int_equal(config_parse("x/config.json", texts[i], strlen(texts[i]), &c, &f),
                         LILY_EFORMAT);
        fx_message_has(err.msg, "x/config.json: found ");
    }
}

int main(void) {
    /* The reference folder's place is the one thing a test takes from its environment. */
    char *reference = getenv("REFERENCE");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mlx),
        cmocka_unit_test(test_text_config_alone),
        cmocka_unit_test_prestate(test_published, reference),
        cmocka_unit_test(test_every_dimension),
        cmocka_unit_test(test_other_mathematics),
        cmocka_unit_test(test_other_models),
        cmocka_unit_test(test_other_quantisations),
        cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_wrong_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

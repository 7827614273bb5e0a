/* Folders: a right one loads completely; every damage is refused by name, and never a crash. */
#include "ckpt_fixture.h"

#include "base/bf16.h"

static const char model[] = "model.safetensors";
static const char index_file[] = "model.safetensors.index.json";
#define LAYER "language_model.model.layers."

/* Edits the single shard (and nothing else) of a fresh folder. */
static const char *damaged(const char *name, void (*edit)(struct fx_tensors *t), size_t pad) {
    const char *path = fx_synth(name);
    struct fx_tensors t = fx_open(fx_path("%s/%s", name, model));
    edit(&t);
    fx_store(fx_path("%s/%s", name, model), &t, pad);
    return path;
}

/* The same, and the index follows the shard. */
static const char *rebuilt(const char *name, void (*edit)(struct fx_tensors *t), size_t pad) {
    const char *path = damaged(name, edit, pad);
    struct fx_tensors t = fx_open(fx_path("%s/%s", name, model));
    json_t *map = json_object();
    const char *key;
    json_t *value;
    json_object_foreach(t.header, key, value) {
        if (*key != '_') json_object_set_new(map, key, json_string(model));
    }
    fx_write_json(fx_path("%s/%s", name, index_file), json_pack("{s:o}", "weight_map", map));
    json_decref(t.header);
    free(t.data);
    return path;
}

static void edit_config(const char *name, void (*edit)(json_t *root)) {
    const char *path = fx_path("%s/config.json", name);
    json_t *root = fx_read_json(path);
    edit(root);
    fx_write_json(path, root);
}

static void nothing(struct fx_tensors *t) {
    (void)t;
}

/* ---- right folders --------------------------------------------------------------------------- */

static void check_matrix(const struct mat *m, int32_t rows, int32_t cols, int32_t bits) {
    assert_int_equal(m->rows, rows);
    assert_int_equal(m->cols, cols);
    assert_int_equal(m->bits, bits);
    assert_non_null(m->data);
    assert_non_null(m->scales);
    assert_non_null(m->biases);
}

static void test_everything_is_bound(void **state) {
    (void)state;
    const char *path = fx_synth("whole");
    struct ckpt *c = fx_load_ok(path, false);
    assert_string_equal(fx_warnings, "");
    assert_string_equal(ckpt_kind(c), "MLX 4-bit folder");
    assert_string_equal(ckpt_path(c), path);
    const struct weights *w = ckpt_weights(c);
    const struct shape *s = w->shape;
    assert_ptr_equal(s, &shape_mini);
    assert_int_equal(w->layers, 4);
    check_matrix(&w->embed, s->vocab, s->hidden, 4);
    check_matrix(&w->lm_head, s->vocab, s->hidden, 4);
    assert_non_null(w->final_norm);
    for (int32_t l = 0; l < 4; l++) {
        const struct layer_weights *x = &w->layer[l];
        assert_non_null(x->input_norm);
        assert_non_null(x->post_norm);
        check_matrix(&x->moe.router, s->experts, s->hidden, 8);
        check_matrix(&x->moe.shared_gate, 1, s->hidden, 8);
        check_matrix(&x->moe.shared_gate_proj, s->shared_width, s->hidden, 4);
        check_matrix(&x->moe.shared_up_proj, s->shared_width, s->hidden, 4);
        check_matrix(&x->moe.shared_down_proj, s->hidden, s->shared_width, 4);
        for (int32_t e = 0; e < s->experts; e++) {
            check_matrix(&x->moe.gate[e], s->expert_width, s->hidden, 4);
            check_matrix(&x->moe.up[e], s->expert_width, s->hidden, 4);
            check_matrix(&x->moe.down[e], s->hidden, s->expert_width, 4);
        }
        if (l == 3) {
            check_matrix(&x->attention.q_proj, 2 * s->q_dim, s->hidden, 4);
            check_matrix(&x->attention.k_proj, s->kv_dim, s->hidden, 4);
            check_matrix(&x->attention.v_proj, s->kv_dim, s->hidden, 4);
            check_matrix(&x->attention.o_proj, s->hidden, s->q_dim, 4);
            assert_non_null(x->attention.q_norm);
            assert_non_null(x->attention.k_norm);
            assert_null(x->deltanet.conv);
        } else {
            check_matrix(&x->deltanet.in_proj_qkv, s->conv_dim, s->hidden, 4);
            check_matrix(&x->deltanet.in_proj_z, s->gdn_v_dim, s->hidden, 4);
            check_matrix(&x->deltanet.in_proj_b, s->gdn_v_heads, s->hidden, 4);
            check_matrix(&x->deltanet.in_proj_a, s->gdn_v_heads, s->hidden, 4);
            check_matrix(&x->deltanet.out_proj, s->hidden, s->gdn_v_dim, 4);
            assert_non_null(x->deltanet.conv);
            assert_non_null(x->deltanet.a_log);
            assert_non_null(x->deltanet.dt_bias);
            assert_non_null(x->deltanet.norm);
            assert_null(x->attention.q_norm);
        }
    }
    size_t size = 0;
    assert_non_null(ckpt_text(c, "tokenizer.json", &size));
    assert_true(size > 1000);
    assert_null(ckpt_text(c, "chat_template.jinja", &size));
    assert_null(ckpt_text(c, "../config.json", NULL));
    assert_int_equal(w->vocab_used, 4040 + 33);
    ckpt_free(c);
}

/* Bytes in the file are where the weights point, for a tensor in the middle of others. */
static void test_values_are_the_files(void **state) {
    (void)state;
    const char *path = fx_synth("values");
    struct ckpt *c = fx_load_ok(path, false);
    struct fx_tensors t = fx_open(fx_path("values/%s", model));
    const struct mat *up = &ckpt_weights(c)->layer[2].moe.up[5];
    const uint8_t *codes = fx_tensor(&t, LAYER "2.mlp.switch_mlp.up_proj.weight", NULL);
    const uint8_t *scales = fx_tensor(&t, LAYER "2.mlp.switch_mlp.up_proj.scales", NULL);
    const uint8_t *biases = fx_tensor(&t, LAYER "2.mlp.switch_mlp.up_proj.biases", NULL);
    assert_memory_equal(up->data, codes + 5 * 64 * 128, 64 * 128);
    assert_memory_equal(up->scales, scales + 5 * 64 * 4 * 2, 64 * 4 * 2);
    assert_memory_equal(up->biases, biases + 5 * 64 * 4 * 2, 64 * 4 * 2);
    const uint8_t *norm = fx_tensor(&t, LAYER "1.input_layernorm.weight", NULL);
    for (int i = 0; i < 256; i++) {
        float want = bf16_to_f32((uint16_t)(norm[2 * i] | norm[2 * i + 1] << 8));
        assert_true(ckpt_weights(c)->layer[1].input_norm[i] == want); /* converted: no 1 added */
    }
    json_decref(t.header);
    free(t.data);
    ckpt_free(c);
}

/* Tensor data at odd addresses: the same values, no undefined behaviour. */
static void test_odd_addresses(void **state) {
    (void)state;
    struct ckpt *even = fx_load_ok(fx_synth("even"), false);
    struct ckpt *odd = fx_load_ok(damaged("odd", nothing, 1), false);
    const struct weights *a = ckpt_weights(even), *b = ckpt_weights(odd);
    float x[256], y[256];
    for (int32_t r = 0; r < 64; r++) {
        mat_row(&a->layer[3].moe.gate[31], r, x);
        mat_row(&b->layer[3].moe.gate[31], r, y);
        assert_memory_equal(x, y, sizeof x);
    }
    assert_true(((uintptr_t)b->embed.scales & 1) == 0);
    assert_memory_equal(a->layer[0].deltanet.a_log, b->layer[0].deltanet.a_log, 4 * 4);
    ckpt_free(even);
    ckpt_free(odd);
}

static void add_vision_and_mtp(struct fx_tensors *t) {
    fx_append(t, "vision_tower.patch_embed.proj.bias", "BF16", 1152, 2);
    fx_append(t, "vision_tower.merger.norm.bias", "F32", 7, 4);
    fx_append(t, "mtp.norm.weight", "BF16", 256, 2);
}

static void test_skipped_knowingly(void **state) {
    (void)state;
    struct ckpt *c = fx_load_ok(rebuilt("skips", add_vision_and_mtp, 0), false);
    fx_message_has(fx_warnings, "skipped 2 vision tensors");
    fx_message_has(fx_warnings, "vision_tower.merger.norm.bias");
    fx_message_has(fx_warnings, "skipped 1 tensors of the multi-token-prediction head");
    fx_message_has(fx_warnings, "mtp.norm.weight");
    ckpt_free(c);
}

static void test_without_index(void **state) {
    (void)state;
    const char *path = fx_synth("noindex");
    unlink(fx_path("noindex/%s", index_file));
    ckpt_free(fx_load_ok(path, false));
}

static void test_templates(void **state) {
    (void)state;
    const char *path = fx_synth("template");
    fx_write_text(fx_path("template/chat_template.jinja"), "{{ messages }} preserve_thinking");
    struct ckpt *c = fx_load_ok(path, false);
    fx_message_has(fx_warnings, "its chat template (sha256 ");
    fx_message_has(fx_warnings, "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259");
    assert_null(strstr(fx_warnings, "Qwen3.5"));
    ckpt_free(c);
    /* Inside tokenizer_config.json, and of the older family: the same shape, so it runs. */
    unlink(fx_path("template/chat_template.jinja"));
    json_t *config = fx_read_json(fx_path("template/tokenizer_config.json"));
    json_object_set_new(config, "chat_template", json_string("{{ messages }}"));
    fx_write_json(fx_path("template/tokenizer_config.json"), config);
    c = fx_load_ok(path, false);
    fx_message_has(fx_warnings, "its chat template (sha256 ");
    fx_message_has(fx_warnings, "looks like Qwen3.5-35B-A3B");
    ckpt_free(c);
}

/* The name of the folder tells as well; the checkpoint runs. */
static void test_older_sibling(void **state) {
    (void)state;
    struct ckpt *c = fx_load_ok(fx_synth("Qwen3.5-35B-A3B-4bit"), false);
    fx_message_has(fx_warnings, "looks like Qwen3.5-35B-A3B, which has the shape of");
    ckpt_free(c);
}

static void test_vocabulary(void **state) {
    (void)state;
    const char *path = fx_synth("vocab");
    unlink(fx_path("vocab/tokenizer_config.json"));
    json_t *t = fx_read_json(fx_path("vocab/tokenizer.json"));
    json_object_del(t, "added_tokens");
    json_t *ids = json_object_get(json_object_get(t, "model"), "vocab"), *id;
    const char *token;
    void *next;
    json_object_foreach_safe(ids, next, token, id) { /* the bytes alone */
        if (json_integer_value(id) >= 256) json_object_del(ids, token);
    }
    fx_write_json(fx_path("vocab/tokenizer.json"), t);
    struct ckpt *c = fx_load_ok(path, false);
    assert_int_equal(ckpt_weights(c)->vocab_used, 256);
    ckpt_free(c);
    fx_write_text(fx_path("vocab/tokenizer_config.json"),
                  "{\"added_tokens_decoder\":{\"300\":{\"content\":\"<x>\"}}}");
    c = fx_load_ok(path, false);
    assert_int_equal(ckpt_weights(c)->vocab_used, 301);
    ckpt_free(c);
    fx_write_text(fx_path("vocab/tokenizer_config.json"),
                  "{\"added_tokens_decoder\":{\"4096\":{\"content\":\"<x>\"}}}");
    fx_refused(path, LILY_EFORMAT, "tokenizer.json", "4096", "4095", NULL);
    fx_write_text(fx_path("vocab/tokenizer_config.json"), "{");
    fx_refused(path, LILY_EFORMAT, "tokenizer_config.json", NULL);
    unlink(fx_path("vocab/tokenizer_config.json"));
    unlink(fx_path("vocab/tokenizer.json"));
    c = fx_load_ok(path, false);
    assert_int_equal(ckpt_weights(c)->vocab_used, 4096);
    fx_message_has(fx_warnings, "no tokenizer.json");
    ckpt_free(c);
}

/* Without a path: the stand-in of this build, or a clear word that there is none. */
static void test_standin(void **state) {
    (void)state;
    lily_err err = {0};
    struct ckpt *c = NULL;
    int rc = fx_load(NULL, false, &c, &err);
#ifdef LILY_EMBEDDED_STANDIN
    if (rc != 0) fail_msg("%s", err.msg);
    assert_string_equal(ckpt_kind(c), "embedded");
    assert_string_equal(fx_warnings, "");
    const struct weights *w = ckpt_weights(c);
    assert_ptr_equal(w->shape, &shape_mini);
    assert_int_equal(w->layers, shape_mini.layers);
    assert_true(w->vocab_used > 256 && w->vocab_used <= shape_mini.vocab);
    assert_non_null(ckpt_text(c, "generation_config.json", NULL));
    ckpt_free(c);
#else
    if (rc == 0) { /* models/mini lies beside the program */
        assert_string_equal(ckpt_kind(c), "MLX 4-bit folder");
        ckpt_free(c);
        return;
    }
    assert_int_equal(rc, LILY_ENOENT);
    fx_message_has(err.msg, "this build has no embedded stand-in");
    fx_message_has(err.msg, "give a checkpoint with -m");
#endif
}

/* ---- files and index ------------------------------------------------------------------------- */

static void test_missing_files(void **state) {
    (void)state;
    const char *path = fx_synth("missing");
    lily_err err = {0};
    struct ckpt *c;
    assert_int_equal(fx_load(fx_path("nowhere"), false, &c, &err), LILY_ENOENT);
    fx_message_has(err.msg, "nowhere: found nothing there, expected ");
    assert_int_equal(fx_load(fx_path("missing/config.json"), false, &c, &err), LILY_EMODEL);
    fx_message_has(err.msg, "unknown kind");
    assert_int_equal(fx_load(fx_path("missing/%s", model), false, &c, &err), LILY_EINVAL);
    fx_message_has(err.msg, "one safetensors file, expected a checkpoint folder");
    unlink(fx_path("missing/%s", model));
    fx_refused(path, LILY_ENOENT, "missing/model.safetensors", "shard", index_file, NULL);
    unlink(fx_path("missing/%s", index_file));
    fx_refused(path, LILY_ENOENT, "neither", NULL);
    unlink(fx_path("missing/config.json"));
    fx_refused(path, LILY_ENOENT, "config.json", NULL);
}

static void test_gguf(void **state) {
    (void)state;
    fx_write_text(fx_path("model.gguf"), "GGUF\3");
    fx_refused(fx_path("model.gguf"), LILY_EMODEL, "a GGUF file", NULL);
}

static void test_cut_by_one_byte(void **state) {
    (void)state;
    const char *path = fx_synth("cut");
    const char *shard = fx_path("cut/%s", model);
    size_t n;
    char *data = fx_read(shard, &n);
    fx_write(shard, data, n - 1);
    fx_refused(path, LILY_EFORMAT, "cut/model.safetensors", "tensor language_model.lm_head.biases",
               "cut short", NULL);
    fx_write(shard, data, n / 2);
    fx_refused(path, LILY_EFORMAT, "cut/model.safetensors", "cut short", NULL);
    fx_write(shard, data, 100);
    fx_refused(path, LILY_EFORMAT, "cut/model.safetensors", "found a header of", NULL);
    fx_write(shard, data, 0);
    fx_refused(path, LILY_EFORMAT, "cut/model.safetensors", "found 0 bytes", NULL);
    char *longer = malloc(n + 1);
    memcpy(longer, data, n);
    longer[n] = 0;
    fx_write(shard, longer, n + 1);
    fx_refused(path, LILY_EFORMAT, "cut/model.safetensors", "found 1 bytes after", NULL);
    free(longer);
    free(data);
}

static void set_in_index(const char *folder, const char *tensor, json_t *shard) {
    json_t *root = fx_read_json(fx_path("%s/%s", folder, index_file));
    json_object_set_new(json_object_get(root, "weight_map"), tensor, shard);
    fx_write_json(fx_path("%s/%s", folder, index_file), root);
}

static void test_index(void **state) {
    (void)state;
    const char *path = fx_synth("index");
    set_in_index("index", "language_model.model.extra", json_string(model));
    fx_refused(path, LILY_EFORMAT, "language_model.model.extra", "no such tensor", NULL);
    fx_remove(path);
    path = fx_synth("index");
    set_in_index("index", "language_model.model.norm.weight", json_string("../secret"));
    fx_refused(path, LILY_EFORMAT, "language_model.model.norm.weight", "no plain file name", NULL);
    set_in_index("index", "language_model.model.norm.weight", json_integer(1));
    fx_refused(path, LILY_EFORMAT, "no plain file name", NULL);
    set_in_index("index", "language_model.model.norm.weight", json_string("other.safetensors"));
    fx_refused(path, LILY_ENOENT, "other.safetensors", "shard", NULL);

    json_t *root = fx_read_json(fx_path("index/%s", index_file));
    json_object_del(json_object_get(root, "weight_map"), "language_model.model.norm.weight");
    fx_write_json(fx_path("index/%s", index_file), root);
    fx_refused(path, LILY_EFORMAT, "language_model.model.norm.weight", "in the file only", NULL);
    fx_write_text(fx_path("index/%s", index_file), "{\"weight_map\":[]}");
    fx_refused(path, LILY_EFORMAT, index_file, "weight_map", NULL);
    fx_write_text(fx_path("index/%s", index_file), "{\"weight_map\":{\"\xff\":1}}");
    fx_refused(path, LILY_EFORMAT, index_file, "UTF-8", NULL);
}

/* Two shards: a tensor in the wrong one, and in both. */
static void test_two_shards(void **state) {
    (void)state;
    const char *path = fx_synth("two");
    static const char head[] = "{\"language_model.model.norm.weight\":{\"dtype\":\"BF16\","
                               "\"shape\":[256],\"data_offsets\":[0,512]}}";
    uint64_t header = sizeof head - 1;
    struct buf b = {0};
    char zeros[512] = {0};
    assert_true(buf_append(&b, &header, 8));
    assert_true(buf_puts(&b, head));
    assert_true(buf_append(&b, zeros, sizeof zeros));
    fx_write(fx_path("two/second.safetensors"), b.data, b.len);
    buf_free(&b);
    set_in_index("two", "language_model.model.norm.weight", json_string("second.safetensors"));
    fx_refused(path, LILY_EFORMAT, "language_model.model.norm.weight", "found it in ", NULL);

    set_in_index("two", "language_model.model.norm.weight", json_string(model));
    set_in_index("two", LAYER "0.input_layernorm.weight", json_string("second.safetensors"));
    fx_refused(path, LILY_EFORMAT, "tensor", NULL);
}

static void test_no_permission(void **state) {
    (void)state;
    const char *path = fx_synth("locked");
    chmod(fx_path("locked/%s", model), 0);
    /* Root may read everything: be nobody for a moment. */
    bool root = geteuid() == 0;
    chmod(fx_root, 0755);
    if (root) assert_int_equal(seteuid(65534), 0);
    lily_err err = {0};
    struct ckpt *c;
    int rc = fx_load(path, false, &c, &err);
    if (root) assert_int_equal(seteuid(0), 0);
    assert_int_equal(rc, LILY_EPERM);
    fx_message_has(err.msg, "locked/model.safetensors: cannot open: Permission denied");
}

/* What opens but is no file (a pipe would never end the reading), and what cannot be opened. */
static void test_no_regular_file(void **state) {
    (void)state;
    static const char *const names[] = {model, index_file, "config.json", "tokenizer.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char name[16];
        snprintf(name, sizeof name, "r%zu", i);
        const char *path = fx_synth(name), *file = fx_path("%s/%s", name, names[i]);
        assert_int_equal(unlink(file), 0);
        assert_int_equal(mkfifo(file, 0600), 0);
        fx_refused(path, LILY_EINVAL, file, "found a pipe", NULL);
        assert_int_equal(unlink(file), 0);
        assert_int_equal(mkdir(file, 0700), 0);
        fx_refused(path, LILY_EINVAL, file, "found a folder", NULL);
        assert_int_equal(rmdir(file), 0);
        assert_int_equal(symlink(names[i], file), 0);
        lily_err err = {0};
        struct ckpt *c;
        assert_int_equal(fx_load(path, false, &c, &err), LILY_EIO);
        fx_message_has(err.msg, file);
        fx_message_has(err.msg, "; ");
        /* Nor is what a broken link stood for taken to be absent. */
        assert_int_equal(unlink(file), 0);
        assert_int_equal(symlink("nowhere", file), 0);
        assert_int_equal(fx_load(path, false, &c, &err), LILY_ENOENT);
        fx_message_has(err.msg, names[i]);
    }
    lily_err err = {0};
    struct ckpt *c;
    const char *pipe = fx_path("pipe");
    assert_int_equal(mkfifo(pipe, 0600), 0);
    assert_int_equal(fx_load(pipe, false, &c, &err), LILY_EINVAL);
    fx_message_has(err.msg, "found a pipe, expected a regular file");
}

/* Files of no bytes: each is named, with a place that exists. */
static void test_empty_files(void **state) {
    (void)state;
    static const char *const names[] = {model, index_file, "config.json", "tokenizer.json",
                                        "tokenizer_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char name[16];
        snprintf(name, sizeof name, "e%zu", i);
        const char *path = fx_synth(name);
        fx_write_text(fx_path("%s/%s", name, names[i]), "");
        fx_refused(path, LILY_EFORMAT, names[i], NULL);
        lily_err err = {0};
        struct ckpt *c;
        assert_int_equal(fx_load(path, false, &c, &err), LILY_EFORMAT);
        if (strstr(err.msg, "line -1")) fail_msg("no such line: %s", err.msg);
    }
}

/* Names that a message must cut, and names that a terminal must not obey: messages stay one line of
 * valid UTF-8 (an inspection is JSON). */
static void long_name(struct fx_tensors *t) {
    char name[400] = "x";
    while (strlen(name) < 380) strcat(name, "\xc3\xa9");
    fx_append(t, name, "BF16", 8, 2);
}

static void long_dtype(struct fx_tensors *t) {
    char name[64] = "x";
    while (strlen(name) < 60) strcat(name, "\xc3\xa9");
    json_t *e = json_object_get(t->header, "language_model.model.norm.weight");
    json_object_set_new(e, "dtype", json_string(name));
}

static void escaping_name(struct fx_tensors *t) {
    fx_append(t, "\x1b[2J\nlily: all is well", "BF16", 8, 2);
}

static void test_messages_are_text(void **state) {
    (void)state;
    fx_refused(rebuilt("u1", long_name, 0), LILY_EMODEL, "x\xc3\xa9", NULL);
    fx_refused(rebuilt("u2", long_dtype, 0), LILY_EFORMAT, "x\xc3\xa9", NULL);
    fx_refused(rebuilt("u3", escaping_name, 0), LILY_EMODEL, "?[2J?lily: all is well", NULL);
    const char *path = rebuilt("u4\xff", nothing, 0);
    char *text = NULL;
    lily_err err = {0};
    if (ckpt_inspect(path, NULL, &text, &err) != 0) fail_msg("inspect: %s", err.msg);
    fx_message_has(text, "u4?");
    free(text);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static void missing_tensor(struct fx_tensors *t) {
    /* The last one of the file, so that no gap is left. */
    size_t n;
    fx_tensor(t, "language_model.lm_head.biases", &n);
    json_object_del(t->header, "language_model.lm_head.biases");
    t->n -= n;
}

static void extra_tensor(struct fx_tensors *t) {
    fx_append(t, LAYER "0.self_attn.q_proj.bias", "BF16", 8, 2);
}

static void fifth_layer(struct fx_tensors *t) {
    fx_append(t, LAYER "4.input_layernorm.weight", "BF16", 256, 2);
}

static void wrong_dtype(struct fx_tensors *t) {
    json_t *e = json_object_get(t->header, LAYER "1.mlp.gate.scales");
    json_object_set_new(e, "dtype", json_string("F16"));
}

static void wrong_shape(struct fx_tensors *t) {
    json_t *e = json_object_get(t->header, LAYER "1.linear_attn.out_proj.weight");
    json_object_set_new(e, "shape", json_pack("[i, i]", 128, 128));
}

static void wrong_rank(struct fx_tensors *t) {
    json_t *e = json_object_get(t->header, LAYER "1.mlp.switch_mlp.up_proj.weight");
    json_object_set_new(e, "shape", json_pack("[i, i]", 32 * 64, 32));
}

static void test_tensors(void **state) {
    (void)state;
    fx_refused(rebuilt("t1", missing_tensor, 0), LILY_EFORMAT,
               "tensor language_model.lm_head.biases", "found none", "expected BF16 [4096, 4]",
               NULL);
    fx_refused(rebuilt("t2", extra_tensor, 0), LILY_EMODEL, LAYER "0.self_attn.q_proj.bias", NULL);
    fx_refused(rebuilt("t3", fifth_layer, 0), LILY_EMODEL, LAYER "4.input_layernorm.weight",
               "a model of 4 layers", NULL);
    fx_refused(rebuilt("t4", wrong_dtype, 0), LILY_EFORMAT, "t4/model.safetensors",
               LAYER "1.mlp.gate.scales", "found F16 [32, 4], expected BF16 [32, 4]", NULL);
    fx_refused(rebuilt("t5", wrong_shape, 0), LILY_EFORMAT, LAYER "1.linear_attn.out_proj.weight",
               "found U32 [128, 128], expected U32 [256, 64]", NULL);
    fx_refused(rebuilt("t6", wrong_rank, 0), LILY_EFORMAT, "found U32 [2048, 32]",
               "expected U32 [32, 64, 32]", NULL);
}

static void put_bf16(struct fx_tensors *t, const char *name, size_t i, uint16_t value) {
    memcpy(fx_tensor(t, name, NULL) + 2 * i, &value, 2);
}

static void nan_scale(struct fx_tensors *t) {
    put_bf16(t, LAYER "2.mlp.switch_mlp.down_proj.scales", 4711, 0x7fc1);
}

static void infinite_bias(struct fx_tensors *t) {
    put_bf16(t, "language_model.model.embed_tokens.biases", 16383, 0xff80);
}

static void nan_norm(struct fx_tensors *t) {
    put_bf16(t, LAYER "3.self_attn.q_norm.weight", 255, 0xffff);
}

static void test_not_finite(void **state) {
    (void)state;
    fx_refused(damaged("n1", nan_scale, 0), LILY_EFORMAT, "n1/model.safetensors",
               LAYER "2.mlp.switch_mlp.down_proj.scales", "at index 4711,", NULL);
    fx_refused(damaged("n2", infinite_bias, 0), LILY_EFORMAT,
               "language_model.model.embed_tokens.biases", "at index 16383,", NULL);
    fx_refused(damaged("n3", nan_norm, 0), LILY_EFORMAT, LAYER "3.self_attn.q_norm.weight",
               "at index 255,", NULL);
    /* At an odd address too, where the values are copied. */
    fx_refused(damaged("n4", nan_scale, 1), LILY_EFORMAT, "at index 4711,", NULL);
}

/* ---- quantisation in config and file --------------------------------------------------------- */

static void router_default(json_t *root) {
    json_object_del(json_object_get(root, "quantization"), LAYER "1.mlp.gate");
}

static void projection_8_bit(json_t *root) {
    json_object_set_new(json_object_get(root, "quantization"), LAYER "3.self_attn.q_proj",
                        json_pack("{s:i, s:i}", "bits", 8, "group_size", 64));
}

static void all_8_bit(json_t *root) {
    json_object_set_new(json_object_get(root, "quantization"), "bits", json_integer(8));
}

static void unquantised(json_t *root) {
    json_object_del(root, "quantization");
}

static void eight_layers(json_t *root) {
    json_object_set_new(json_object_get(root, "text_config"), "num_hidden_layers", json_integer(8));
    json_object_del(json_object_get(root, "text_config"), "layer_types");
}

static void test_config_against_file(void **state) {
    (void)state;
    const struct {
        void (*edit)(json_t *root);
        int code;
        const char *part, *other;
    } cases[] = {
        {router_default, LILY_EFORMAT, LAYER "1.mlp.gate.weight", "expected U32 [32, 32]"},
        {projection_8_bit, LILY_EMODEL, LAYER "3.self_attn.q_proj", "8-bit"},
        {all_8_bit, LILY_EMODEL, "config.json", "8 bits"},
        {unquantised, LILY_EFORMAT, "embed_tokens.weight", "expected BF16 [4096, 256]"},
        {eight_layers, LILY_EFORMAT, LAYER "4.", "found none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[16];
        snprintf(name, sizeof name, "c%zu", i);
        const char *path = fx_synth(name);
        edit_config(name, cases[i].edit);
        fx_refused(path, cases[i].code, cases[i].part, cases[i].other, NULL);
    }
}

/* An inspection lists every fault, not just the first. */
static void several(struct fx_tensors *t) {
    nan_scale(t);
    infinite_bias(t);
    wrong_dtype(t);
    extra_tensor(t);
}

static void test_inspection_lists_all(void **state) {
    (void)state;
    const char *path = rebuilt("many", several, 0);
    lily_err err = {0};
    char *text;
    assert_int_equal(ckpt_inspect(path, NULL, &text, &err), 0);
    fx_message_has(text, "\"fault_count\": 4");
    fx_message_has(text, "index 4711");
    fx_message_has(text, "index 16383");
    fx_message_has(text, "found F16");
    fx_message_has(text, "q_proj.bias");
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything_is_bound),
        cmocka_unit_test(test_values_are_the_files),
        cmocka_unit_test(test_odd_addresses),
        cmocka_unit_test(test_skipped_knowingly),
        cmocka_unit_test(test_without_index),
        cmocka_unit_test(test_templates),
        cmocka_unit_test(test_older_sibling),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_standin),
        cmocka_unit_test(test_missing_files),
        cmocka_unit_test(test_gguf),
        cmocka_unit_test(test_cut_by_one_byte),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_two_shards),
        cmocka_unit_test(test_no_permission),
        cmocka_unit_test(test_no_regular_file),
        cmocka_unit_test(test_empty_files),
        cmocka_unit_test(test_messages_are_text),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_config_against_file),
        cmocka_unit_test(test_inspection_lists_all),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}

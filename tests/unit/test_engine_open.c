/* Opening an engine: which backend, how much context, what the checkpoint's files say. */
#include <jansson.h>

#include "engine/defaults.h"
#include "engine/machine.h"
#include "engine_fake.h"

/* ---- which backend --------------------------------------------------------------------------- */

static void usable(struct backend_probe *out) {
    *out = (struct backend_probe){.usable = true, .device = "d", .reason = "fits"};
}

static void unusable(struct backend_probe *out) {
    *out = (struct backend_probe){.reason = "no such card"};
}

static const struct backend good = {.name = "good", .probe = usable};
static const struct backend absent = {.name = "absent", .probe = unusable};
static const struct backend reference = {.name = "ref", .probe = usable};
static const struct backend *const several[] = {&absent, &good, &reference, NULL};
static const struct backend *const poor[] = {&absent, &reference, NULL};

static int choose(const struct backend *const *all, const char *name, bool weights_16_bit,
                  const struct backend **out, char *reason, lily_err *err) {
    *out = NULL;
    return engine_choose(all, name, weights_16_bit, out, reason, 512, err);
}

static void test_choice(void **state) {
    (void)state;
    const struct backend *b;
    char why[512];
    lily_err err;
    assert_int_equal(choose(several, NULL, false, &b, why, &err), 0);
    assert_ptr_equal(b, &good);
    assert_non_null(strstr(why, "fits"));
    assert_non_null(strstr(why, "absent: no such card"));
    assert_int_equal(choose(several, "auto", true, &b, why, &err), 0);
    assert_ptr_equal(b, &reference);
    assert_int_equal(choose(several, "ref", false, &b, why, &err), 0);
    assert_ptr_equal(b, &reference);
    assert_int_equal(choose(several, "good", true, &b, why, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "unquantised"));
    assert_int_equal(choose(several, "absent", false, &b, why, &err), LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "no such card"));
    assert_int_equal(choose(several, "gpu", false, &b, why, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "auto, absent, good, ref"));
    assert_int_equal(choose(poor, NULL, false, &b, why, &err), LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "no such card"));
    assert_non_null(strstr(err.msg, "ref"));
}

struct log {
    char text[4096];
};

static void keep_line(void *arg, const char *line) {
    struct log *l = arg;
    snprintf(l->text + strlen(l->text), sizeof l->text - strlen(l->text), "%s\n", line);
}

static int full(const struct weights *w, const struct backend_options *options,
                struct backend_model **out, lily_err *err) {
    (void)w, (void)options;
    *out = NULL;
    return ERR(err, LILY_ENOMEM, "gpu: found 8 GiB, expected 20");
}

static int broken(const struct weights *w, const struct backend_options *options,
                  struct backend_model **out, lily_err *err) {
    (void)w, (void)options;
    *out = NULL;
    return ERR(err, LILY_EBACKEND, "driver: found version 1, expected 2");
}

static int wordy(const struct weights *w, const struct backend_options *options,
                 struct backend_model **out, lily_err *err) {
    (void)w, (void)options;
    char text[600] = "";
    for (int i = 0; i < 149; i++) strcat(text, "\xf0\x9f\x8c\xb8"); /* four bytes each */
    *out = NULL;
    return ERR(err, LILY_EBACKEND, "%s", text);
}

static void open_on(struct lily_engine **out, const struct backend *first,
                    const struct backend *const *all, struct log *log, int expected,
                    lily_err *err) {
    const lily_engine_options o = {.log = keep_line, .arg = log};
    const struct engine_parts parts = {
        .weights = &fake_weights, .backend = first, .all = all, .reason = "the best"};
    fake = (struct fake){0};
    log->text[0] = 0;
    assert_int_equal(engine_assemble(&o, &parts, out, err), expected);
}

/* What a backend tells of its upload reaches the caller, who may end it. */
struct upload {
    uint64_t done, total;
    int answer;
};

static int see_upload(void *arg, const char *label, const char *unit, uint64_t done,
                      uint64_t total) {
    struct upload *u = arg;
    assert_string_equal(label, "upload");
    assert_string_equal(unit, "B");
    u->done = done;
    u->total = total;
    return u->answer;
}

static void test_upload_is_told(void **state) {
    (void)state;
    static const struct backend *const all[] = {&backend_fake, &reference, NULL};
    struct upload u = {0};
    const lily_engine_options o = {.progress = see_upload, .arg = &u};
    const struct engine_parts parts = {
        .weights = &fake_weights, .backend = &backend_fake, .all = all};
    lily_engine *e;
    lily_err err;
    fake = (struct fake){0};
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), 0);
    assert_int_equal(u.done, 3);
    assert_int_equal(u.total, 4);
    lily_engine_close(e);
    u.answer = 1;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_ECANCELED);
}

/* A GPU without room or with a bad driver is passed over where the choice was the engine's. */
static void test_fallback(void **state) {
    (void)state;
    struct backend small = backend_fake, old = backend_fake;
    small.name = "small", small.open = full;
    old.name = "old", old.open = broken;
    const struct backend *const gpus[] = {&small, &absent, &old, &backend_fake, &reference, NULL};
    const struct backend *const hopeless[] = {&small, &old, &reference, NULL};
    struct log log = {{0}};
    lily_engine_info info;
    lily_engine *e;
    lily_err err;
    open_on(&e, &small, gpus, &log, 0, &err);
    lily_engine_get_info(e, &info);
    assert_string_equal(info.backend, "fake");
    assert_string_equal(info.device, "a script");
    assert_int_equal(info.context, 32768); /* not lowered for the one that had no room */
    assert_non_null(strstr(log.text, "small failed to open: context of 2048 tokens: gpu: "
                                     "found 8 GiB, expected 20; going on with old"));
    assert_non_null(strstr(log.text, "old failed to open: driver: found version 1, "
                                     "expected 2; going on with fake"));
    assert_non_null(strstr(info.reason, "the best usable one: tests only; small failed to open: "));
    assert_non_null(strstr(info.reason, "; old failed to open: driver: found version 1"));
    lily_engine_close(e);

    /* Those that could not be asked are told as well, and a long reason ends in whole characters.
     */
    const struct backend *const two[] = {&small, &absent, &backend_fake, NULL};
    open_on(&e, &small, two, &log, 0, &err);
    lily_engine_get_info(e, &info);
    assert_string_equal(info.reason, "the best usable one: tests only; not absent: no such card; "
                                     "small failed to open: context of 2048 tokens: gpu: found "
                                     "8 GiB, expected 20");
    lily_engine_close(e);
    small.open = wordy;
    open_on(&e, &small, two, &log, 0, &err);
    lily_engine_get_info(e, &info);
    assert_int_equal(strlen(info.reason), 511);
    json_t *text = json_string(info.reason); /* NULL where it is no UTF-8 */
    assert_non_null(text);
    json_decref(text);
    lily_engine_close(e);
    small.open = full;

    open_on(&e, &small, NULL, &log, LILY_ENOMEM, &err); /* asked for by name */
    assert_null(e);
    assert_non_null(strstr(err.msg, "gpu: found 8 GiB"));
    open_on(&e, &small, hopeless, &log, LILY_EBACKEND, &err); /* ref is no substitute */
    assert_null(e);
    assert_non_null(strstr(err.msg, "driver: found version 1"));
}

/* ---- options --------------------------------------------------------------------------------- */

static void test_context(void **state) {
    (void)state;
    struct log log = {{0}};
    lily_engine_options o = {.log = keep_line, .arg = &log};
    lily_engine_info info;
    lily_engine *e;
    lily_err err;
    fake = (struct fake){0};
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), 0);
    lily_engine_get_info(e, &info);
    assert_int_equal(info.context, 32768);
    assert_string_equal(info.model_name, "mini");
    assert_string_equal(info.backend, "fake");
    assert_string_equal(info.device, "a script");
    assert_string_equal(info.reason, "tests");
    assert_int_equal(info.layers, 8);
    assert_int_equal(info.vocab, 4096);
    assert_int_equal(info.session_bytes, 2);
    lily_engine_close(e);
    assert_non_null(strstr(log.text, "backend: fake on a script"));

    fake.most_context = 10000; /* what fits, said aloud */
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), 0);
    lily_engine_get_info(e, &info);
    assert_int_equal(info.context, 8192);
    lily_engine_close(e);
    assert_non_null(strstr(log.text, "8192 tokens; the memory does not hold 32768"));

    fake.most_context = 100; /* nothing useful fits */
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_ENOMEM);
    assert_null(e);

    fake.most_context = 10000; /* what was asked for is not lowered */
    o.context = 16384;
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_ENOMEM);
    assert_non_null(strstr(err.msg, "context of 16384 tokens: fake: room for 10000"));
    o.context = 262145;
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "context: found 262145, expected 1 to 262144"));
    o.context = -1;
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_EINVAL);
    o.context = 0, o.threads = -1;
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "threads"));
    o.threads = 0, o.max_sessions = -1;
    assert_int_equal(fake_try_engine(&o, NULL, &e, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "max_sessions"));
    assert_int_equal(fake.models, 0);
    lily_engine_close(NULL);
    lily_session_free(NULL);
}

static void test_missing_model(void **state) {
    (void)state;
    lily_engine *e;
    lily_err err = {0};
    const lily_engine_options o = {.model = "/nonexistent/model"};
    assert_int_equal(lily_engine_open(&o, &e, &err), LILY_ENOENT);
    assert_null(e);
    assert_non_null(strstr(err.msg, "/nonexistent/model"));
}

/* A tokenizer of another checkpoint, and none at all. */
static void test_tokenizer_file(void **state) {
    (void)state;
    struct buf text = {0};
    struct weights narrow = fake_weights;
    struct shape few = shape_mini;
    lily_engine_options o = {0};
    lily_engine *e;
    lily_err err;
    fake = (struct fake){0};
    fake_tokenizer(&text);
    few.vocab = 200;
    narrow.shape = &few;
    narrow.vocab_used = 200;
    struct engine_parts parts = {
        .weights = &narrow, .backend = &backend_fake, .tokenizer = {text.data, text.len}};
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_EMODEL);
    assert_non_null(strstr(err.msg, "262"));
    parts.weights = &fake_weights;
    parts.tokenizer.size = 100;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), LILY_EFORMAT);
    parts.tokenizer.text = NULL;
    assert_int_equal(engine_assemble(&o, &parts, &e, &err), 0);
    lily_tokens ids;
    size_t n;
    assert_int_equal(lily_tokenize(e, "a", 1, false, &ids, &err), LILY_EMODEL);
    assert_int_equal(lily_chat_prompt(e, "[]", NULL, NULL, &ids, &err), LILY_EMODEL);
    assert_null(lily_token_bytes(e, 65, &n));
    lily_engine_close(e);
    buf_free(&text);
}

/* ---- what the checkpoint says ---------------------------------------------------------------- */

static int read_defaults(const char *shape, const char *generation, const char *config,
                         struct defaults *out, lily_err *err) {
    const struct text_file g = {generation, generation ? strlen(generation) : 0};
    const struct text_file c = {config, config ? strlen(config) : 0};
    return defaults_read(shape, &g, &c, NULL, 1000, out, err);
}

static void expect_sampling(const lily_sampling *p, float temperature, int32_t top_k, float top_p,
                            float presence) {
    assert_float_equal(p->temperature, temperature, 0);
    assert_int_equal(p->top_k, top_k);
    assert_float_equal(p->top_p, top_p, 0);
    assert_float_equal(p->presence_penalty, presence, 0);
    assert_float_equal(p->repetition_penalty, 1, 0);
    assert_float_equal(p->min_p, 0, 0);
    assert_true(p->random_seed);
}

static void test_sampling_defaults(void **state) {
    (void)state;
    struct defaults d;
    lily_err err;
    static const char real[] = "qwen3.6-35b-a3b";
    /* nothing said: the card's tables, or nothing for a shape without a card */
    assert_int_equal(read_defaults(real, NULL, NULL, &d, &err), 0);
    expect_sampling(&d.thinking, 1, 20, 0.95f, 1.5f);
    expect_sampling(&d.no_thinking, 0.7f, 20, 0.8f, 1.5f);
    assert_int_equal(read_defaults("mini", NULL, NULL, &d, &err), 0);
    expect_sampling(&d.thinking, 1, 0, 1, 0);
    /* the published file repeats the thinking table, and must not undo the other */
    static const char published[] =
        "{\"do_sample\":true,\"temperature\":1.0,\"top_k\":20,\"top_p\":0.95}";
    assert_int_equal(read_defaults(real, published, NULL, &d, &err), 0);
    expect_sampling(&d.thinking, 1, 20, 0.95f, 1.5f);
    expect_sampling(&d.no_thinking, 0.7f, 20, 0.8f, 1.5f);
    assert_int_equal(read_defaults("mini", published, NULL, &d, &err), 0);
    expect_sampling(&d.thinking, 1, 20, 0.95f, 0);
    expect_sampling(&d.no_thinking, 1, 20, 0.95f, 0);
    /* what somebody changed is meant */
    assert_int_equal(read_defaults(real,
                                   "{\"temperature\":0.3,\"top_k\":20,\"top_p\":0.95,"
                                   "\"presence_penalty\":0.5}",
                                   NULL, &d, &err),
                     0);
    expect_sampling(&d.thinking, 0.3f, 20, 0.95f, 0.5f);
    expect_sampling(&d.no_thinking, 0.3f, 20, 0.8f, 0.5f);
    assert_int_equal(read_defaults(real, "{\"do_sample\":false}", NULL, &d, &err), 0);
    assert_float_equal(d.thinking.temperature, 0, 0);
    assert_float_equal(d.no_thinking.temperature, 0, 0);
}

static void test_end_ids(void **state) {
    (void)state;
    struct defaults d;
    lily_err err;
    assert_int_equal(read_defaults("mini", "{\"eos_token_id\":[7,5]}",
                                   "{\"eos_token_id\":5,\"text_config\":{\"eos_token_id\":9}}", &d,
                                   &err),
                     0);
    assert_int_equal(d.n_stops, 3);
    assert_int_equal(d.stops[0], 7);
    assert_int_equal(d.stops[1], 5);
    assert_int_equal(d.stops[2], 9);
    assert_int_equal(read_defaults("mini", "{\"eos_token_id\":null}", "{}", &d, &err), 0);
    assert_int_equal(d.n_stops, 0);

    lily_engine *e = fake_engine((lily_engine_options){0}); /* by name, whatever the files say */
    assert_int_equal(e->defaults.n_stops, 2);
    assert_int_equal(e->defaults.stops[0], FAKE_IM_END);
    assert_int_equal(e->defaults.stops[1], FAKE_ENDOFTEXT);
    lily_engine_close(e);
}

static void refuse(const char *generation, const char *config, const char *words) {
    struct defaults d;
    lily_err err = {0};
    assert_int_equal(read_defaults("mini", generation, config, &d, &err), LILY_EFORMAT);
    if (!strstr(err.msg, words)) fail_msg("\"%s\" does not say \"%s\"", err.msg, words);
    if (!strstr(err.msg, "found ") || !strstr(err.msg, ", expected ") || !strchr(err.msg, ';')) {
        fail_msg("\"%s\" does not say what was found, expected and is to be done", err.msg);
    }
}

static void test_bad_files(void **state) {
    (void)state;
    refuse("", NULL, "generation_config.json: found invalid JSON at line 1");
    refuse("{", NULL, "generation_config.json: found invalid JSON at line 1");
    refuse("[]", NULL, "generation_config.json: found JSON that is not an object");
    refuse(NULL, "3", "config.json: found invalid JSON at line 1");
    refuse("{\"temperature\":\"hot\"}", NULL, "temperature");
    refuse("{\"do_sample\":\"no\"}", NULL, "do_sample");
    refuse("{\"temperature\":-1}", NULL, "generation_config.json: temperature: found -1");
    refuse("{\"top_k\":1.5}", NULL, "top_k");
    refuse("{\"top_k\":-1}", NULL, "top_k");
    refuse("{\"top_p\":2}", NULL, "top_p: found 2");
    refuse("{\"eos_token_id\":\"</s>\"}", NULL, "eos_token_id");
    refuse("{\"eos_token_id\":[1,\"x\"]}", NULL, "eos_token_id");
    refuse("{\"eos_token_id\":1000}", NULL, "found 1000");
    refuse(NULL, "{\"text_config\":{\"eos_token_id\":-1}}", "config.json: eos_token_id: found -1");
    refuse("{\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", NULL, "more than 16");
}

/* ---- text and machine ------------------------------------------------------------------------ */

static void test_tokens(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_tokens ids;
    lily_err err;
    size_t n;
    static const char text[] = "a<|im_end|>";
    assert_int_equal(lily_tokenize(e, text, strlen(text), true, &ids, &err), 0);
    assert_int_equal(ids.n, 2);
    assert_int_equal(ids.ids[0], 'a');
    assert_int_equal(ids.ids[1], FAKE_IM_END);
    lily_tokens_free(&ids);
    assert_null(ids.ids);
    assert_int_equal(lily_tokenize(e, text, strlen(text), false, &ids, &err), 0);
    assert_int_equal(ids.n, strlen(text));
    lily_tokens_free(&ids);
    assert_int_equal(lily_tokenize(e, "", 0, false, &ids, &err), 0);
    assert_int_equal(ids.n, 0);
    lily_tokens_free(&ids);
    assert_int_equal(lily_tokenize(e, "a\xff", 2, false, &ids, &err), LILY_EINVAL);
    assert_memory_equal(lily_token_bytes(e, FAKE_THINK, &n), "<think>", 7);
    assert_int_equal(n, 7);
    assert_null(lily_token_bytes(e, FAKE_USED, &n));
    assert_null(lily_token_bytes(e, -1, &n));
    lily_engine_close(e);
}

static void test_doctor(void **state) {
    (void)state;
    char *text = NULL;
    lily_err err;
    struct machine m;
    assert_int_equal(lily_doctor(&text, &err), 0);
    json_t *doc = json_loads(text, 0, NULL), *entry;
    assert_non_null(doc);
    const json_t *machine = json_object_get(doc, "machine");
    assert_true(strlen(json_string_value(json_object_get(machine, "cpu"))) > 0);
    assert_true(json_integer_value(json_object_get(machine, "cores")) > 0);
    json_int_t total = json_integer_value(json_object_get(machine, "memory_total_bytes"));
    json_int_t free_now = json_integer_value(json_object_get(machine, "memory_available_bytes"));
    assert_true(total > 1 << 26 && free_now > 0 && free_now <= total);
    static const char *const names[] = {"metal", "cuda", "cpu", "ref"}; /* as auto tries them */
    size_t i;
    assert_int_equal(json_array_size(json_object_get(doc, "backends")), 4);
    json_array_foreach(json_object_get(doc, "backends"), i, entry) {
        assert_string_equal(json_string_value(json_object_get(entry, "name")), names[i]);
        assert_true(json_is_boolean(json_object_get(entry, "usable")));
        assert_true(strlen(json_string_value(json_object_get(entry, "reason"))) > 0);
    }
    for (size_t from = 0, j = 0; backend_all[j]; j++) { /* and so does this build's own list */
        size_t at = from;
        while (at < 4 && strcmp(names[at], backend_all[j]->name) != 0) at++;
        assert_in_range(at, from, 3);
        from = at;
    }
    assert_true(json_is_boolean(json_object_get(doc, "embedded_standin")));
    json_decref(doc);
    free(text);
    machine_read(&m);
    assert_true(strlen(m.os) > 0 && strlen(m.arch) > 0 && strlen(m.cpu) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_fallback),
        cmocka_unit_test(test_upload_is_told),
        cmocka_unit_test(test_context),
        cmocka_unit_test(test_missing_model),
        cmocka_unit_test(test_tokenizer_file),
        cmocka_unit_test(test_sampling_defaults),
        cmocka_unit_test(test_end_ids),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_doctor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

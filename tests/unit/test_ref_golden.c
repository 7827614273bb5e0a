/* The reference backend against Hugging Face transformers (tests/golden/README.md), for
 * two tiny random checkpoints in bf16, the stand-in's own 4-bit weights, and the reference folder's
 * random bf16 checkpoint when REFERENCE names a folder that has it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <unistd.h>

#include "backend/ref/ref.h"
#include "base/file.h"
#include "ckpt/ckpt.h"
#include "ckpt/safetensors.h"
#include "ref_tiny.h"

#define LOGIT_TOLERANCE 1e-3 /* absolute, logits of unit spread */
#define STAGE_TOLERANCE 1e-4 /* relative to the largest value of the stage */
#define MIN_GAP         1e-5f

static struct tiny tiny;
static lily_err err;

/* ---- a golden -------------------------------------------------------------------------------- */

struct golden {
    struct file_map map;
    struct st_file file;
    int32_t *ids; /* [tokens] */
    int32_t tokens;
};

static const struct st_tensor *find(const struct golden *g, const char *name) {
    for (size_t i = 0; i < g->file.n; i++) {
        if (strcmp(g->file.tensors[i].name, name) == 0) return &g->file.tensors[i];
    }
    return NULL;
}
static float f32_at(const struct st_tensor *t, size_t i) {
    float x;
    memcpy(&x, t->data + 4 * i, 4);
    return x;
}
static uint32_t u32_at(const struct st_tensor *t, size_t i) {
    uint32_t x;
    memcpy(&x, t->data + 4 * i, 4);
    return x;
}
/* Index of a position among those stored, or -1. */
static int row_of(const struct golden *g, const char *which, int32_t pos) {
    const struct st_tensor *t = find(g, which);
    for (size_t i = 0; i < t->dims[0]; i++) {
        if (u32_at(t, i) == (uint32_t)pos) return (int)i;
    }
    return -1;
}

static void golden_open(struct golden *g, const char *path) {
    if (file_map_open(path, &g->map, &err) ||
        st_parse(path, g->map.data, g->map.size, &g->file, &err)) {
        fail_msg("%s", err.msg);
    }
    const struct st_tensor *ids = find(g, "ids");
    g->tokens = (int32_t)ids->dims[0];
    g->ids = malloc((size_t)g->tokens * sizeof *g->ids);
    assert_non_null(g->ids);
    for (int32_t i = 0; i < g->tokens; i++) g->ids[i] = (int32_t)u32_at(ids, (size_t)i);
}
static void golden_close(struct golden *g) {
    free(g->ids);
    st_close(&g->file);
    file_unmap(&g->map);
}

/* ---- stages ---------------------------------------------------------------------------------- */

struct error {
    char stage[32];
    double difference; /* largest absolute */
    double largest;    /* largest absolute value of the golden */
    int rows;
};
struct comparison {
    const struct golden *golden;
    float experts[256]; /* of the layer at hand, until the shared expert joins */
    struct error errors[64];
    size_t n;
    int flips;
    int uncertain; /* rows not used: a router gap under MIN_GAP at or before them */
    bool past_gap;
    float smallest_gap;
};

static struct error *error_of(struct comparison *c, const char *stage) {
    for (size_t i = 0; i < c->n; i++) {
        if (strcmp(c->errors[i].stage, stage) == 0) return &c->errors[i];
    }
    assert_true(c->n < sizeof c->errors / sizeof *c->errors);
    struct error *e = &c->errors[c->n++];
    snprintf(e->stage, sizeof e->stage, "%s", stage);
    return e;
}

static void compare_row(struct comparison *c, const char *stage, int32_t pos, const float *row,
                        int32_t n) {
    const struct st_tensor *t = find(c->golden, stage);
    bool head = strcmp(stage, "logits") == 0;
    int at = t ? row_of(c->golden, head ? "logits_positions" : "positions", pos) : -1;
    if (at < 0) return;
    if (c->past_gap) {
        c->uncertain++;
        return;
    }
    struct error *e = error_of(c, stage);
    assert_int_equal(t->dims[1], n);
    for (size_t i = 0; i < (size_t)n; i++) {
        float wanted = f32_at(t, (size_t)at * (size_t)n + i);
        double d = fabs((double)row[i] - (double)wanted);
        if (!(d <= e->difference)) e->difference = d; /* a NaN too */
        e->largest = fmax(e->largest, fabs((double)wanted));
    }
    e->rows++;
}

/* The chosen experts as a set, and the gap that another choice would have had to cross. */
static void compare_routing(struct comparison *c, int32_t layer, int32_t pos, const float *routing,
                            size_t k) {
    const struct st_tensor *chosen = find(c->golden, "chosen"), *gaps = find(c->golden, "gaps");
    if (!chosen) return;
    size_t at = (size_t)layer * (size_t)c->golden->tokens + (size_t)pos;
    float gap = f32_at(gaps, at);
    if (gap < c->smallest_gap) c->smallest_gap = gap;
    if (gap < MIN_GAP) c->past_gap = true; /* later rows attend to what may differ here */
    for (size_t i = 0; i < k; i++) {
        bool found = false;
        for (size_t j = 0; j < k; j++) found |= (uint32_t)routing[j] == u32_at(chosen, at * k + i);
        if (found) continue;
        print_message("routing flip: layer %d, position %d, expert %u not chosen, gap %.1e\n",
                      layer, pos, u32_at(chosen, at * k + i), (double)gap);
        if (gap >= MIN_GAP) c->flips++;
    }
}

static void on_stage(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
                     int32_t n) {
    struct comparison *c = arg;
    char name[32];
    if (stage == STAGE_ROUTER) {
        compare_routing(c, layer, pos, row, (size_t)n / 2);
        return;
    }
    if (stage == STAGE_EXPERTS) memcpy(c->experts, row, (size_t)n * sizeof *row);
    if (stage == STAGE_SHARED) {
        for (int32_t i = 0; i < n; i++) c->experts[i] += row[i];
        snprintf(name, sizeof name, "moe.%d", layer);
        compare_row(c, name, pos, c->experts, n);
        return;
    }
    if (layer < 0) {
        compare_row(c, stage_name(stage), pos, row, n);
    } else {
        snprintf(name, sizeof name, "%s.%d", stage_name(stage), layer);
        compare_row(c, name, pos, row, n);
    }
}

/* ---- runs ------------------------------------------------------------------------------------ */

struct run {
    struct backend_model *model;
    struct backend_session *session;
};

static void run_open(struct run *r, const struct weights *w, int32_t context,
                     struct comparison *traced) {
    struct backend_options options = {.max_sessions = 1,
                                      .max_context = context,
                                      .trace = traced ? on_stage : NULL,
                                      .trace_arg = traced};
    if (backend_ref.open(w, &options, &r->model, &err) ||
        backend_ref.session_new(r->model, context, &r->session, &err)) {
        fail_msg("%s", err.msg);
    }
}
static void run_close(struct run *r) {
    backend_ref.session_free(r->session);
    backend_ref.close(r->model);
}

/* All positions at once; out[tokens][V] is the caller's to free. */
static float *all_logits(const struct weights *w, const struct golden *g, struct comparison *c) {
    size_t vocab = (size_t)w->shape->vocab;
    float *out = malloc((size_t)g->tokens * vocab * sizeof *out);
    struct run r;
    assert_non_null(out);
    run_open(&r, w, g->tokens, c);
    for (int32_t at = 0; at < g->tokens;) {
        struct prefill_step step = {
            .ids = g->ids + at, .n = g->tokens - at, .all_logits = out + (size_t)at * vocab};
        if (backend_ref.prefill(r.session, &step, &err)) fail_msg("%s", err.msg);
        at += step.done;
    }
    run_close(&r);
    return out;
}

/* Every stored stage and logit of the golden; returns the logits of all positions. */
static float *compare_stages(const struct weights *w, const struct golden *g) {
    struct comparison c = {.golden = g, .smallest_gap = INFINITY};
    float *out = all_logits(w, g, &c);
    bool ok = c.flips == 0;
    for (size_t i = 0; i < c.n; i++) {
        const struct error *e = &c.errors[i];
        bool head = strcmp(e->stage, "logits") == 0;
        double relative = e->difference / e->largest;
        bool good = head ? e->difference <= LOGIT_TOLERANCE : relative <= STAGE_TOLERANCE;
        print_message("%-13s %3d rows, difference %.1e, relative %.1e%s\n", e->stage, e->rows,
                      e->difference, relative, good ? "" : " TOO LARGE");
        ok = ok && good;
    }
    if (find(g, "gaps")) print_message("smallest router gap %.1e\n", (double)c.smallest_gap);
    if (c.uncertain) print_message("%d rows behind a smaller gap not used\n", c.uncertain);
    /* Embedding or first layer, last norm, logits: a golden that compares nothing proves nothing.
     */
    assert_true(error_of(&c, "layer_out.0")->rows > 0);
    assert_true(error_of(&c, "final_norm")->rows > 0);
    assert_true(error_of(&c, "logits")->rows > 0);
    assert_true(ok);
    return out;
}

/* Prompts of every awkward length up to longest: their last logits have the bits of the whole
 * run's, which were compared with the golden at these positions. */
static void compare_lengths(const struct weights *w, const struct golden *g, const float *whole,
                            int32_t longest) {
    const int32_t lengths[] = {1, 2, 3, 63, 64, 65, 200, 300};
    size_t vocab = (size_t)w->shape->vocab, bytes = vocab * sizeof(float);
    float *logits = malloc(bytes);
    struct run r;
    assert_non_null(logits);
    run_open(&r, w, g->tokens, NULL);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && lengths[i] <= longest; i++) {
        int32_t n = lengths[i];
        assert_true(row_of(g, "logits_positions", n - 1) >= 0);
        backend_ref.reset(r.session);
        if (tiny_prefill(r.session, g->ids, n, logits, &err)) fail_msg("%s", err.msg);
        assert_memory_equal(logits, whole + (size_t)(n - 1) * vocab, bytes);
    }
    run_close(&r);
    free(logits);
}

/* Any cut into prefill calls (positive) and single steps (negative) gives the same bits. */
static void compare_splits(const struct weights *w, const struct golden *g, const float *whole) {
    const int32_t cuts[][8] = {{1, 63, 1, 64, 71}, {-3, 60, -2, 65}, {100, -32}};
    size_t vocab = (size_t)w->shape->vocab, bytes = vocab * sizeof(float);
    float *logits = malloc(bytes);
    struct run r;
    assert_non_null(logits);
    run_open(&r, w, g->tokens, NULL);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        int32_t at = 0;
        backend_ref.reset(r.session);
        for (size_t j = 0; j < 8 && cuts[i][j]; j++) {
            int32_t n = cuts[i][j];
            if (n > 0) {
                if (tiny_prefill(r.session, g->ids + at, n, logits, &err)) fail_msg("%s", err.msg);
                at += n;
            }
            for (; n < 0; n++, at++) {
                if (tiny_decode(r.model, r.session, g->ids[at], logits, &err)) {
                    fail_msg("%s", err.msg);
                }
            }
            assert_memory_equal(logits, whole + (size_t)(at - 1) * vocab, bytes);
        }
    }
    run_close(&r);
    free(logits);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void check_bits(const struct tiny *t, const struct golden *g) {
    const struct st_tensor *sum = find(g, "weights_sum");
    assert_true(tiny_sum(t) == ((uint64_t)u32_at(sum, 1) << 32 | u32_at(sum, 0)));
}

static void tiny_bf16_equals_hugging_face(void **state) {
    struct golden *g = *state;
    check_bits(&tiny, g);
    float *whole = compare_stages(&tiny.w, g);
    compare_lengths(&tiny.w, g, whole, 300);
    compare_splits(&tiny.w, g, whole);
    free(whole);
}

/* One unit in the last place of a frequency is 1/100 radian at the end of the context. */
static void rope_frequencies_are_those_of_hugging_face(void **state) {
    const struct st_tensor *wanted = find(*state, "inv_freq");
    float inv_freq[32];
    assert_int_equal(wanted->bytes, sizeof inv_freq);
    ref_rope_frequencies(&shape_mini, inv_freq);
    assert_memory_equal(inv_freq, wanted->data, sizeof inv_freq);
}

static void odd_shape_equals_hugging_face(void **state) {
    (void)state;
    struct golden g;
    struct tiny odd;
    golden_open(&g, "tests/golden/odd.safetensors");
    tiny_make(&odd, &shape_odd);
    check_bits(&odd, &g);
    free(compare_stages(&odd.w, &g));
    tiny_free(&odd);
    golden_close(&g);
}

static struct ckpt *load(const char *path) {
    struct ckpt_options options = {.keep_bf16 = true};
    struct ckpt *c;
    if (ckpt_load(path, &options, &c, &err)) fail_msg("%s", err.msg);
    return c;
}

/* The same checkpoint through a folder on disk gives the same bits as its weights in memory. */
static void tiny_folder_equals_tiny_memory(void **state) {
    struct golden *g = *state;
    char folder[] = "/tmp/lily-tiny-XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    assert_true(tiny_write(&tiny, folder));
    struct ckpt *c = load(folder);
    size_t bytes = (size_t)shape_mini.vocab * sizeof(float);
    float *logits[2] = {malloc(bytes), malloc(bytes)};
    const struct weights *w[2] = {&tiny.w, ckpt_weights(c)};
    for (int i = 0; i < 2; i++) {
        struct run r;
        run_open(&r, w[i], 20, NULL);
        if (tiny_prefill(r.session, g->ids, 20, logits[i], &err)) fail_msg("%s", err.msg);
        run_close(&r);
    }
    assert_memory_equal(logits[0], logits[1], bytes);
    for (int i = 0; i < 2; i++) free(logits[i]);
    ckpt_free(c);
    const char *names[] = {"model.safetensors", "config.json"};
    for (int i = 0; i < 2; i++) {
        snprintf(file, sizeof file, "%s/%s", folder, names[i]);
        unlink(file);
    }
    rmdir(folder);
}

static void standin_equals_hugging_face(void **state) {
    (void)state;
    const char *path = "tests/golden/mini.safetensors";
    struct golden g;
    struct file_map shard;
    if (!file_exists("models/mini/model.safetensors")) {
        print_message("models/mini/model.safetensors is absent\n");
        skip();
    }
    golden_open(&g, path); /* absent: tests/golden/README.md has the command that makes it */
    assert_int_equal(file_map_open("models/mini/model.safetensors", &shard, &err), LILY_OK);
    uint64_t sum = 0;
    for (size_t i = 0; i < shard.size; i++) sum += (i + 1) * (uint64_t)shard.data[i];
    file_unmap(&shard);
    const struct st_tensor *stored = find(&g, "weights_sum");
    if (sum != ((uint64_t)u32_at(stored, 1) << 32 | u32_at(stored, 0))) {
        fail_msg("models/mini is not the checkpoint %s was made from; make it again", path);
    }
    struct ckpt *c = load("models/mini");
    float *whole = compare_stages(ckpt_weights(c), &g);
    compare_lengths(ckpt_weights(c), &g, whole, 65);
    free(whole);
    ckpt_free(c);
    golden_close(&g);
}

static void reference_folder_equals_hugging_face(void **state) {
    (void)state;
    const char *reference = getenv("REFERENCE");
    char folder[512], command[1400], converted[] = "/tmp/lily-golden-XXXXXX";
    snprintf(folder, sizeof folder, "%s/golden", reference ? reference : "../shared");
    snprintf(command, sizeof command, "%s/golden.npz", folder);
    if (!file_exists(command)) {
        print_message("%s is absent\n", command);
        skip();
    }
    int fd = mkstemp(converted);
    assert_true(fd >= 0);
    close(fd);
    snprintf(command, sizeof command, "python3 tests/golden/from_npz.py '%s/golden.npz' %s", folder,
             converted);
    assert_int_equal(system(command), 0);
    struct golden g;
    golden_open(&g, converted);
    struct ckpt *c = load(folder);
    free(compare_stages(ckpt_weights(c), &g));
    ckpt_free(c);
    golden_close(&g);
    unlink(converted);
}

static int setup(void **state) {
    static struct golden g;
    tiny_make(&tiny, &shape_mini);
    golden_open(&g, "tests/golden/tiny.safetensors");
    *state = &g;
    return 0;
}
static int teardown(void **state) {
    golden_close(*state);
    tiny_free(&tiny);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_bf16_equals_hugging_face),
        cmocka_unit_test(rope_frequencies_are_those_of_hugging_face),
        cmocka_unit_test(odd_shape_equals_hugging_face),
        cmocka_unit_test(tiny_folder_equals_tiny_memory),
        cmocka_unit_test(standin_equals_hugging_face),
        cmocka_unit_test(reference_folder_equals_hugging_face),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

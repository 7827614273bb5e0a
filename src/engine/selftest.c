/* Weights for the backends' self-tests, and what came out as JSON. */
#include "engine/selftest.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/ckpt.h"

enum { LAYERS = 4, CONTEXT = 32768 };

struct run { /* of one backend's test */
    const lily_selftest_options *o;
    const char *label; /* of its progress */
    json_t *items;
    int passed, failed, untested;
};

/* ---- weights --------------------------------------------------------------------------------- */

static int making(void *arg, uint64_t done, uint64_t total) {
    const lily_selftest_options *o = arg;
    return o->progress ? o->progress(o->arg, "random weights", "B", done, total) : 0;
}

/* A packed file that has no name any more once it is mapped: devices then use its pages as they use
 * a real one's. */
static int random_weights(const lily_selftest_options *o, const char *shape, struct ckpt **out,
                          lily_err *err) {
    char folder[] = "/tmp/lily-selftest-XXXXXX", path[sizeof folder + 16];
    const struct ckpt_synth_options synth = {.shape = shape,
                                             .layers = LAYERS,
                                             .seed = 1,
                                             .packed = true,
                                             .progress = making,
                                             .progress_arg = (void *)o};
    const struct ckpt_options load = {0};
    if (!mkdtemp(folder)) return err_system(err, errno, "/tmp", "make a folder in");
    snprintf(path, sizeof path, "%s/random.lily", folder);
    int rc = ckpt_synth(path, &synth, err);
    if (rc == 0) rc = ckpt_load(path, &load, out, err);
    unlink(path);
    rmdir(folder);
    return rc;
}

static int load_weights(const lily_selftest_options *o, const char *shape, struct ckpt **out,
                        lily_err *err) {
    const struct ckpt_options load = {0};
    return o->model ? ckpt_load(o->model, &load, out, err) : random_weights(o, shape, out, err);
}

/* ---- one backend ----------------------------------------------------------------------------- */

static void add_item(void *arg, const struct selftest_item *item) {
    static const char *const words[] = {"passed", "failed", "untested", "note"};
    struct run *r = arg;
    json_t *entry = json_pack("{s:s, s:s}", "name", item->name, "result", words[(int)item->status]);
    bool measured = item->limit > 0;
    double error = item->error < 1e9 ? item->error : 1e9; /* JSON has no infinity */
    json_object_set_new(entry, "error", measured ? json_real(error) : json_null());
    json_object_set_new(entry, "limit", measured ? json_real(item->limit) : json_null());
    json_object_set_new(entry, "note", json_string(item->note));
    json_array_append_new(r->items, entry);
    r->passed += item->status == SELFTEST_PASSED;
    r->failed += item->status == SELFTEST_FAILED;
    r->untested += item->status == SELFTEST_UNTESTED;
}

static int testing(void *arg, uint64_t done, uint64_t total) {
    const struct run *r = arg;
    return r->o->progress ? r->o->progress(r->o->arg, r->label, "steps", done, total) : 0;
}

static int test_backend(const struct backend *b, const struct backend *reference,
                        const lily_selftest_options *o, const struct ckpt *c, json_t *list,
                        lily_err *err) {
    const struct weights *w = ckpt_weights(c);
    struct run r = {.o = o, .label = "self-test", .items = json_array()};
    const struct selftest_args args = {.w = w,
                                       .reference = reference,
                                       .layers = o->model ? w->layers : w->shape->layers,
                                       .context = CONTEXT,
                                       .item = add_item,
                                       .progress = testing,
                                       .arg = &r};
    struct backend_probe probe = {0};
    lily_err why = {0};
    b->probe(&probe);
    int rc = b->selftest(&args, &why);
    if (rc == LILY_ECANCELED) {
        if (err) *err = why;
        json_decref(r.items);
        return rc;
    }
    json_t *entry = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:b, s:i, s:i, s:i, s:o}", "backend", b->name, "device",
        probe.device, "shape", w->shape->name, "weights", o->model ? o->model : "random", "layers",
        LAYERS, "passed", rc == 0 && r.failed + r.untested == 0 && r.passed > 0, "passed_items",
        r.passed, "failed_items", r.failed, "untested_items", r.untested, "items", r.items);
    if (entry && rc != 0) json_object_set_new(entry, "error", json_string(why.msg));
    return json_array_append_new(list, entry) ? ERR_NOMEM(err, "self-test") : 0;
}

/* ---- all of them ----------------------------------------------------------------------------- */

static bool is_tested(const struct backend *b, const lily_selftest_options *o) {
    struct backend_probe probe = {0};
    if (!b->selftest || (o->backend && strcmp(o->backend, b->name) != 0)) return false;
    b->probe(&probe);
    return probe.usable;
}

int engine_selftest(const struct backend *const *all, const struct backend *reference,
                    const lily_selftest_options *o, char **json, lily_err *err) {
    const char *shape = o->shape ? o->shape : shape_all[0]->name;
    json_t *list = json_array();
    struct ckpt *c = NULL;
    bool any = false;
    int rc = 0;
    *json = NULL;
    for (size_t i = 0; all[i] && rc == 0; i++) {
        if (!is_tested(all[i], o)) continue;
        any = true;
        if (!c) rc = load_weights(o, shape, &c, err);
        if (rc == 0) rc = test_backend(all[i], reference, o, c, list, err);
    }
    if (rc == 0 && !any && o->backend) {
        rc = ERR(err, LILY_EINVAL,
                 "self-test: found the backend \"%s\", expected one that is usable here and has a "
                 "test of its own",
                 o->backend);
    }
    ckpt_free(c);
    if (rc == 0 && !(*json = json_dumps(list, JSON_INDENT(2) | JSON_REAL_PRECISION(6)))) {
        rc = ERR_NOMEM(err, "self-test");
    }
    json_decref(list);
    return rc;
}

int lily_selftest(const lily_selftest_options *options, char **json, lily_err *err) {
    return engine_selftest(backend_all, &backend_ref, options, json, err);
}

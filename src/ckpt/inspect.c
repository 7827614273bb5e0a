/* lily inspect: what lies at a path, as JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/load.h"
#include "ckpt/memory.h"
#include "ckpt/packed.h"

/* The session whose memory is counted beside the weights. */
enum { INSPECT_CONTEXT = 32768 };

static json_t *count(size_t tensors, uint64_t bytes) {
    return json_pack("{s:I, s:I}", "tensors", (json_int_t)tensors, "bytes", (json_int_t)bytes);
}

static void add_classes(json_t *out, const struct bind_stats *s) {
    json_t *classes = json_object();
    size_t tensors = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < CLASS_COUNT; i++) {
        tensors += s->class[i].tensors;
        bytes += s->class[i].bytes;
        json_object_set_new(classes, tensor_class_name((enum tensor_class)i),
                            count(s->class[i].tensors, s->class[i].bytes));
    }
    json_object_set_new(out, "text", count(tensors, bytes));
    json_object_set_new(out, "classes", classes);
    json_object_set_new(out, "skipped",
                        json_pack("{s:o, s:o}", "vision", count(s->vision.tensors, s->vision.bytes),
                                  "mtp", count(s->mtp.tensors, s->mtp.bytes)));
    json_object_set_new(out, "unknown", count(s->unknown.tensors, s->unknown.bytes));
    tensors += s->vision.tensors + s->mtp.tensors + s->unknown.tensors;
    bytes += s->vision.bytes + s->mtp.bytes + s->unknown.bytes;
    json_object_set_new(out, "all", count(tensors, bytes));
}

static void add_memory(json_t *out, const struct shape *s, int32_t layers) {
    uint64_t weights = memory_quantised_bytes(s, layers);
    uint64_t session = memory_session_bytes(s, layers, INSPECT_CONTEXT);
    uint64_t present = memory_present();
    json_object_set_new(out, "memory",
                        json_pack("{s:I, s:I, s:i, s:I, s:I, s:b}", "weights", (json_int_t)weights,
                                  "session", (json_int_t)session, "context", INSPECT_CONTEXT,
                                  "needed", (json_int_t)(weights + session), "present",
                                  (json_int_t)present, "fits", weights + session <= present));
}

static void add_quantisation(json_t *out, const struct ckpt *c) {
    json_t *q = NULL;
    if (c->form == FORM_PACKED || c->config.quantised) {
        q = json_pack("{s:s, s:i, s:i}", "mode", "affine", "bits", 4, "group_size",
                      c->weights.shape ? c->weights.shape->group : 64);
        json_int_t overrides = 0;
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)(uintptr_t)c->config.overrides, key, value) {
            overrides += json_is_object(value) || json_is_false(value);
        }
        if (c->form == FORM_FOLDER) {
            json_object_set_new(q, "overrides", json_integer(overrides));
        } else {
            json_object_set_new(q, "router_bits",
                                json_integer(c->weights.layer[0].moe.router.bits));
        }
    }
    json_object_set_new(out, "quantisation", q ? q : json_null());
}

static void add_template(json_t *out, const struct ckpt *c, struct faults *f) {
    struct template_info info;
    if (texts_template(&c->texts, &info, f) != 0 || !info.present) {
        json_object_set_new(out, "template", json_null());
        return;
    }
    json_object_set_new(out, "template",
                        json_pack("{s:s, s:s, s:b}", "sha256", info.sha256, "expected",
                                  texts_known_template, "equal", info.known));
}

static const char *inspected_kind(const struct ckpt *c) {
    if (c->kind) return c->kind;
    return c->form == FORM_PACKED ? "packed file" : "folder";
}

static void describe(json_t *out, struct ckpt *c, struct faults *f) {
    const struct shape *s = c->config.shape ? c->config.shape : c->weights.shape;
    int32_t layers = c->config.shape ? c->config.layers : c->weights.layers;
    json_object_set_new(out, "kind", json_string(inspected_kind(c)));
    json_object_set_new(out, "shape", s ? json_string(s->name) : json_null());
    json_object_set_new(out, "layers", s ? json_integer(layers) : json_null());
    if (c->form == FORM_FOLDER) {
        json_object_set_new(out, "shards", json_integer((json_int_t)c->catalog.n_shards));
    }
    if (c->weights.shape) {
        add_quantisation(out, c);
        add_classes(out, &c->stats);
        json_object_set_new(out, "vocab_used", json_integer(c->weights.vocab_used));
    } else {
        uint64_t bytes = 0;
        for (size_t i = 0; i < c->catalog.n; i++) bytes += c->catalog.entries[i].tensor->bytes;
        json_object_set_new(out, "all", count(c->catalog.n, bytes));
    }
    if (s) add_memory(out, s, layers);
    add_template(out, c, f);
}

/* Classes of a shard's tensors by their names alone: what the whole model needs is not known. */
static void add_classes_by_name(json_t *out, const struct catalog *c) {
    struct bind_stats s = {0};
    for (size_t i = 0; i < c->n; i++) {
        const struct st_tensor *t = c->entries[i].tensor;
        const struct tensor_role *r = tensor_role_of_name(t->name);
        enum bind_skip skip = bind_skipped(t->name);
        if (skip == SKIP_VISION) {
            s.vision.tensors++;
            s.vision.bytes += t->bytes;
        } else if (skip == SKIP_MTP) {
            s.mtp.tensors++;
            s.mtp.bytes += t->bytes;
        } else if (r) {
            s.class[r->class].tensors++;
            s.class[r->class].bytes += t->bytes;
        } else {
            s.unknown.tensors++;
            s.unknown.bytes += t->bytes;
        }
    }
    add_classes(out, &s);
}

/* A shard by itself: what it holds, by dtype and class. */
static int describe_file(json_t *out, const char *path, struct faults *f) {
    struct catalog c;
    int rc = catalog_open_file(path, &c, f);
    json_object_set_new(out, "kind", json_string("safetensors file"));
    if (rc != 0) return rc;
    json_t *types = json_object();
    for (int d = 0; d < ST_DTYPE_COUNT; d++) {
        size_t n = 0;
        uint64_t bytes = 0;
        for (size_t i = 0; i < c.n; i++) {
            if (c.entries[i].tensor->dtype != (enum st_dtype)d) continue;
            n++;
            bytes += c.entries[i].tensor->bytes;
        }
        if (n) json_object_set_new(types, st_dtype_name((enum st_dtype)d), count(n, bytes));
    }
    json_object_set_new(out, "dtypes", types);
    add_classes_by_name(out, &c);
    if (c.n > 0) {
        json_object_set_new(out, "first", json_string(c.entries[0].tensor->name));
        json_object_set_new(out, "last", json_string(c.entries[c.n - 1].tensor->name));
    }
    catalog_close(&c);
    return 0;
}

static void note_warning(void *arg, const char *line) {
    json_array_append_new(arg, json_string_nocheck(line));
}

/* Everything that can be said of path into out; an error only for what stopped the inspection. */
static int inspect(const char *path, enum ckpt_form form, ckpt_check_fn check, json_t *out,
                   struct faults *f) {
    if (form == FORM_SAFETENSORS) return describe_file(out, path, f);
    struct ckpt c = {0};
    lily_err err = {0};
    int rc = load_open(&c, path, LOAD_TO_PACK, NULL, f);
    if (rc == 0 && c.form == FORM_PACKED && c.weights.shape) rc = packed_verify(&c, f);
    /* After a fault it might only say the same in other words. */
    if (rc == 0 && check && f->total == 0 && c.weights.shape) {
        rc = check(&c, &err);
        if (rc != 0) rc = fault_from(f, rc, &err);
    }
    describe(out, &c, f);
    bool folder = c.form == FORM_FOLDER;
    json_object_set_new(
        out, "checked",
        json_string(folder ? "headers, scales, biases and small tensors" : "every byte (SHA-256)"));
    load_close(&c);
    return rc;
}

static int unknown_file(json_t *out, const lily_err *err, struct faults *f) {
    bool gguf = strstr(err->msg, "GGUF") != NULL;
    json_object_set_new(out, "kind", json_string(gguf ? "GGUF file" : "unknown file"));
    return fault_from(f, err->code, err);
}

/* A path need not be text, a JSON document must be. */
static json_t *path_text(const char *path) {
    if (!path) return json_string("(embedded)");
    char *copy = strdup(path);
    if (!copy) return NULL;
    err_clean(copy);
    json_t *text = json_string(copy);
    free(copy);
    return text;
}

int ckpt_inspect(const char *path, ckpt_check_fn check, char **json, lily_err *err) {
    enum ckpt_form form;
    lily_err e = {0};
    int rc = load_form(path, &form, &e);
    if (rc != 0 && form != FORM_UNKNOWN) {
        if (err) *err = e;
        return rc;
    }
    json_t *out = json_object(), *list = json_array(), *warnings = json_array();
    struct faults f = {.err = &e, .list = list, .warn = note_warning, .warn_arg = warnings};
    json_object_set_new(out, "path", path_text(path));
    rc = rc != 0 ? unknown_file(out, &e, &f) : inspect(path, form, check, out, &f);
    if (rc != 0) fault_from(&f, rc, &e);
    json_object_set_new(out, "warnings", warnings);
    json_object_set_new(out, "faults", list);
    json_object_set_new(out, "fault_count", json_integer((json_int_t)f.total));
    json_object_set_new(out, "ok", json_boolean(f.total == 0));
    *json = json_dumps(out, JSON_INDENT(2));
    json_decref(out);
    return *json ? 0 : ERR_NOMEM(err, "inspection");
}

/* Checkpoint folders in a temporary directory, and ways to damage them. */
#ifndef TESTS_CKPT_FIXTURE_H
#define TESTS_CKPT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <ftw.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/file.h"
#include "ckpt/ckpt.h"

#define UNUSED __attribute__((unused))

static char fx_root[64];
static char fx_warnings[8192]; /* lines of the last load */

static inline int fx_setup(void **state) {
    (void)state;
    snprintf(fx_root, sizeof fx_root, "/tmp/lily-test-XXXXXX");
    return mkdtemp(fx_root) ? 0 : -1;
}

static inline int fx_remove_one(const char *path, const struct stat *st, int kind,
                                struct FTW *walk) {
    (void)st;
    (void)kind;
    (void)walk;
    return remove(path);
}

static inline void fx_remove(const char *path) {
    nftw(path, fx_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline int fx_teardown(void **state) {
    (void)state;
    fx_remove(fx_root);
    return 0;
}

/* "<root>/<name>", one of 64 rotating buffers. */
static inline const char *fx_path(const char *fmt, ...) PRINTF_LIKE(1, 2);
static inline const char *fx_path(const char *fmt, ...) {
    static char paths[64][512];
    static int next;
    char *out = paths[next = (next + 1) % 64];
    int n = snprintf(out, 512, "%s/", fx_root);
    va_list args;
    va_start(args, fmt);
    vsnprintf(out + n, 512 - (size_t)n, fmt, args);
    va_end(args);
    return out;
}

/* A random MLX folder of mini's shape with 4 layers; the path is fx_path(name)'s. */
static inline const char *fx_synth(const char *name) {
    lily_err err = {0};
    const char *path = fx_path("%s", name);
    struct ckpt_synth_options o = {.shape = "mini", .layers = 4, .seed = 3};
    if (ckpt_synth(path, &o, &err) != 0) fail_msg("synth: %s", err.msg);
    return path;
}

static inline void fx_warn(void *arg, const char *line) {
    (void)arg;
    size_t n = strlen(fx_warnings);
    snprintf(fx_warnings + n, sizeof fx_warnings - n, "%s\n", line);
}

static inline int fx_load(const char *path, bool keep_bf16, struct ckpt **out, lily_err *err) {
    fx_warnings[0] = 0;
    struct ckpt_options o = {.keep_bf16 = keep_bf16, .warn = fx_warn};
    return ckpt_load(path, &o, out, err);
}

static inline struct ckpt *fx_load_ok(const char *path, bool keep_bf16) {
    lily_err err = {0};
    struct ckpt *c = NULL;
    if (fx_load(path, keep_bf16, &c, &err) != 0) fail_msg("%s", err.msg);
    return c;
}

/* ---- whole files ----------------------------------------------------------------------------- */

static inline char *fx_read(const char *path, size_t *n) {
    lily_err err = {0};
    char *data;
    if (file_read(path, (size_t)1 << 30, &data, n, &err) != 0) fail_msg("%s", err.msg);
    return data;
}

static inline void fx_write(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline void fx_write_text(const char *path, const char *text) {
    fx_write(path, text, strlen(text));
}

static inline json_t *fx_read_json(const char *path) {
    json_error_t e;
    json_t *root = json_load_file(path, 0, &e);
    if (!root) fail_msg("%s: %s", path, e.text);
    return root;
}

static inline void fx_write_json(const char *path, json_t *root) {
    assert_int_equal(json_dump_file(root, path, JSON_COMPACT), 0);
    json_decref(root);
}

/* ---- safetensors ----------------------------------------------------------------------------- */

struct fx_tensors {
    json_t *header;
    uint8_t *data;
    size_t n;
};

static inline struct fx_tensors fx_open(const char *path) {
    size_t n;
    char *file = fx_read(path, &n);
    uint64_t header;
    memcpy(&header, file, 8);
    struct fx_tensors t = {.header = json_loadb(file + 8, header, 0, NULL)};
    assert_non_null(t.header);
    t.n = n - 8 - header;
    t.data = malloc(t.n + 1);
    memcpy(t.data, file + 8 + header, t.n);
    free(file);
    return t;
}

/* pad: spaces after the header, so that tests can move the data to odd addresses. */
static inline void fx_store(const char *path, struct fx_tensors *t, size_t pad) {
    struct buf b = {0};
    char *text = json_dumps(t->header, JSON_COMPACT);
    uint64_t n = strlen(text) + pad;
    assert_true(buf_append(&b, &n, 8) && buf_puts(&b, text));
    for (size_t i = 0; i < pad; i++) assert_true(buf_puts(&b, " "));
    assert_true(buf_append(&b, t->data, t->n));
    fx_write(path, b.data, b.len);
    buf_free(&b);
    free(text);
    json_decref(t->header);
    free(t->data);
}

static inline uint8_t *fx_tensor(struct fx_tensors *t, const char *name, size_t *bytes) {
    json_t *o = json_object_get(json_object_get(t->header, name), "data_offsets");
    if (!o) fail_msg("fixture has no tensor %s", name);
    size_t begin = (size_t)json_integer_value(json_array_get(o, 0));
    if (bytes) *bytes = (size_t)json_integer_value(json_array_get(o, 1)) - begin;
    return t->data + begin;
}

/* Appends a tensor of zeros. */
static inline void fx_append(struct fx_tensors *t, const char *name, const char *dtype, size_t n,
                             size_t element) {
    json_object_set_new(t->header, name,
                        json_pack("{s:s, s:[I], s:[I, I]}", "dtype", dtype, "shape", (json_int_t)n,
                                  "data_offsets", (json_int_t)t->n,
                                  (json_int_t)(t->n + n * element)));
    t->data = realloc(t->data, t->n + n * element + 1);
    memset(t->data + t->n, 0, n * element);
    t->n += n * element;
}

/* ---- expectations ---------------------------------------------------------------------------- */

static inline void fx_message_has(const char *message, const char *part) {
    if (!strstr(message, part)) fail_msg("message lacks \"%s\": %s", part, message);
}

/* Loading fails with that code and a message that has "found", "expected", a remedy and each of the
 * parts (ended by NULL); an inspection finds the fault as well. */
static inline void fx_refused(const char *path, int code, ...) {
    lily_err err = {0};
    struct ckpt *c = NULL;
    int rc = fx_load(path, false, &c, &err);
    if (rc == 0) fail_msg("%s: was accepted", path);
    if (rc != code) fail_msg("code %d instead of %d: %s", rc, code, err.msg);
    assert_int_equal(err.code, code);
    assert_null(c);
    fx_message_has(err.msg, "found ");
    fx_message_has(err.msg, ", expected ");
    if (!strchr(err.msg, ';') && !strstr(err.msg, "again")) fail_msg("no remedy: %s", err.msg);
    va_list parts;
    va_start(parts, code);
    for (const char *part; (part = va_arg(parts, const char *));) fx_message_has(err.msg, part);
    va_end(parts);

    char *text = NULL;
    if (ckpt_inspect(path, NULL, &text, &err) != 0) fail_msg("inspect: %s", err.msg);
    json_t *root = json_loads(text, 0, NULL);
    assert_non_null(root);
    assert_true(json_is_false(json_object_get(root, "ok")));
    assert_true(json_array_size(json_object_get(root, "faults")) > 0);
    json_decref(root);
    free(text);
}

/* No file of that folder but those named (ended by NULL). */
static inline void fx_only(const char *folder, ...) {
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.' && (!e->d_name[1] || e->d_name[1] == '.')) continue;
        bool known = false;
        va_list names;
        va_start(names, folder);
        for (const char *name; (name = va_arg(names, const char *));) {
            known = known || strcmp(name, e->d_name) == 0;
        }
        va_end(names);
        if (!known) fail_msg("%s: left behind %s", folder, e->d_name);
    }
    closedir(d);
}

#endif

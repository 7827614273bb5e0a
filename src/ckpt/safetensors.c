#include "ckpt/safetensors.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "ckpt/json.h"

static const struct {
    const char *name;
    size_t bytes;
} dtypes[ST_DTYPE_COUNT] = {
#define ST_DTYPE_ROW(name, bytes) {#name, bytes},
    ST_DTYPE_MAP(ST_DTYPE_ROW)
#undef ST_DTYPE_ROW
};

const char *st_dtype_name(enum st_dtype dtype) {
    return dtypes[dtype].name;
}

const char *st_shape_text(const size_t *dims, int rank, char *out, size_t size) {
    size_t used = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < rank && used < size; i++) {
        used += (size_t)snprintf(out + used, size - used, i ? ", %zu" : "%zu", dims[i]);
    }
    if (used < size) snprintf(out + used, size - used, "]");
    return out;
}

static int parse_dtype(const char *path, const char *name, const json_t *entry, struct st_tensor *t,
                       lily_err *err) {
    const char *text = json_string_value(json_object_get(entry, "dtype"));
    for (int i = 0; text && i < ST_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, text) == 0) {
            t->dtype = (enum st_dtype)i;
            return 0;
        }
    }
    return ERR(err, LILY_EFORMAT,
               "%s: tensor %.120s: found dtype %.40s, expected one of the format's types such as "
               "BF16 or U32; download the file again",
               path, name, text ? text : "(none)");
}

static int parse_shape(const char *path, const char *name, const json_t *entry, struct st_tensor *t,
                       lily_err *err) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > ST_MAX_RANK) {
        return ERR(err, LILY_EFORMAT,
                   "%s: tensor %.120s: found no usable shape, expected a list of at most %d "
                   "numbers; download the file again",
                   path, name, ST_MAX_RANK);
    }
    t->rank = (int)json_array_size(shape);
    for (int i = 0; i < t->rank; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        json_int_t value = json_integer_value(d);
        if (!json_is_integer(d) || value < 0) {
            return ERR(err, LILY_EFORMAT,
                       "%s: tensor %.120s: found a dimension that is not a count, expected whole "
                       "numbers from 0; download the file again",
                       path, name);
        }
        t->dims[i] = (size_t)value;
    }
    return 0;
}

/* The range must lie inside the data and be exactly as long as dtype and shape say. */
static int parse_range(const char *path, const char *name, const json_t *entry, const uint8_t *data,
                       size_t data_bytes, struct st_tensor *t, lily_err *err) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last) ||
        begin < 0 || end < begin) {
        return ERR(err, LILY_EFORMAT,
                   "%s: tensor %.120s: found data_offsets that are no range, expected [begin, end] "
                   "with 0 <= begin <= end; download the file again",
                   path, name);
    }
    if ((uint64_t)end > data_bytes) {
        return ERR(err, LILY_EFORMAT,
                   "%s: tensor %.120s: found its end at byte %" JSON_INTEGER_FORMAT
                   " of the data, expected at most %zu: the file is cut short; download it again",
                   path, name, end, data_bytes);
    }
    size_t want = dtypes[t->dtype].bytes;
    bool fits = true;
    for (int i = 0; i < t->rank; i++) fits = fits && size_mul(want, t->dims[i], &want);
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    if (!fits || want != t->bytes) {
        char shape[128], needs[32] = "beyond any size";
        if (fits) snprintf(needs, sizeof needs, "%zu", want);
        return ERR(err, LILY_EFORMAT,
                   "%s: tensor %.120s: found %zu bytes, expected what %s %s needs (%s); download "
                   "the file again",
                   path, name, t->bytes, dtypes[t->dtype].name,
                   st_shape_text(t->dims, t->rank, shape, sizeof shape), needs);
    }
    return 0;
}

static int by_data(const void *a, const void *b) {
    const struct st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    /* Empty tensors come before the one that starts at the same place. */
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Sorted ranges must tile the data: no gap, no overlap, nothing after the last one. */
static int check_tiling(const char *path, const struct st_file *f, const uint8_t *data,
                        size_t data_bytes, lily_err *err) {
    const uint8_t *at = data;
    for (size_t i = 0; i < f->n; i++) {
        const struct st_tensor *t = &f->tensors[i];
        if (t->data != at) {
            bool overlap = t->data < at;
            return ERR(err, LILY_EFORMAT,
                       "%s: tensor %.120s: found its data at byte %zu, expected byte %zu (%s); "
                       "download the file again",
                       path, t->name, (size_t)(t->data - data), (size_t)(at - data),
                       overlap ? "it overlaps the tensor before it" : "a gap lies before it");
        }
        at += t->bytes;
    }
    if ((size_t)(at - data) != data_bytes) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found %zu bytes after the last tensor, expected none; download the file "
                   "again",
                   path, data_bytes - (size_t)(at - data));
    }
    return 0;
}

static int parse_tensors(const char *path, const uint8_t *data, size_t data_bytes,
                         struct st_file *f, lily_err *err) {
    f->tensors = calloc(json_object_size(f->header) + 1, sizeof *f->tensors);
    if (!f->tensors) return ERR_NOMEM(err, path);
    const char *name;
    json_t *entry;
    json_object_foreach(f->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) continue;
        struct st_tensor *t = &f->tensors[f->n];
        t->name = name;
        int rc = parse_dtype(path, name, entry, t, err);
        if (rc == 0) rc = parse_shape(path, name, entry, t, err);
        if (rc == 0) rc = parse_range(path, name, entry, data, data_bytes, t, err);
        if (rc != 0) return rc;
        f->n++;
    }
    qsort(f->tensors, f->n, sizeof *f->tensors, by_data);
    return check_tiling(path, f, data, data_bytes, err);
}

int st_parse(const char *path, const uint8_t *data, size_t size, struct st_file *out,
             lily_err *err) {
    *out = (struct st_file){0};
    if (size < 8) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found %zu bytes, expected a safetensors file of at least 8; download the "
                   "file again",
                   path, size);
    }
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | data[i];
    if (length > ST_MAX_HEADER || length > size - 8) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found a header of %" PRIu64 " bytes, expected at most %" PRIu64
                   " (file size %zu): not a safetensors file, or cut short; download it again",
                   path, length, length > ST_MAX_HEADER ? ST_MAX_HEADER : (uint64_t)size - 8, size);
    }
    char what[320];
    snprintf(what, sizeof what, "%.256s: header", path);
    int rc = json_parse_object(what, (const char *)data + 8, (size_t)length, &out->header, err);
    if (rc != 0) return rc;
    out->header_bytes = 8 + (size_t)length;
    rc = parse_tensors(path, data + out->header_bytes, size - out->header_bytes, out, err);
    if (rc != 0) st_close(out);
    return rc;
}

void st_close(struct st_file *f) {
    free(f->tensors);
    json_decref(f->header);
    *f = (struct st_file){0};
}

#include "serve/fields.h"

#include <math.h>
#include <stdio.h>

const char *field_type(const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

json_t *field_get(const json_t *object, const char *name) {
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

static void field_path(char *out, size_t size, const char *path, const char *name) {
    snprintf(out, size, "%s%s%s", path, path[0] && name[0] ? "." : "", name);
}

int field_wrong(const char *path, const char *name, const json_t *value, const char *wanted,
                struct api_error *err) {
    char full[160];
    field_path(full, sizeof full, path, name);
    return api_error_set(err, 400, "invalid_type", full, "%s: found %s, expected %s", full,
                         value ? field_type(value) : "nothing", wanted);
}

int field_bool(const json_t *object, const char *path, const char *name, bool *value,
               struct api_error *err) {
    const json_t *v = field_get(object, name);
    if (!v) return 0;
    if (!json_is_boolean(v)) return field_wrong(path, name, v, "a boolean", err);
    *value = json_is_true(v);
    return 0;
}

int field_number(const json_t *object, const char *path, const char *name, double lo, double hi,
                 double *value, struct api_error *err) {
    const json_t *v = field_get(object, name);
    if (!v) return 0;
    if (!json_is_number(v)) return field_wrong(path, name, v, "a number", err);
    double x = json_number_value(v);
    if (!(x >= lo && x <= hi)) {
        char full[160];
        field_path(full, sizeof full, path, name);
        return api_error_set(err, 400, "invalid_value", full,
                             "%s: found %.12g, expected a number from %g to %g", full, x, lo, hi);
    }
    *value = x;
    return 0;
}

int field_integer(const json_t *object, const char *path, const char *name, int64_t lo, int64_t hi,
                  int64_t *value, struct api_error *err) {
    const double limit = 9223372036854775808.0; /* 2^63: what is below it fits */
    const json_t *v = field_get(object, name);
    if (!v) return 0;
    double real = json_number_value(v);
    if (!json_is_number(v) || (json_is_real(v) && real != floor(real)))
        return field_wrong(path, name, v, "an integer", err);
    /* Integers of more than 64 bits were read as the nearest double. */
    bool fits = json_is_integer(v) || (real >= -limit && real < limit);
    int64_t x = json_is_integer(v) ? (int64_t)json_integer_value(v) : fits ? (int64_t)real : 0;
    if (!fits || x < lo || x > hi) {
        char full[160], found[32];
        field_path(full, sizeof full, path, name);
        if (fits) snprintf(found, sizeof found, "%lld", (long long)x);
        if (!fits) snprintf(found, sizeof found, "%.20g", real);
        return api_error_set(err, 400, "invalid_value", full,
                             "%s: found %s, expected an integer from %lld to %lld", full, found,
                             (long long)lo, (long long)hi);
    }
    *value = x;
    return 0;
}

int field_string(const json_t *object, const char *path, const char *name, const char **value,
                 struct api_error *err) {
    const json_t *v = field_get(object, name);
    if (!v) return 0;
    if (!json_is_string(v)) return field_wrong(path, name, v, "a string", err);
    *value = json_string_value(v);
    return 0;
}

int field_object(const json_t *object, const char *path, const char *name, json_t **value,
                 struct api_error *err) {
    json_t *v = field_get(object, name);
    *value = v;
    if (v && !json_is_object(v)) return field_wrong(path, name, v, "an object", err);
    return 0;
}

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
                             "%s: found %g, expected a number from %g to %g", full, x, lo, hi);
    }
    *value = x;
    return 0;
}

int field_integer(const json_t *object, const char *path, const char *name, int64_t lo, int64_t hi,
                  int64_t *value, struct api_error *err) {
    const json_t *v = field_get(object, name);
    if (!v) return 0;
    double real = json_number_value(v);
    bool whole = json_is_integer(v) ||
                 (json_is_real(v) && real == floor(real) && fabs(real) < 9007199254740992.0);
    if (!whole) return field_wrong(path, name, v, "an integer", err);
    int64_t x = json_is_integer(v) ? (int64_t)json_integer_value(v) : (int64_t)real;
    if (x < lo || x > hi) {
        char full[160];
        field_path(full, sizeof full, path, name);
        return api_error_set(err, 400, "invalid_value", full,
                             "%s: found %lld, expected an integer from %lld to %lld", full,
                             (long long)x, (long long)lo, (long long)hi);
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

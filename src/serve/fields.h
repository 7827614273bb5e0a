/* Readers of JSON fields: absent and null leave the value as it is, a wrong type or value is a 400
 * that names the field. path is the object's own path ("", "stream_options"). Each returns 0 or -1
 * with err set. */
#ifndef LILY_SERVE_FIELDS_H
#define LILY_SERVE_FIELDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "serve/api_error.h"

/* "string", "integer", "null", ... for messages. */
const char *field_type(const json_t *value);

/* The member, or NULL when it is absent or null. */
json_t *field_get(const json_t *object, const char *name);

int field_bool(const json_t *object, const char *path, const char *name, bool *value,
               struct api_error *err);
int field_number(const json_t *object, const char *path, const char *name, double lo, double hi,
                 double *value, struct api_error *err);
/* 5.0 counts as 5. */
int field_integer(const json_t *object, const char *path, const char *name, int64_t lo, int64_t hi,
                  int64_t *value, struct api_error *err);
int field_string(const json_t *object, const char *path, const char *name, const char **value,
                 struct api_error *err);
/* *value: the object, NULL when absent. */
int field_object(const json_t *object, const char *path, const char *name, json_t **value,
                 struct api_error *err);

/* "<path>.<name>: found <type of value>, expected <wanted>"; always -1. */
int field_wrong(const char *path, const char *name, const json_t *value, const char *wanted,
                struct api_error *err);

#endif

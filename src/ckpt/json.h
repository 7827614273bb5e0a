/* jansson with this layer's rules: duplicate keys, invalid UTF-8 and trailing text are errors, and
 * a message names the file and the place. */
#ifndef LILY_CKPT_JSON_H
#define LILY_CKPT_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "base/err.h"

/* Parses an object; *out is the caller's to json_decref. what names the text in messages. */
int json_parse_object(const char *what, const char *text, size_t n, json_t **out, lily_err *err);

#endif

/* An error as OpenAI's clients read it: {"error": {"message", "type", "param", "code"}}. */
#ifndef LILY_SERVE_API_ERROR_H
#define LILY_SERVE_API_ERROR_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct api_error {
    int status;          /* HTTP status; 0: no error */
    const char *code;    /* static, may be NULL */
    char param[160];     /* the field at fault ("messages[2].content"), "" if none */
    char message[640];   /* for a person */
    int32_t retry_after; /* seconds; 0: no Retry-After header; a 503 begins with 1 */
    int64_t n_prompt;    /* context_length_exceeded only: tokens of the prompt */
    int64_t n_ctx;       /* and tokens the context holds */
};

/* Fills e and returns -1, so that `return api_error_set(...)` ends a check. param may be NULL. */
int api_error_set(struct api_error *e, int status, const char *code, const char *param,
                  const char *fmt, ...) PRINTF_LIKE(5, 6);

/* What the engine reported, as a status: the request's fault is 400, a busy or failed backend 503,
 * anything else 500. n_prompt and n_ctx are shown when the context overflowed. */
void api_error_from_engine(struct api_error *e, const lily_err *err, size_t n_prompt,
                           int32_t n_ctx);
void api_error_context(struct api_error *e, size_t n_prompt, int32_t n_ctx);

/* {"error": {...}}, a new reference; NULL: out of memory. */
json_t *api_error_json(const struct api_error *e);

#endif

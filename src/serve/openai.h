/* The JSON documents of OpenAI's chat completions: chunks of a stream and whole replies. Builders
 * return a new reference or NULL without memory; functions that take a json_t own it from then on,
 * also when it is NULL or they fail. */
#ifndef LILY_SERVE_OPENAI_H
#define LILY_SERVE_OPENAI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lily.h"

/* What every chunk of one reply repeats. Strings outlive the head. */
struct reply_head {
    const char *id; /* "chatcmpl-..." */
    int64_t created;
    const char *model;
    const char *fingerprint; /* version and backend */
    bool include_usage;      /* chunks carry "usage": null until the last */
};

/* "stop", "length" or "tool_calls". */
const char *openai_finish(enum lily_finish finish);
json_t *openai_usage(const lily_result *result);

/* ---- chunks ---------------------------------------------------------------------------------- */

json_t *openai_delta_role(void);
json_t *openai_delta_text(const char *field, const char *text,
                          size_t n); /* field: "content", ... */
json_t *openai_delta_call(int index, const char *id, const char *name, size_t n);
json_t *openai_delta_args(int index, const char *text, size_t n);
json_t *openai_chunk(const struct reply_head *head, json_t *delta, const char *finish);
json_t *openai_usage_chunk(const struct reply_head *head, const lily_result *result);

/* ---- a whole reply --------------------------------------------------------------------------- */

json_t *openai_call(const char *id, const char *name, const char *args, size_t n_args);
/* reasoning and calls (array) may be NULL; content is null when there are calls and no text. */
json_t *openai_message(json_t *content, json_t *reasoning, json_t *calls);
json_t *openai_completion(const struct reply_head *head, json_t *message, const char *finish,
                          const lily_result *result);

#endif

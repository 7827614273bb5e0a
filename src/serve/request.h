/* A chat completion request: from the bytes of a body to checked values. Unknown fields are
 * accepted, wrong types and values refused by name, and a known field that would change the
 * meaning but is not supported is refused too rather than ignored. */
#ifndef LILY_SERVE_REQUEST_H
#define LILY_SERVE_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lily.h"
#include "serve/api_error.h"

/* What a request is checked against and filled up from; made once from the engine. */
struct request_limits {
    int32_t vocab;
    lily_sampling thinking, plain; /* the checkpoint's defaults in the two modes */
};

struct chat_request {
    bool stream;
    bool include_usage; /* a usage chunk ends the stream */
    bool thinking;
    bool preserve_thinking;
    bool ignore_eos;
    int32_t max_tokens;     /* 0: until the context ends */
    lily_sampling sampling; /* bias_ids and bias are owned by the request */
    char **stops;           /* [n_stops], owned */
    size_t n_stops;
    char *messages; /* JSON array, owned */
    char *tools;    /* JSON array, owned; NULL: none to offer */
};

#define REQUEST_MAX_STOPS      16
#define REQUEST_MAX_STOP_BYTES 1024

/* 0 and *out, which request_free releases; or -1 and err (400, or 503 without memory). */
int request_parse(const char *body, size_t n, const struct request_limits *limits,
                  struct chat_request **out, struct api_error *err);
void request_free(struct chat_request *r); /* NULL is fine */

#endif

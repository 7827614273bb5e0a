/* Server-sent events: the framing of a streamed reply. */
#ifndef LILY_SERVE_SSE_H
#define LILY_SERVE_SSE_H

#include <jansson.h>
#include <stdbool.h>

#include "base/buf.h"

#define SSE_CONTENT_TYPE "text/event-stream; charset=utf-8"

/* Each appends one event to out; false: out of memory (out is then not to be sent). */
bool sse_data(struct buf *out, const json_t *value); /* "data: {...}\n\n" */
bool sse_done(struct buf *out);                      /* "data: [DONE]\n\n" */
bool sse_keepalive(struct buf *out);                 /* a comment, which clients skip */

#endif

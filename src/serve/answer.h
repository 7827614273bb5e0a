/* The reply to one request as it grows: the engine's events in, frames of a stream or one whole
 * document out. Nothing here knows of connections. A reader that is slower than the model costs
 * little memory: while frames are held, pieces of the same kind are joined into one. */
#ifndef LILY_SERVE_ANSWER_H
#define LILY_SERVE_ANSWER_H

#include <stdbool.h>

#include "base/buf.h"
#include "serve/api_error.h"
#include "serve/openai.h"

#define ANSWER_MAX_BYTES (16u << 20) /* of a reply's text; it then ends with "length" */

struct answer_call {
    char id[40];
    char *name;
    bool has_args;
    struct buf args; /* whole replies only */
};

struct answer {
    struct reply_head head;
    bool stream;
    size_t total; /* bytes of text so far */
    struct buf content, reasoning;
    struct answer_call *calls; /* [n_calls] */
    int n_calls;
    struct buf held; /* stream: joined pieces not yet framed, all of held_kind */
    enum lily_event_kind held_kind;
    int held_call;
};

void answer_init(struct answer *a, const struct reply_head *head, bool stream);
void answer_free(struct answer *a);

/* All append what is to be sent to out; false: out of memory. */
bool answer_begin(struct answer *a, struct buf *out); /* stream: the role chunk */
bool answer_event(struct answer *a, const lily_event *event, bool hold, struct buf *out);
/* The end: terminal chunk, usage chunk when asked for, [DONE]; or the whole document. */
bool answer_finish(struct answer *a, enum lily_finish finish, const lily_result *result,
                   struct buf *out);
/* The end of a stream that failed half-way: an error event and [DONE]. */
bool answer_error(struct answer *a, const struct api_error *err, struct buf *out);

/* prefix and 24 random letters and digits; size includes the zero. */
void answer_make_id(char *out, size_t size, const char *prefix);

#endif

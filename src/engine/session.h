/* A session: the tokens read so far together with the backend's state after them.
 *
 *   tokens[0, held)      whose KV rows the backend holds
 *   position <= held     where the backend's recurrent state stands (it is below held only between
 *                        going back to a checkpoint and reading on)
 *   checkpoints          each taken at a position of tokens[0, held)
 *
 * Every change of a token first drops what no longer belongs to it, so whatever is resumed was
 * computed from exactly the tokens it is resumed for. */
#ifndef LILY_ENGINE_SESSION_H
#define LILY_ENGINE_SESSION_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "engine/states.h"

enum { SESSION_FORKS = 4 };

struct lily_session {
    lily_engine *engine;
    struct backend_session *backend; /* owned */
    int32_t context;
    int32_t *tokens; /* [context] of which [held] are valid */
    int32_t held;
    float *logits;   /* [vocab] after the token before position, while has_logits */
    bool has_logits; /* finite ones */
    struct states states;
    int32_t forks[SESSION_FORKS]; /* [n_forks] grid points where the present prompt may fork */
    int32_t n_forks;
    struct sampler *sampler; /* owned */
    atomic_bool cancel;
};

/* After each chunk of reading, and once before the first: done of total. Nonzero cancels. */
typedef int (*session_progress_fn)(void *arg, int32_t done, int32_t total);

/* Brings the session to ids[n] with logits; *cached: tokens that were not read again. Cancelled
 * (by progress or lily_cancel) it returns LILY_ECANCELED and keeps what was read; after an error of
 * the backend the session is empty. Does not clear the cancel flag. */
int session_sync(lily_session *s, const int32_t *ids, size_t n, session_progress_fn progress,
                 void *arg, int32_t *cached, lily_err *err);

/* Appends a token by the decode path, with logits. */
int session_step(lily_session *s, int32_t id, lily_err *err);

int32_t session_position(const lily_session *s);
bool session_cancelled(lily_session *s);

#endif

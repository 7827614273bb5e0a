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

/* Where a session lies while its memory is given back (rest.h). */
struct rest {
    bool on_disk;
    int fd;           /* while on_disk */
    int32_t position; /* of the state there */
    int32_t wait;     /* seconds to the next try after one that failed; 0: none did */
    int64_t next_ns;  /* when that is */
};

struct lily_session {
    lily_engine *engine;
    struct backend_session *backend; /* owned; NULL at rest */
    struct rest rest;
    int32_t context;
    int32_t *tokens; /* [context] of which [held] are valid */
    int32_t held;
    float *logits;   /* [vocab] after the token before position, while has_logits */
    bool has_logits; /* finite ones */
    struct states states;
    int32_t forks[SESSION_FORKS]; /* [n_forks] grid points where the present prompt may fork */
    int32_t n_forks;
    struct sampler *sampler; /* owned */
    /* while a request is decoded */
    bool on_device;                   /* the device samples: */
    struct backend_sampling sampling; /* how, */
    uint64_t pick;                    /* the number of its next pick, */
    int32_t in_flight;                /* steps submitted and not waited for: 0 to 2 */
    atomic_bool cancel;
};

/* Every public call on a session begins with session_enter, which clears the cancel flag and wakes
 * a session at rest, and ends with session_leave, which returns rc. LILY_EBUSY: it comes from a
 * callback of a running one. LILY_ENOMEM, LILY_ECANCELED: there is no room to wake it, or that was
 * cancelled, and it rests on. */
int session_enter(lily_session *s, lily_err *err);
int session_leave(lily_session *s, int rc);

/* Forgets all tokens and checkpoints. */
void session_empty(lily_session *s);

/* After each chunk of reading, and once before the first: done of total. Nonzero cancels. */
typedef int (*session_progress_fn)(void *arg, int32_t done, int32_t total);

/* Brings the session to ids[n] with logits; *cached: tokens that were not read again. Cancelled
 * (by progress or lily_cancel) it returns LILY_ECANCELED and keeps what was read; after an error of
 * the backend the session is empty. */
int session_sync(lily_session *s, const int32_t *ids, size_t n, session_progress_fn progress,
                 void *arg, int32_t *cached, lily_err *err);

/* Appends a token by the decode path, with logits. */
int session_step(lily_session *s, int32_t id, lily_err *err);

/* Decoding a request: session_begin, session_next as often as a further token is wanted, and
 * session_settle in any case, also after an error.
 *
 * Where the device can sample as the request asks it runs one step ahead: while the host looks at a
 * token the step that appends it is under way and, behind it, the next one, which reads its token
 * on the device. Then the session has no logits. A stop is found one step late, and that step is
 * taken back: either way the token picked last is not part of the session. The device waits for
 * the host once in BACKEND_GRID tokens, where a checkpoint is taken, and before the last token. */

/* sampler_begin, and a first token picked on the host, came before. prompt[n] is the whole prompt.
 */
int session_begin(lily_session *s, const int32_t *prompt, size_t n, lily_err *err);
/* Appends id, the token picked last, and picks the next. wanted: tokens the request can still take,
 * at least 1. */
int session_next(lily_session *s, int32_t id, int32_t wanted, int32_t *next, lily_err *err);
void session_settle(lily_session *s);

int32_t session_position(const lily_session *s);
bool session_cancelled(lily_session *s);

#endif

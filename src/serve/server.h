/* The server's shared state. Threads: libmicrohttpd's (sockets, http.c), intake (parses bodies,
 * renders and tokenises prompts, intake.c), the worker (the only one that runs the model,
 * worker.c), and the caller of serve_run, which watches sockets and clocks (watch.c). One lock
 * guards everything below it; it is never held while the model, a parser or a log runs. */
#ifndef LILY_SERVE_SERVER_H
#define LILY_SERVE_SERVER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lily.h"
#include "serve/request.h"
#include "serve/serve.h"

struct MHD_Daemon;
struct conn;
struct job;

#define SERVER_MAX_NAME 127 /* bytes of the model's name, which clients send back in a path */

struct server_totals {
    uint64_t requests;  /* chat completions accepted */
    uint64_t completed; /* answered to the end */
    uint64_t hang_ups;  /* clients gone before that */
    uint64_t refused;   /* 503: queue or memory */
    uint64_t failed;    /* engine errors */
    uint64_t prompt_tokens, cached_tokens, output_tokens;
};

struct server {
    lily_engine *engine;
    lily_session *session; /* the worker's, but for lily_cancel */
    lily_engine_info info;
    struct serve_options options; /* defaults filled in */
    struct request_limits limits;
    const char *model;     /* as clients see it */
    char fingerprint[128]; /* "lily-<version>-<backend>" */
    bool loopback;         /* bound to this machine only: Host is checked */
    int64_t started_ns, started_unix;
    struct MHD_Daemon *daemon;
    int listener; /* once quiesced, else -1 */
    int wake[2];  /* pipe: a byte wakes the watch */

    pthread_mutex_t lock;     /* guards all below, jobs and connections included */
    pthread_cond_t work;      /* a job changed state, or stopping */
    bool stopping;            /* no new jobs, the running one is cancelled */
    bool watches_memory;      /* while idle, lily_session_idle, */
    bool resting;             /* which runs now */
    struct job *first, *last; /* jobs not yet done, oldest first */
    int n_jobs;
    struct job *running;
    int32_t session_tokens; /* held by the session when the last run ended */
    struct job *unheld;     /* done and let go by all: the watch logs and frees them */
    struct conn *conns;     /* open connections */
    int n_conns;
    size_t held_bytes;   /* of bodies and prompts kept for clients */
    double mean_seconds; /* of recent jobs, for Retry-After */
    struct server_totals totals;
};

/* Bodies and prompts that all clients together may make the server hold. */
size_t server_memory_limit(const struct server *s);
/* Seconds after which a refused client may try again (lock held). */
int32_t server_retry_after(const struct server *s);
void server_wake(struct server *s);

#endif

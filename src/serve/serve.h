/* The HTTP server: OpenAI's chat completions over one engine. */
#ifndef LILY_SERVE_SERVE_H
#define LILY_SERVE_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lily.h"

struct serve_options {
    const char *host;          /* NULL: 127.0.0.1 */
    uint16_t port;             /* 0: any free one, printed */
    const char *model_alias;   /* NULL: the engine's model name; what /v1/models and replies show */
    size_t max_body;           /* bytes of a request body; 0: 32 MiB */
    int32_t max_queue;         /* requests waiting; 0: 64 */
    int32_t max_connections;   /* 0: 256 */
    int32_t idle_seconds;      /* a connection that sends nothing for so long is closed; 0: 60 */
    int32_t keepalive_seconds; /* comment on a silent stream; 0: 5 */
    bool quiet;                /* no access log on standard error */
};

/* local: the address bound is one that only this machine reaches. */
typedef void (*serve_ready_fn)(void *arg, uint16_t port, bool local);

/* Serves until serve_stop, SIGINT or SIGTERM; then lets running replies end within a token. The
 * engine stays the caller's. ready (may be NULL) is called once, when the port is bound. One server
 * runs at a time in a process. */
int serve_run(lily_engine *engine, const struct serve_options *options, serve_ready_fn ready,
              void *arg, lily_err *err);

/* Ends serve_run from a signal handler or another thread. */
void serve_stop(void);

#endif

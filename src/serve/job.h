/* One chat completion on its way: intake, queued, running, done. It is held by the server's list
 * while it is not done, by the connection that asked, and by a thread that works on it; when the
 * last lets go it is logged and freed. All functions but jobs_reap are called with the server's
 * lock held. */
#ifndef LILY_SERVE_JOB_H
#define LILY_SERVE_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "serve/answer.h"
#include "serve/api_error.h"
#include "serve/request.h"
#include "serve/server.h"

struct MHD_Connection;

enum job_state { JOB_INTAKE, JOB_QUEUED, JOB_RUNNING, JOB_DONE };

/* Bytes a stream's reader may lag behind before pieces are joined instead of framed. */
#define JOB_LAG_BYTES 65536

struct job {
    struct server *server;
    struct job *next, *prev; /* in the server's list; next also among the jobs to be reaped */
    int refs;
    enum job_state state;
    char id[48];
    struct buf body;           /* until intake takes it */
    struct chat_request *chat; /* from the end of intake on */
    lily_tokens prompt;
    struct answer answer; /* the worker's alone while the job runs */
    size_t held;          /* bytes counted in server.held_bytes */

    /* the client */
    struct MHD_Connection *connection; /* NULL once libmicrohttpd has let go of it */
    struct conn *conn;                 /* lives and dies with connection */
    int fd;                            /* its socket, -1 once gone */
    bool suspended;                    /* the connection waits for job_resume */
    bool gone;                         /* nobody will read the reply */

    /* the reply */
    bool ready;             /* it may begin: a stream's head is decided, or all of it is there */
    struct api_error error; /* status 0: 200 */
    struct buf out;         /* for the client; the bytes before out_read are taken */
    size_t out_read;
    int64_t written_ns; /* when the stream last grew */

    /* for health and the log */
    int32_t prefill_done, prefill_total;
    int64_t accepted_ns, started_ns, first_ns, done_ns; /* first: of the reply's first event */
    lily_result result;
    const char *outcome; /* static: the finish reason, an error's code, or where it was left */
};

/* A new job in the server's list, with the list's and the connection's reference. It takes over
 * body and the held bytes counted for it. NULL and err: the queue is full or the server stops. */
struct job *job_submit(struct server *s, struct buf *body, size_t held, struct api_error *err);

struct job *job_oldest(const struct server *s, enum job_state state); /* NULL: none */

void job_ref(struct job *job);
void job_unref(struct job *job);

/* Frees and logs the jobs that nobody holds any more. Not to be called with the lock held. */
void jobs_reap(struct server *s);

/* Changes the bytes counted for the job. */
void job_hold(struct job *job, size_t bytes);

void job_resume(struct job *job); /* wakes the connection if it waits */
bool job_streams(const struct job *job);
size_t job_unread(const struct job *job);
/* Adds to the reply of a client that is still there; false: out of memory. */
bool job_write(struct job *job, const char *bytes, size_t n);

/* Ends the job: the reply is complete, and the list lets go of it. */
void job_done(struct job *job, const char *outcome);
/* Ends it with an error: a status of its own, or an event if the stream has begun. Only while no
 * thread is inside job->answer. */
void job_fail(struct job *job, const struct api_error *err);

/* The client is gone. A job that is not running ends; a running one is ended by the worker. */
void job_hang_up(struct job *job);
/* Looks at the client's socket, for libmicrohttpd does not while a connection is suspended. */
void job_probe(struct job *job);

#endif

#include "serve/job.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <microhttpd.h>

#include "base/clock.h"
#include "serve/access_log.h"
#include "serve/http.h"

#ifndef POLLRDHUP
#define POLLRDHUP 0 /* recv tells instead */
#endif

/* ---- life ------------------------------------------------------------------------------------ */

static void list_append(struct server *s, struct job *job) {
    job->prev = s->last;
    if (s->last) s->last->next = job;
    if (!s->first) s->first = job;
    s->last = job;
    s->n_jobs++;
}

static void list_remove(struct server *s, struct job *job) {
    if (job->prev) job->prev->next = job->next;
    if (job->next) job->next->prev = job->prev;
    if (s->first == job) s->first = job->next;
    if (s->last == job) s->last = job->prev;
    job->next = job->prev = NULL;
    s->n_jobs--;
}

static struct job *refuse(struct server *s, struct api_error *err, const char *code,
                          const char *why) {
    s->totals.refused++;
    api_error_set(err, 503, code, NULL, "server: %s; try again later", why);
    err->retry_after = server_retry_after(s);
    return NULL;
}

struct job *job_submit(struct server *s, struct buf *body, size_t held, struct api_error *err) {
    if (s->stopping) return refuse(s, err, "shutting_down", "it is shutting down");
    if (s->n_jobs > s->options.max_queue) {
        return refuse(s, err, "queue_full", "its queue of requests is full");
    }
    struct job *job = calloc(1, sizeof *job);
    if (!job) return refuse(s, err, "out_of_memory", "it is out of memory");
    job->server = s;
    job->refs = 2;
    job->fd = -1;
    job->body = *body;
    job->held = held;
    *body = (struct buf){0};
    job->accepted_ns = clock_ns();
    answer_make_id(job->id, sizeof job->id, "chatcmpl-");
    s->totals.requests++;
    list_append(s, job);
    return job;
}

struct job *job_oldest(const struct server *s, enum job_state state) {
    struct job *job = s->first;
    while (job && job->state != state) job = job->next;
    return job;
}

void job_ref(struct job *job) {
    job->refs++;
}

void job_unref(struct job *job) {
    struct server *s = job->server;
    if (--job->refs) return;
    job_hold(job, 0);
    job->next = s->unheld;
    s->unheld = job;
    server_wake(s);
}

static void job_free(struct job *job) {
    buf_free(&job->body);
    buf_free(&job->out);
    request_free(job->chat);
    lily_tokens_free(&job->prompt);
    answer_free(&job->answer);
    free(job);
}

void jobs_reap(struct server *s) {
    pthread_mutex_lock(&s->lock);
    struct job *job = s->unheld;
    s->unheld = NULL;
    pthread_mutex_unlock(&s->lock);
    while (job) {
        struct job *next = job->next;
        if (!s->options.quiet) access_log_job(job);
        job_free(job);
        job = next;
    }
}

void job_hold(struct job *job, size_t bytes) {
    job->server->held_bytes += bytes - job->held;
    job->held = bytes;
}

/* ---- the reply ------------------------------------------------------------------------------- */

void job_resume(struct job *job) {
    if (!job->suspended || !job->connection) return;
    job->suspended = false;
    MHD_resume_connection(job->connection);
}

bool job_streams(const struct job *job) {
    return job->ready && !job->error.status && job->answer.stream;
}

size_t job_unread(const struct job *job) {
    return job->out.len - job->out_read;
}

bool job_write(struct job *job, const char *bytes, size_t n) {
    if (job->gone || !n) return true;
    if (job->out_read == job->out.len) {
        buf_clear(&job->out);
        job->out_read = 0;
    } else if (job->out_read >= JOB_LAG_BYTES) {
        memmove(job->out.data, job->out.data + job->out_read, job_unread(job));
        job->out.len -= job->out_read;
        job->out_read = 0;
    }
    job->written_ns = clock_ns();
    if (!buf_append(&job->out, bytes, n)) return false;
    if (job->ready) job_resume(job);
    return true;
}

void job_done(struct job *job, const char *outcome) {
    struct server *s = job->server;
    if (job->state == JOB_DONE) return;
    job->state = JOB_DONE;
    job->ready = true;
    job->outcome = outcome;
    job->done_ns = clock_ns();
    if (job->conn) conn_phase(job->conn, CONN_REPLY, job_unread(job));
    job_resume(job);
    list_remove(s, job);
    pthread_cond_broadcast(&s->work);
    server_wake(s);
    job_unref(job);
}

void job_fail(struct job *job, const struct api_error *err) {
    if (job->state == JOB_DONE) return;
    if (job_streams(job)) {
        struct buf frames = {0};
        if (answer_error(&job->answer, err, &frames)) job_write(job, frames.data, frames.len);
        buf_free(&frames);
    } else {
        job->error = *err;
    }
    if (err->status >= 500) job->server->totals.failed++;
    job_done(job, err->code ? err->code : "error");
}

/* ---- the client ------------------------------------------------------------------------------ */

void job_hang_up(struct job *job) {
    static const char *const where[] = {"hang-up in intake", "hang-up in queue"};
    if (job->gone || job->state == JOB_DONE) return;
    job->gone = true;
    job->server->totals.hang_ups++;
    buf_free(&job->out);
    job->out_read = 0;
    if (job->state == JOB_RUNNING) {
        job_resume(job);
        server_wake(job->server); /* the watch cancels the engine, which may be in a long chunk */
    } else {
        job_done(job, where[job->state]);
    }
}

/* A client that shuts its sending side down counts as gone: it is what closing looks like, and no
 * client of this API half-closes. */
static bool socket_gone(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
    if (poll(&p, 1, 0) <= 0) return false;
    if (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) return true;
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void job_probe(struct job *job) {
    if (!job->gone && job->fd >= 0 && socket_gone(job->fd)) job_hang_up(job);
}

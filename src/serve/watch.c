#include "serve/watch.h"

#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "serve/http.h"
#include "serve/job.h"
#include "serve/sse.h"

/* How often sockets are looked at while a request is served, and deadlines while none is. */
#define BUSY_MS 25
#define IDLE_MS 500

static void keep_alive(struct job *job, int64_t now) {
    const int64_t silence = (int64_t)job->server->options.keepalive_seconds * 1000000000;
    struct buf comment = {0};
    if (!job_streams(job) || now - job->written_ns < silence) return;
    if (job_unread(job) > JOB_LAG_BYTES) return; /* the silence is the reader's */
    if (sse_keepalive(&comment)) job_write(job, comment.data, comment.len);
    buf_free(&comment);
}

void watch_once(struct server *s) {
    pthread_mutex_lock(&s->lock);
    const int64_t now = clock_ns();
    for (struct job *job = s->first, *next; job; job = next) {
        next = job->next;
        job_probe(job);
        if (job->state != JOB_DONE) keep_alive(job, now);
    }
    /* Repeated on every look: a cancel that comes before the engine has begun may be lost. */
    if (s->running && (s->running->gone || s->stopping)) lily_cancel(s->session);
    /* Nobody waits until gigabytes are on disk, from where they would be read again. */
    if (s->resting && (s->n_jobs || s->stopping)) lily_cancel(s->session);
    for (struct conn *c = s->conns; c; c = c->next)
        if (now > conn_deadline(c)) shutdown(c->fd, SHUT_RDWR); /* libmicrohttpd then closes it */
    pthread_mutex_unlock(&s->lock);
    jobs_reap(s);
}

/* Milliseconds until the next look; -1: until something happens. */
static int pause_ms(struct server *s) {
    pthread_mutex_lock(&s->lock);
    int ms = s->n_jobs ? BUSY_MS : s->n_conns ? IDLE_MS : -1;
    pthread_mutex_unlock(&s->lock);
    return ms;
}

void watch_run(struct server *s, const atomic_int *stop) {
    while (!atomic_load(stop)) {
        struct pollfd p = {.fd = s->wake[0], .events = POLLIN};
        char drained[256];
        if (poll(&p, 1, pause_ms(s)) > 0)
            while (read(s->wake[0], drained, sizeof drained) == (ssize_t)sizeof drained) continue;
        watch_once(s);
    }
}

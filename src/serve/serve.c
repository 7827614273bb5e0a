#include "serve/serve.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "base/clock.h"
#include "serve/http.h"
#include "serve/intake.h"
#include "serve/job.h"
#include "serve/watch.h"
#include "serve/worker.h"

/* ---- what the parts share -------------------------------------------------------------------- */

size_t server_memory_limit(const struct server *s) {
    const size_t least = (size_t)64 << 20;
    size_t room;
    if (!size_mul(s->options.max_body, 4, &room)) return s->options.max_body;
    return room > least ? room : least;
}

int32_t server_retry_after(const struct server *s) {
    double wait = s->mean_seconds * s->n_jobs;
    return wait < 1 ? 1 : wait > 60 ? 60 : (int32_t)wait;
}

void server_wake(struct server *s) {
    ssize_t n = write(s->wake[1], "w", 1); /* a full pipe wakes as well */
    (void)n;
}

/* ---- stopping -------------------------------------------------------------------------------- */

static atomic_int stop_asked;
static atomic_int stop_pipe = -1; /* the write end of the running server's pipe */

void serve_stop(void) {
    int fd = atomic_load(&stop_pipe);
    atomic_store(&stop_asked, 1);
    if (fd >= 0) {
        int saved = errno;
        ssize_t n = write(fd, "s", 1);
        (void)n;
        errno = saved;
    }
}

/* The first of either kind; a second, of whatever kind, ends the process at once. */
static void on_signal(int number) {
    (void)number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    serve_stop();
}

struct signals {
    struct sigaction interrupt, terminate, pipe, file_size;
};

static void signals_install(struct signals *old) {
    struct sigaction stop = {.sa_handler = on_signal};
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGINT, &stop, &old->interrupt);
    sigaction(SIGTERM, &stop, &old->terminate);
    sigaction(SIGPIPE, &ignore, &old->pipe);
    sigaction(SIGXFSZ, &ignore, &old->file_size); /* a log or a session on disk at a limit */
}

static void signals_restore(const struct signals *old) {
    sigaction(SIGINT, &old->interrupt, NULL);
    sigaction(SIGTERM, &old->terminate, NULL);
    sigaction(SIGPIPE, &old->pipe, NULL);
    sigaction(SIGXFSZ, &old->file_size, NULL);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void fill_options(struct server *s, const struct serve_options *options) {
    struct serve_options *o = &s->options;
    *o = *options;
    if (!o->host) o->host = "127.0.0.1";
    if (!o->max_body) o->max_body = (size_t)32 << 20;
    if (o->max_queue <= 0) o->max_queue = 64;
    if (o->max_connections <= 0) o->max_connections = 256;
    if (o->idle_seconds <= 0) o->idle_seconds = 60;
    if (o->keepalive_seconds <= 0) o->keepalive_seconds = 5;
}

/* It stands in every reply, which is JSON, and clients ask for it by path. */
static int check_alias(const char *alias, lily_err *err) {
    json_t *text = json_string(alias);
    json_decref(text);
    if (text && strlen(alias) <= SERVER_MAX_NAME) return 0;
    return ERR(err, LILY_EINVAL, "--alias: found %s, expected UTF-8 text of at most %d bytes",
               text ? "a longer name" : "bytes that are not UTF-8", SERVER_MAX_NAME);
}

static int open_wake(struct server *s, lily_err *err) {
    if (pipe(s->wake)) return ERR(err, LILY_EIO, "server: pipe: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        fcntl(s->wake[i], F_SETFL, O_NONBLOCK);
        fcntl(s->wake[i], F_SETFD, FD_CLOEXEC);
    }
    return 0;
}

static int server_init(struct server *s, lily_engine *engine, const struct serve_options *options,
                       lily_err *err) {
    *s = (struct server){.engine = engine, .listener = -1, .wake = {-1, -1}};
    fill_options(s, options);
    lily_engine_get_info(engine, &s->info);
    s->model = s->options.model_alias ? s->options.model_alias : s->info.model_name;
    snprintf(s->fingerprint, sizeof s->fingerprint, "lily-%s-%s", LILY_VERSION, s->info.backend);
    s->limits.vocab = s->info.vocab;
    lily_sampling_defaults(engine, true, &s->limits.thinking);
    lily_sampling_defaults(engine, false, &s->limits.plain);
    s->started_ns = clock_ns();
    s->started_unix = (int64_t)time(NULL);
    int rc = s->options.model_alias ? check_alias(s->options.model_alias, err) : 0;
    if (!rc) rc = open_wake(s, err);
    if (rc) return rc;
    rc = lily_session_new(engine, 0, &s->session, err);
    if (rc) {
        close(s->wake[0]);
        close(s->wake[1]);
        return rc;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    s->watches_memory = true;
    return 0;
}

static void server_free(struct server *s) {
    lily_session_free(s->session);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    close(s->wake[0]);
    close(s->wake[1]);
}

/* Waiting requests are refused, the running one is cancelled; returns when none is left. */
static void end_jobs(struct server *s) {
    struct api_error error;
    api_error_set(&error, 503, "shutting_down", NULL,
                  "server: it is shutting down; try again later");
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    for (struct job *job = s->first, *next; job; job = next) {
        next = job->next;
        if (job->state != JOB_RUNNING) job_fail(job, &error);
    }
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    const struct timespec pause = {.tv_nsec = 5000000};
    for (bool left = true; left; nanosleep(&pause, NULL)) {
        watch_once(s);
        pthread_mutex_lock(&s->lock);
        left = s->n_jobs > 0;
        pthread_mutex_unlock(&s->lock);
    }
}

/* Gives replies that are complete a moment to reach their clients. */
static void drain_replies(struct server *s) {
    const struct timespec pause = {.tv_nsec = 5000000};
    const int64_t until = clock_ns() + 1000000000;
    for (bool left = true; left && clock_ns() < until; nanosleep(&pause, NULL)) {
        left = false;
        pthread_mutex_lock(&s->lock);
        for (const struct conn *c = s->conns; c; c = c->next) left |= c->phase == CONN_REPLY;
        pthread_mutex_unlock(&s->lock);
    }
}

static int run_threads(struct server *s, serve_ready_fn ready, void *arg, lily_err *err) {
    pthread_t intake, worker;
    uint16_t port;
    if (pthread_create(&intake, NULL, intake_main, s))
        return ERR(err, LILY_ENOMEM, "server: could not start a thread");
    int rc = pthread_create(&worker, NULL, worker_main, s)
                 ? ERR(err, LILY_ENOMEM, "server: could not start a thread")
                 : 0;
    const bool has_worker = !rc;
    if (!rc) rc = http_start(s, &port, err);
    if (!rc) {
        if (ready) ready(arg, port, s->loopback);
        watch_run(s, &stop_asked);
        http_quiesce(s);
    }
    end_jobs(s);
    if (has_worker) pthread_join(worker, NULL);
    pthread_join(intake, NULL);
    if (s->daemon) {
        drain_replies(s);
        http_stop(s);
    }
    jobs_reap(s);
    return rc;
}

int serve_run(lily_engine *engine, const struct serve_options *options, serve_ready_fn ready,
              void *arg, lily_err *err) {
    struct server server;
    struct signals signals;
    int rc = server_init(&server, engine, options, err);
    if (rc) return rc;
    atomic_store(&stop_asked, 0);
    atomic_store(&stop_pipe, server.wake[1]);
    signals_install(&signals);
    rc = run_threads(&server, ready, arg, err);
    signals_restore(&signals);
    atomic_store(&stop_pipe, -1);
    server_free(&server);
    return rc;
}

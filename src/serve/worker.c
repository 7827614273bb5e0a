#include "serve/worker.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "serve/job.h"

/* One run of the model for a job. */
struct run {
    struct job *job;
    bool capped;    /* the reply reached ANSWER_MAX_BYTES */
    bool no_memory; /* a piece of the reply was lost */
};

/* Notes where the run is; true: go on. *hold: the reader lags behind. */
static bool note_event(struct job *job, const lily_event *event, bool *hold) {
    struct server *s = job->server;
    pthread_mutex_lock(&s->lock);
    if (event->kind == LILY_EVENT_PREFILL) {
        job->prefill_done = event->done;
        job->prefill_total = event->total;
    } else if (!job->first_ns) {
        job->first_ns = clock_ns();
    }
    job_probe(job);
    *hold = job_unread(job) > JOB_LAG_BYTES;
    bool go_on = !job->gone && !s->stopping;
    pthread_mutex_unlock(&s->lock);
    return go_on;
}

static bool send_frames(struct job *job, struct buf *frames) {
    if (!frames->len) return true;
    pthread_mutex_lock(&job->server->lock);
    bool ok = job_write(job, frames->data, frames->len);
    pthread_mutex_unlock(&job->server->lock);
    return ok;
}

static int on_event(void *arg, const lily_event *event) {
    struct run *run = arg;
    struct job *job = run->job;
    struct buf frames = {0};
    bool hold;
    if (!note_event(job, event, &hold)) return 1;
    run->no_memory =
        !answer_event(&job->answer, event, hold, &frames) || !send_frames(job, &frames);
    buf_free(&frames);
    run->capped = job->answer.total >= ANSWER_MAX_BYTES;
    return run->no_memory || run->capped;
}

static int generate(struct run *run, lily_result *result, lily_err *err) {
    struct job *job = run->job;
    const struct chat_request *chat = job->chat;
    lily_request request = {
        .prompt = job->prompt.ids,
        .n_prompt = job->prompt.n,
        .max_tokens = chat->max_tokens,
        .sampling = &chat->sampling,
        .stops = (const char *const *)chat->stops,
        .n_stops = chat->n_stops,
        .tools = chat->tools,
        .no_calls = !chat->tools,
        .in_think = chat->thinking,
        .ignore_eos = chat->ignore_eos,
        .on_event = on_event,
        .arg = run,
    };
    return lily_generate(job->server->session, &request, result, err);
}

/* What the client is told about a run that brought no reply. */
static int run_error(const struct run *run, int rc, const lily_result *result, lily_err *err,
                     struct api_error *error) {
    const struct job *job = run->job;
    if (run->no_memory) rc = ERR_NOMEM(err, "reply");
    if (rc) {
        err->code = rc;
        api_error_from_engine(error, err, job->prompt.n, job->server->info.context);
        return rc;
    }
    if (result->finish == LILY_FINISH_CANCELLED && !run->capped) {
        return api_error_set(error, 503, "shutting_down", NULL,
                             "server: it is shutting down; try again later");
    }
    return 0;
}

/* The end of a run, locked. frames: the rest of the reply. */
static void conclude(struct job *job, const lily_result *result, const struct api_error *error,
                     const struct buf *frames) {
    struct server *s = job->server;
    double took = (double)(clock_ns() - job->started_ns) * 1e-9;
    s->mean_seconds = s->mean_seconds > 0 ? 0.8 * s->mean_seconds + 0.2 * took : took;
    s->totals.prompt_tokens += (uint64_t)result->prompt_tokens;
    s->totals.cached_tokens += (uint64_t)result->cached_tokens;
    s->totals.output_tokens += (uint64_t)result->output_tokens;
    job->result = *result;
    if (job->gone) {
        job_done(job, job->first_ns ? "hang-up in decode" : "hang-up in prefill");
    } else if (error->status) {
        job_fail(job, error);
    } else {
        s->totals.completed++;
        if (!job_write(job, frames->data, frames->len)) job->gone = true;
        job_done(job, openai_finish(result->finish));
    }
}

static void run_job(struct job *job) {
    struct server *s = job->server;
    struct run run = {.job = job};
    struct api_error error = {0};
    struct buf frames = {0};
    lily_result result = {0};
    lily_err err = {0};
    int rc = generate(&run, &result, &err);
    if (run.capped && !rc) result.finish = LILY_FINISH_LENGTH;
    rc = run_error(&run, rc, &result, &err, &error);
    if (!rc && !answer_finish(&job->answer, result.finish, &result, &frames)) {
        api_error_set(&error, 503, "out_of_memory", NULL, "reply: out of memory");
    }
    /* What may not reach the next run the engine has forgotten by itself; the rest stays read. */
    int32_t held = lily_session_held(s->session);
    pthread_mutex_lock(&s->lock);
    s->running = NULL;
    s->session_tokens = held;
    conclude(job, &result, &error, &frames);
    pthread_mutex_unlock(&s->lock);
    buf_free(&frames);
}

/* Waits for a job, and meanwhile lets the session see whether the system is short of memory. */
static void wait_for_work(struct server *s) {
    enum { SECONDS = 2 };
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until); /* the clock of the condition */
    until.tv_sec += SECONDS;
    if (!s->watches_memory) {
        pthread_cond_wait(&s->work, &s->lock);
    } else if (pthread_cond_timedwait(&s->work, &s->lock, &until) == ETIMEDOUT && !s->stopping) {
        s->resting = true; /* from here on the watch ends it when the server is to stop */
        pthread_mutex_unlock(&s->lock);
        bool more = lily_session_idle(s->session);
        pthread_mutex_lock(&s->lock);
        s->resting = false;
        s->watches_memory = more;
    }
}

/* The oldest queued job, now running; NULL when the server stops. */
static struct job *next_job(struct server *s) {
    for (;;) {
        if (s->stopping) return NULL;
        struct job *job = job_oldest(s, JOB_QUEUED);
        if (!job) {
            wait_for_work(s);
            continue;
        }
        job_probe(job);
        if (job->gone) continue;
        job->state = JOB_RUNNING;
        job->started_ns = clock_ns();
        job->prefill_total = (int32_t)job->prompt.n;
        s->running = job;
        job_ref(job);
        return job;
    }
}

void *worker_main(void *arg) {
    struct server *s = arg;
    struct job *job;
    pthread_mutex_lock(&s->lock);
    while ((job = next_job(s))) {
        pthread_mutex_unlock(&s->lock);
        run_job(job);
        pthread_mutex_lock(&s->lock);
        job_unref(job);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

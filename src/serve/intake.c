#include "serve/intake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "serve/job.h"

/* What intake makes of a body, away from the lock. */
struct taken {
    struct buf body;
    struct chat_request *chat;
    lily_tokens prompt;
    struct api_error error;
};

static int render(const struct server *s, struct taken *t) {
    lily_err err = {0};
    lily_chat_options options = {.no_thinking = !t->chat->thinking,
                                 .preserve_thinking = t->chat->preserve_thinking};
    /* What lily_generate would refuse is refused here: a stream has not begun yet. */
    int rc = lily_sampling_check(s->engine, &t->chat->sampling, &err);
    if (!rc)
        rc = lily_chat_prompt(s->engine, t->chat->messages, t->chat->tools, &options, &t->prompt,
                              &err);
    if (rc) {
        err.code = rc;
        api_error_from_engine(&t->error, &err, 0, s->info.context);
        return -1;
    }
    if (t->prompt.n >= (size_t)s->info.context) { /* not one token could be answered */
        api_error_context(&t->error, t->prompt.n, s->info.context);
        return -1;
    }
    free(t->chat->messages);
    t->chat->messages = NULL;
    return 0;
}

static int take(const struct server *s, struct taken *t) {
    int rc = request_parse(t->body.data ? t->body.data : "", t->body.len, &s->limits, &t->chat,
                           &t->error);
    buf_free(&t->body);
    return rc ? rc : render(s, t);
}

/* Hands the job on (locked). */
static void admit(struct job *job, struct taken *t) {
    struct server *s = job->server;
    struct reply_head head = {.id = job->id,
                              .created = (int64_t)time(NULL),
                              .model = s->model,
                              .fingerprint = s->fingerprint,
                              .include_usage = t->chat->include_usage};
    job->chat = t->chat;
    job->prompt = t->prompt;
    t->chat = NULL;
    t->prompt = (lily_tokens){0};
    job_hold(job,
             job->prompt.n * sizeof(int32_t) + (job->chat->tools ? strlen(job->chat->tools) : 0));
    answer_init(&job->answer, &head, job->chat->stream);
    if (job->chat->stream) {
        struct buf frames = {0};
        /* The first chunk goes out before the job's turn: headers at once, whatever the queue. */
        if (answer_begin(&job->answer, &frames)) job_write(job, frames.data, frames.len);
        buf_free(&frames);
        job->ready = true;
        job_resume(job);
    }
    job->state = JOB_QUEUED;
    pthread_cond_broadcast(&s->work);
}

/* The oldest body not yet looked at; NULL when the server stops. */
static struct job *next_job(struct server *s) {
    for (;;) {
        if (s->stopping) return NULL;
        struct job *job = job_oldest(s, JOB_INTAKE);
        if (job) return job;
        pthread_cond_wait(&s->work, &s->lock);
    }
}

static void take_in(struct job *job) {
    struct server *s = job->server;
    struct taken t = {.body = job->body};
    job->body = (struct buf){0};
    job_ref(job);
    pthread_mutex_unlock(&s->lock);
    int rc = take(s, &t);
    pthread_mutex_lock(&s->lock);
    if (job->state == JOB_INTAKE) { /* the client has not left meanwhile */
        if (rc) {
            job_fail(job, &t.error);
        } else {
            admit(job, &t);
        }
    }
    job_unref(job);
    request_free(t.chat);
    lily_tokens_free(&t.prompt);
}

void *intake_main(void *arg) {
    struct server *s = arg;
    struct job *job;
    pthread_mutex_lock(&s->lock);
    while ((job = next_job(s))) take_in(job);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

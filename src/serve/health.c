#include "serve/health.h"

#include <string.h>

#include "base/clock.h"
#include "serve/job.h"

/* Seconds since then, to the millisecond. */
static double seconds_since(int64_t ns) {
    return (double)((clock_ns() - ns) / 1000000) / 1000.0;
}

static json_t *totals_json(const struct server_totals *t) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "requests",
                     (json_int_t)t->requests, "completed", (json_int_t)t->completed, "hang_ups",
                     (json_int_t)t->hang_ups, "refused", (json_int_t)t->refused, "failed",
                     (json_int_t)t->failed, "prompt_tokens", (json_int_t)t->prompt_tokens,
                     "cached_tokens", (json_int_t)t->cached_tokens, "output_tokens",
                     (json_int_t)t->output_tokens);
}

/* The running job, or null. */
static json_t *running_json(const struct job *job) {
    if (!job) return json_null();
    return json_pack("{s:s, s:s, s:i, s:i, s:f}", "id", job->id, "phase",
                     job->first_ns ? "decode" : "prefill", "prefill_done", (int)job->prefill_done,
                     "prefill_total", (int)job->prefill_total, "seconds",
                     seconds_since(job->started_ns));
}

json_t *health_json(struct server *s) {
    pthread_mutex_lock(&s->lock);
    struct server_totals totals = s->totals;
    json_t *running = running_json(s->running);
    const char *state = s->stopping ? "stopping" : s->running ? "busy" : "idle";
    int n_running = s->running != NULL, queued = s->n_jobs - n_running;
    int connections = s->n_conns;
    int32_t tokens = s->session_tokens;
    size_t held = s->held_bytes;
    pthread_mutex_unlock(&s->lock);
    return json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:o, s:o, s:s, s:s, s:s, s:i, s:f}",
        "status", "ok", "state", state, "running", n_running, "queued", queued, "max_queue",
        (int)s->options.max_queue, "connections", connections, "max_connections",
        (int)s->options.max_connections, "session_tokens", (int)tokens, "held_bytes",
        (json_int_t)held, "current", running, "totals", totals_json(&totals), "model", s->model,
        "backend", s->info.backend, "version", LILY_VERSION, "context_length", (int)s->info.context,
        "uptime_seconds", seconds_since(s->started_ns));
}

static json_t *card(const struct server *s) {
    return json_pack("{s:s, s:s, s:I, s:s, s:i, s:i}", "id", s->model, "object", "model", "created",
                     (json_int_t)s->started_unix, "owned_by", "lily", "max_model_len",
                     (int)s->info.context, "context_length", (int)s->info.context);
}

json_t *models_json(const struct server *s) {
    return json_pack("{s:s, s:[o]}", "object", "list", "data", card(s));
}

json_t *model_json(const struct server *s, const char *id) {
    return strcmp(id, s->model) ? NULL : card(s);
}

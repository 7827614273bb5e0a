/* lily plan: what a backend's own recording of a step costs, beside the least it could. */
#include "engine/plan.h"

#include <jansson.h>
#include <string.h>

#include "base/buf.h"
#include "model/least.h"

enum { MOST_SESSIONS = 1024 }; /* as an engine may have */

typedef int (*plan_fn)(const struct shape *shape, const struct plan_query *query,
                       struct backend_plan *out, lily_err *err);

/* The plan of the backend called name, NULL when it records none; false: there is no such backend.
 */
static bool find_plan(const struct backend *const *all, const struct backend_planner *plans,
                      const char *name, plan_fn *out) {
    bool known = false;
    *out = NULL;
    for (size_t i = 0; all[i]; i++) {
        if (strcmp(all[i]->name, name) != 0) continue;
        known = true;
        *out = all[i]->plan;
    }
    for (size_t i = 0; plans[i].name && !*out; i++) {
        if (strcmp(plans[i].name, name) != 0) continue;
        known = true;
        *out = plans[i].plan;
    }
    return known;
}

static void add_name(struct buf *names, const char *name) {
    buf_printf(names, "%s%s", names->len ? ", " : "", name);
}

/* Those that record a plan, for a message. */
static void list_plans(const struct backend *const *all, const struct backend_planner *plans,
                       struct buf *names) {
    plan_fn plan;
    for (size_t i = 0; plans[i].name; i++) add_name(names, plans[i].name);
    for (size_t i = 0; all[i]; i++) {
        bool listed = false;
        for (size_t j = 0; plans[j].name; j++) listed |= strcmp(plans[j].name, all[i]->name) == 0;
        if (!listed && find_plan(all, plans, all[i]->name, &plan) && plan) {
            add_name(names, all[i]->name);
        }
    }
    if (!names->len) add_name(names, "none in this build");
}

static int choose(const struct backend *const *all, const struct backend_planner *plans,
                  const char *name, plan_fn *out, lily_err *err) {
    struct buf names = {0};
    int rc = 0;
    bool known = find_plan(all, plans, name, out);
    if (!*out) {
        list_plans(all, plans, &names);
        rc = known ? ERR(err, LILY_EINVAL,
                         "backend %s: records no plan of its steps; ask for one that does: %s",
                         name, names.data ? names.data : "")
                   : ERR(err, LILY_EINVAL, "backend: found \"%s\", expected one with a plan: %s",
                         name, names.data ? names.data : "");
    }
    buf_free(&names);
    return rc;
}

static int choose_shape(const char *name, int32_t layers, const struct shape **out, lily_err *err) {
    struct buf names = {0};
    int rc = 0;
    *out = shape_find(name);
    if (!*out) {
        for (size_t i = 0; shape_all[i]; i++) add_name(&names, shape_all[i]->name);
        rc = ERR(err, LILY_EINVAL, "shape: found \"%s\", expected one of %s", name,
                 names.data ? names.data : "");
        buf_free(&names);
        return rc;
    }
    const struct shape *s = *out;
    if (layers >= 0 && layers <= s->layers && layers % s->attention_every == 0) return 0;
    return ERR(err, LILY_EINVAL,
               "layers: found %d, expected a multiple of %d up to %d, or 0 for all", layers,
               s->attention_every, s->layers);
}

static json_t *step_json(const struct shape *s, const struct plan_query *q,
                         const struct backend_plan *p) {
    struct least least = shape_least(s, q->layers, q->tokens * q->sessions);
    uint64_t unique = p->weight_bytes + p->state_bytes + p->kv_bytes;
    uint64_t own = least.state_bytes + least.conv_bytes + least.kv_bytes_token * (uint64_t)q->depth;
    uint64_t fewest = least.weight_bytes + own * (uint64_t)q->sessions;
    json_t *step = json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "tokens",
        (int)q->tokens, "depth", (int)q->depth, "kernels", (int)p->kernels, "stages",
        (int)p->stages, "barriers", (int)p->barriers, "command_buffers", (int)p->command_buffers,
        "host_syncs", (int)p->host_syncs, "weight_bytes", (json_int_t)p->weight_bytes,
        "state_bytes", (json_int_t)p->state_bytes, "kv_bytes", (json_int_t)p->kv_bytes,
        "unique_bytes", (json_int_t)unique, "least_bytes", (json_int_t)fewest, "of_least",
        (double)unique / (double)fewest, "read_bytes", (json_int_t)p->read_bytes, "written_bytes",
        (json_int_t)p->written_bytes);
    if (step && q->sessions > 1) {
        json_object_set_new(step, "sessions", json_integer(q->sessions));
    }
    return step;
}

/* Appends a step to the list. */
static int add_step(json_t *steps, plan_fn plan, const struct shape *s, const struct plan_query *q,
                    lily_err *err) {
    struct backend_plan p = {0};
    if (q->tokens < 1 || q->depth < 0 || q->tokens > s->max_context - q->depth) {
        return ERR(err, LILY_EINVAL,
                   "plan: found %d tokens at depth %d, expected at least 1 within the shape's "
                   "context of %d",
                   q->tokens, q->depth, s->max_context);
    }
    if (q->sessions < 1 || q->sessions > MOST_SESSIONS || (q->sessions > 1 && q->tokens > 1)) {
        return ERR(
            err, LILY_EINVAL,
            "plan: found %d sessions of %d tokens, expected one, or up to %d that decode one "
            "token each",
            q->sessions, q->tokens, MOST_SESSIONS);
    }
    int rc = plan(s, q, &p, err);
    if (rc) return rc;
    return json_array_append_new(steps, step_json(s, q, &p)) ? ERR_NOMEM(err, "plan") : 0;
}

/* A decoded token at each depth, then the prompt chunk: it starts at depth 0. What was asked for
 * instead: every number of tokens in every number of sessions at every depth. */
static int add_steps(json_t *steps, plan_fn plan, const struct shape *s, int32_t layers,
                     const lily_plan_options *o, lily_err *err) {
    static const int32_t default_depths[] = {0, 4096, 32768, 131072}, one[] = {1};
    enum { CHUNK = 512 };
    const int32_t *depths = o->n_depths ? o->depths : default_depths;
    size_t n_depths = o->n_depths ? o->n_depths : sizeof default_depths / sizeof *default_depths;
    const int32_t *tokens = o->n_tokens ? o->tokens : one;
    const int32_t *sessions = o->n_sessions ? o->sessions : one;
    size_t n_tokens = o->n_tokens ? o->n_tokens : 1, n_sessions = o->n_sessions ? o->n_sessions : 1;
    int rc = 0;
    for (size_t i = 0; i < n_tokens * n_sessions * n_depths && !rc; i++) {
        const struct plan_query q = {.layers = layers,
                                     .depth = depths[i % n_depths],
                                     .tokens = tokens[i / n_depths / n_sessions],
                                     .sessions = sessions[i / n_depths % n_sessions]};
        rc = add_step(steps, plan, s, &q, err);
    }
    const struct plan_query chunk = {.layers = layers, .tokens = CHUNK, .sessions = 1};
    bool asked = o->n_tokens || o->n_depths || o->n_sessions;
    return rc || asked ? rc : add_step(steps, plan, s, &chunk, err);
}

int engine_plan(const struct backend *const *all, const struct backend_planner *plans,
                const lily_plan_options *o, char **json, lily_err *err) {
    const struct shape *s;
    plan_fn plan;
    *json = NULL;
    int rc = choose(all, plans, o->backend ? o->backend : "", &plan, err);
    if (!rc) rc = choose_shape(o->shape ? o->shape : shape_all[0]->name, o->layers, &s, err);
    if (rc) return rc;
    int32_t layers = o->layers ? o->layers : s->layers;
    struct least least = shape_least(s, layers, 1);
    json_t *steps = json_array();
    json_t *doc =
        json_pack("{s:s, s:s, s:i, s:{s:I, s:I, s:I, s:I}, s:O}", "backend", o->backend, "shape",
                  s->name, "layers", (int)layers, "least_per_token", "weight_bytes",
                  (json_int_t)least.weight_bytes, "state_bytes", (json_int_t)least.state_bytes,
                  "convolution_bytes", (json_int_t)least.conv_bytes, "kv_per_depth_bytes",
                  (json_int_t)least.kv_bytes_token, "steps", steps);
    rc = doc ? add_steps(steps, plan, s, layers, o, err) : ERR_NOMEM(err, "plan");
    if (!rc && !(*json = json_dumps(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(6)))) {
        rc = ERR_NOMEM(err, "plan");
    }
    json_decref(steps);
    json_decref(doc);
    return rc;
}

int lily_plan(const lily_plan_options *options, char **json, lily_err *err) {
    return engine_plan(backend_all, backend_plans, options, json, err);
}

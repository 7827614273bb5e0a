/* One request: read the prompt, then sample, split, append, until something ends it. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/session.h"
#include "text/json_text.h"
#include "text/reply.h"

struct run {
    lily_session *session;
    const lily_request *request;
    struct reply *reply; /* NULL without a tokenizer */
    json_t *tools;
    int32_t limit; /* output tokens at most */
    bool refused;  /* on_event asked to stop: it is not called again */
    bool in_think; /* the prompt ends inside the think block */
    bool ended;    /* by an end-of-turn token */
};

/* ---- events ---------------------------------------------------------------------------------- */

static int emit(struct run *r, const lily_event *event) {
    if (!r->request->on_event || r->refused) return r->refused ? LILY_ECANCELED : 0;
    if (r->request->on_event(r->request->arg, event) == 0) return 0;
    r->refused = true;
    return LILY_ECANCELED;
}

static int on_progress(void *arg, int32_t done, int32_t total) {
    return emit(
        arg, &(lily_event){.kind = LILY_EVENT_PREFILL, .text = "", .done = done, .total = total});
}

static int on_reply(void *arg, const struct reply_event *event) {
    static const enum lily_event_kind kinds[] = {
        [REPLY_REASONING] = LILY_EVENT_REASONING,   [REPLY_CONTENT] = LILY_EVENT_CONTENT,
        [REPLY_TOOL_BEGIN] = LILY_EVENT_TOOL_BEGIN, [REPLY_TOOL_ARGS] = LILY_EVENT_TOOL_ARGS,
        [REPLY_TOOL_END] = LILY_EVENT_TOOL_END,
    };
    return emit(arg, &(lily_event){.kind = kinds[event->kind],
                                   .text = event->text ? event->text : "",
                                   .n = event->n,
                                   .call = event->call});
}

/* ---- start ----------------------------------------------------------------------------------- */

/* Whether the prompt's last turn holds a closed think block: then it does not end inside one,
 * whatever the caller thinks (an answer that is to be continued has its block closed). */
static bool think_is_closed(const lily_engine *e, const lily_request *q) {
    for (size_t i = q->n_prompt; i > 0; i--) {
        int32_t id = q->prompt[i - 1];
        if (id == e->im_start || id == e->think_begin) return false;
        if (id == e->think_end) return true;
    }
    return false;
}

static int check_room(struct run *r, lily_err *err) {
    const lily_request *q = r->request;
    int32_t context = r->session->context;
    if (q->max_tokens < 0) {
        return ERR(err, LILY_EINVAL, "max_tokens: found %d, expected 0 (no limit) or more",
                   q->max_tokens);
    }
    if (q->n_prompt >= (size_t)context) {
        return ERR(err, LILY_ECONTEXT,
                   "prompt: found %zu tokens, expected fewer than the context of %d; shorten it or "
                   "ask for a larger context",
                   q->n_prompt, context);
    }
    r->limit = context - (int32_t)q->n_prompt;
    if (q->max_tokens > r->limit) {
        engine_log(r->session->engine,
                   "max_tokens: %d lowered to %d: the prompt has %zu tokens and the context %d",
                   q->max_tokens, r->limit, q->n_prompt, context);
    } else if (q->max_tokens > 0) {
        r->limit = q->max_tokens;
    }
    return 0;
}

static int open_reply(struct run *r, lily_err *err) {
    const lily_request *q = r->request;
    const lily_engine *e = r->session->engine;
    if (!e->tokenizer) {
        if (q->n_stops == 0) return 0;
        return ERR(err, LILY_EINVAL, "stop: the checkpoint has no tokenizer.json to find text by");
    }
    if (q->tools) {
        int rc = json_text_load("tools", q->tools, strlen(q->tools), &r->tools, err);
        if (rc) return rc;
        if (!json_is_array(r->tools)) {
            return ERR(err, LILY_EINVAL, "tools: found no array, expected an array of tools");
        }
    }
    const struct reply_options options = {.tokenizer = e->tokenizer,
                                          .in_think = r->in_think,
                                          .tools = r->tools,
                                          .stops = q->stops,
                                          .n_stops = q->n_stops,
                                          .no_calls = q->no_calls};
    return reply_new(&options, on_reply, r, &r->reply, err);
}

/* ---- decoding -------------------------------------------------------------------------------- */

static bool ends_turn(const lily_engine *e, int32_t id) {
    for (int32_t i = 0; i < e->defaults.n_stops; i++) {
        if (e->defaults.stops[i] == id) return true;
    }
    return false;
}

/* Samples until the request ends; the last token sampled is not appended to the session. */
static int decode(struct run *r, lily_result *result, lily_err *err) {
    lily_session *s = r->session;
    int32_t id = sampler_pick(s->sampler, s->logits);
    int rc = session_begin(s, r->request->prompt, r->request->n_prompt, err);
    while (!rc) {
        bool stopped = false;
        bool end = ends_turn(s->engine, id);
        result->output_tokens++;
        if (end && !r->request->ignore_eos) {
            r->ended = true;
            result->finish = LILY_FINISH_STOP;
            return 0;
        }
        rc = r->reply && !end ? reply_push(r->reply, id, &stopped, err) : 0;
        if (rc) break;
        result->finish = stopped ? LILY_FINISH_STOP : LILY_FINISH_LENGTH;
        if (stopped || result->output_tokens == r->limit) return 0;
        if (session_cancelled(s)) return ERR(err, LILY_ECANCELED, "generation: cancelled");
        rc = session_next(s, id, r->limit - result->output_tokens, &id, err);
    }
    return rc;
}

/* Hands out what the splitter held back and settles how the request ended. */
static int finish(struct run *r, int rc, lily_result *result, lily_err *err) {
    bool cancelled = rc == LILY_ECANCELED || r->refused;
    if (r->reply) result->reasoning_tokens = reply_reasoning_tokens(r->reply);
    if (cancelled) rc = 0;
    if (!rc && r->reply && !r->refused) {
        rc = reply_finish(r->reply, err);
        if (r->refused) cancelled = true, rc = 0;
    }
    if (rc) return rc;
    if (cancelled) {
        result->finish = LILY_FINISH_CANCELLED;
    } else if (r->ended && r->reply && reply_tool_calls(r->reply) > 0) {
        result->finish = LILY_FINISH_TOOLS;
    }
    return 0;
}

static int generate(lily_session *s, const lily_request *request, lily_result *result,
                    lily_err *err) {
    struct run r = {.session = s, .request = request};
    lily_sampling defaults;
    double start = clock_seconds(), read = start;
    int rc;
    r.in_think = request->in_think && !think_is_closed(s->engine, request);
    lily_sampling_defaults(s->engine, r.in_think, &defaults);
    const lily_sampling *sampling = request->sampling ? request->sampling : &defaults;
    if ((rc = check_room(&r, err)) ||
        (rc = sampler_begin(s->sampler, sampling, request->prompt, request->n_prompt, err)) ||
        (rc = open_reply(&r, err))) {
        goto out;
    }
    result->seed = sampler_seed(s->sampler);
    result->prompt_tokens = (int32_t)request->n_prompt;
    rc = session_sync(s, request->prompt, request->n_prompt, on_progress, &r,
                      &result->cached_tokens, err);
    read = clock_seconds();
    if (!rc) {
        rc = decode(&r, result, err);
        session_settle(s);
    }
    rc = finish(&r, rc, result, err);
    result->prefill_seconds = read - start;
    result->decode_seconds = clock_seconds() - read;
out:
    reply_free(r.reply);
    json_decref(r.tools);
    return rc;
}

int lily_generate(lily_session *s, const lily_request *request, lily_result *result,
                  lily_err *err) {
    *result = (lily_result){0};
    int rc = session_enter(s, err);
    if (!rc) return session_leave(s, generate(s, request, result, err));
    if (rc != LILY_ECANCELED) return rc; /* while it was read back from disk */
    result->prompt_tokens = (int32_t)request->n_prompt;
    result->finish = LILY_FINISH_CANCELLED;
    return 0;
}

/* ---- measurement ----------------------------------------------------------------------------- */

static int greedy(lily_session *s, int32_t id, int32_t n, lily_token_fn token, void *arg,
                  lily_err *err) {
    static const lily_sampling likeliest = {.temperature = 0, .top_p = 1, .repetition_penalty = 1};
    int32_t room = s->context - session_position(s);
    if (n < 1 || n > room) {
        return ERR(err, LILY_ECONTEXT,
                   "context: found %d tokens to append to %d, expected 1 to %d; ask for a larger "
                   "context",
                   n, session_position(s), room);
    }
    int rc = sampler_begin(s->sampler, &likeliest, NULL, 0, err);
    if (rc) return rc;
    rc = session_begin(s, NULL, 0, err);
    for (int32_t left = n; left > 0 && !rc; left--) {
        rc = session_next(s, id, left, &id, err);
        if (!rc && (session_cancelled(s) || (token && token(arg, id)))) {
            rc = ERR(err, LILY_ECANCELED, "decoding: cancelled after %d of %d tokens", n - left + 1,
                     n);
        }
    }
    session_settle(s);
    return rc;
}

int lily_session_greedy(lily_session *s, int32_t id, int32_t n, lily_token_fn token, void *arg,
                        lily_err *err) {
    int32_t vocab = s->engine->weights->shape->vocab;
    if (id < 0 || id >= vocab) {
        return ERR(err, LILY_EINVAL, "token: found id %d, expected 0 to %d", id, vocab - 1);
    }
    int rc = session_enter(s, err);
    return rc ? rc : session_leave(s, greedy(s, id, n, token, arg, err));
}

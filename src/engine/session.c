#include "engine/session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/rest.h"

enum { STRIDE = 4096 }; /* a long prompt is checkpointed each so many tokens as well */

/* ---- life ------------------------------------------------------------------------------------ */

int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err) {
    *out = NULL;
    if (context < 0 || context > e->context) {
        return ERR(err, LILY_EINVAL,
                   "session context: found %d tokens, expected 1 to %d, or 0 for all; open the "
                   "engine with a larger context",
                   context, e->context);
    }
    if (e->sessions == e->max_sessions) {
        return ERR(err, LILY_EBUSY,
                   "session: found all %d in use; free one or open the engine with more",
                   e->max_sessions);
    }
    lily_session *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM(err, "session");
    s->engine = e;
    s->context = context ? context : e->context;
    s->tokens = malloc((size_t)s->context * sizeof *s->tokens);
    s->logits = malloc((size_t)e->weights->shape->vocab * sizeof *s->logits);
    atomic_init(&s->cancel, false);
    e->sessions++;
    int rc = s->tokens && s->logits ? 0 : ERR_NOMEM(err, "session");
    if (rc || (rc = sampler_new(&e->vocab, &s->sampler, err)) ||
        (rc = e->backend->session_new(e->model, s->context, &s->backend, err))) {
        lily_session_free(s);
        return rc;
    }
    states_init(&s->states, e->backend, e->model, e->state_bytes); /* of what memory is left */
    *out = s;
    return 0;
}

void lily_session_free(lily_session *s) {
    if (!s) return;
    if (s->backend) s->engine->backend->session_free(s->backend);
    rest_drop(s);
    s->engine->sessions--;
    states_free(&s->states);
    sampler_free(s->sampler);
    free(s->tokens);
    free(s->logits);
    free(s);
}

void session_empty(lily_session *s) {
    rest_drop(s); /* the next call wakes it empty */
    if (s->backend) s->engine->backend->reset(s->backend);
    s->held = 0;
    s->has_logits = false;
    states_clear(&s->states);
}

void lily_session_reset(lily_session *s) {
    if (s->engine->in_call)
        lily_cancel(s);
    else
        session_empty(s);
}

int session_enter(lily_session *s, lily_err *err) {
    if (s->engine->in_call) {
        return ERR(err, LILY_EBUSY,
                   "session: found a call from within a callback, expected none while another call "
                   "on the engine runs; end that one first");
    }
    s->engine->in_call = true;
    atomic_store(&s->cancel, false);
    int rc = s->backend ? 0 : rest_end(s, err);
    return rc ? session_leave(s, rc) : 0;
}

int session_leave(lily_session *s, int rc) {
    s->engine->in_call = false;
    return rc;
}

void lily_cancel(lily_session *s) {
    atomic_store(&s->cancel, true);
}

bool session_cancelled(lily_session *s) {
    return atomic_load(&s->cancel);
}

int32_t session_position(const lily_session *s) {
    return s->engine->backend->position(s->backend);
}

int32_t lily_session_held(const lily_session *s) {
    return s->held;
}

const float *lily_session_logits(const lily_session *s) {
    return s->has_logits ? s->logits : NULL;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_ids(const lily_session *s, const int32_t *ids, size_t n, lily_err *err) {
    int32_t vocab = s->engine->weights->shape->vocab;
    if (n == 0) return ERR(err, LILY_EINVAL, "prompt: found no tokens, expected at least one");
    if (n > (size_t)s->context) {
        return ERR(err, LILY_ECONTEXT,
                   "prompt: found %zu tokens, expected at most the context of %d; shorten it or "
                   "ask for a larger context",
                   n, s->context);
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && ids[i] < vocab) continue;
        return ERR(err, LILY_EINVAL, "prompt: found token id %d at %zu, expected 0 to %d", ids[i],
                   i, vocab - 1);
    }
    return 0;
}

/* A number is finite unless all bits of its exponent are set; the loop compiles to vector code. */
static bool all_finite(const float *x, int32_t n) {
    uint32_t bad = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !bad;
}

/* A non-finite value after token number position has come from the state or will be in it, and
 * would spoil every later token: the session starts over. */
static int not_finite(lily_session *s, int32_t position, lily_err *err) {
    session_empty(s);
    return ERR(err, LILY_ENUMERIC,
               "logits: found non-finite values after token %d; the session was emptied, so that "
               "the next request starts clean; if it happens again, check the model's files",
               position);
}

/* Accepts the logits the backend just wrote. */
static int accept_logits(lily_session *s, lily_err *err) {
    s->has_logits = all_finite(s->logits, s->engine->weights->shape->vocab);
    return s->has_logits ? 0 : not_finite(s, session_position(s), err);
}

/* After a failed backend call nothing is known about its state. */
static int fail(lily_session *s, int rc) {
    session_empty(s);
    return rc;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static enum backend_pressure pressure(const lily_session *s) {
    const struct backend *b = s->engine->backend;
    return b->pressure ? b->pressure(s->engine->model) : BACKEND_PRESSURE_NONE;
}

/* All checkpoints but so many go to disk, one after the other until the session is cancelled. */
static void give_back(lily_session *s, int32_t keep) {
    int32_t gone = 0;
    for (int32_t left = s->states.limit; left > keep && !session_cancelled(s);) {
        gone += states_give_back(&s->states, --left);
    }
    if (gone) {
        engine_log(s->engine,
                   "memory: the system is short of it; gave back %d state checkpoint%s, %d %s on "
                   "disk",
                   gone, gone == 1 ? "" : "s", s->states.on_disk,
                   s->states.on_disk == 1 ? "is" : "are");
    }
}

/* When the system is short of memory, checkpoints go to disk: to resume from one takes longer, or
 * where the disk is full a later prompt reads more; nothing else. */
static void heed_pressure(lily_session *s) {
    enum backend_pressure p = pressure(s);
    if (p != BACKEND_PRESSURE_NONE) give_back(s, p == BACKEND_PRESSURE_CRITICAL ? 0 : 1);
}

/* A disk that was full may have room again: it is tried ever less often, and told once. */
static void rest_failed(lily_session *s, const lily_err *err) {
    enum { FIRST = 30, MOST = 1800 }; /* seconds */
    struct rest *r = &s->rest;
    if (r->wait == 0) {
        engine_log(s->engine, "memory: the system is short of it; %s; it is tried again later",
                   err->msg);
    }
    r->wait = r->wait == 0 ? FIRST : r->wait < MOST / 2 ? 2 * r->wait : MOST;
    r->next_ns = clock_ns() + (int64_t)r->wait * 1000000000;
}

bool lily_session_idle(lily_session *s) {
    lily_err err;
    if (!s->engine->backend->pressure) return false;
    if (s->engine->in_call || !s->backend || pressure(s) == BACKEND_PRESSURE_NONE) return true;
    give_back(s, 0);
    if (s->rest.wait && clock_ns() < s->rest.next_ns) return true;
    int32_t held = s->held;
    int rc = session_cancelled(s) ? LILY_ECANCELED : rest_begin(s, &err);
    /* Not at the beginning: a cancel that came just before it would be lost. */
    atomic_store(&s->cancel, false);
    if (rc == LILY_ECANCELED) return true;
    if (rc) {
        rest_failed(s, &err);
        return true;
    }
    s->rest.wait = 0;
    engine_log(s->engine,
               "memory: the system is short of it; the session of %d tokens waits on disk", held);
    return true;
}

static void take_checkpoint(lily_session *s, int32_t pos, bool decode) {
    lily_err err;
    heed_pressure(s);
    struct backend_state *room = states_add(&s->states, pos, decode, s->forks, s->n_forks);
    if (room && s->engine->backend->state_save(s->backend, room, &err)) {
        states_remove(&s->states, pos); /* a checkpoint less costs time only */
        engine_log(s->engine, "state checkpoint at token %d: %s", pos, err.msg);
    }
}

static void add_fork(lily_session *s, int32_t pos) {
    pos -= pos % BACKEND_GRID;
    if (pos > 0) s->forks[s->n_forks++] = pos;
}

/* Where later prompts are likely to part from this one. Turns start with <|im_start|>: the second
 * one ends the system message, the last begins the answer (a stripped think block changes what
 * follows), the one before it the last message (edits). The last token serves repetitions. */
static void find_forks(lily_session *s, const int32_t *ids, int32_t n) {
    int32_t turns = 0, second = 0, last = 0, before_last = 0;
    s->n_forks = 0;
    for (int32_t i = 0; i < n && s->engine->im_start >= 0; i++) {
        if (ids[i] != s->engine->im_start) continue;
        if (++turns == 2) second = i;
        before_last = last;
        last = i;
    }
    add_fork(s, second);
    add_fork(s, before_last);
    add_fork(s, last);
    add_fork(s, n - 1);
}

/* The next position in (pos, n] where reading pauses for a checkpoint, or n. */
static int32_t next_stop(const lily_session *s, int32_t pos, int32_t n) {
    int32_t stop = n;
    for (int32_t i = 0; i < s->n_forks; i++) {
        if (s->forks[i] > pos && s->forks[i] < stop) stop = s->forks[i];
    }
    int32_t stride = STRIDE - pos % STRIDE;
    return stop - pos > stride ? pos + stride : stop;
}

static bool is_stop(const lily_session *s, int32_t pos) {
    if (pos % STRIDE == 0) return true;
    for (int32_t i = 0; i < s->n_forks; i++) {
        if (s->forks[i] == pos) return true;
    }
    return false;
}

/* ---- sync ------------------------------------------------------------------------------------ */

/* Forgets tokens[from, held) and what was computed from them: before a token is read at from, since
 * the backend then gives up the rows behind it. */
static void truncate(lily_session *s, int32_t from) {
    if (from >= s->held) return;
    s->held = from;
    states_drop_above(&s->states, from);
}

/* Takes the backend as near to the end of ids[n] as can be without reading a wrong token; returns
 * the position. Logits survive only an exact repetition; otherwise at least one token is left to
 * read, for the logits after it. */
static int32_t go_back(lily_session *s, const int32_t *ids, int32_t n) {
    int32_t pos = session_position(s), common = 0;
    while (common < n && common < s->held && s->tokens[common] == ids[common]) common++;
    truncate(s, common);
    if (common == n && pos == n && s->has_logits) return n;
    s->has_logits = false;
    int32_t most = common < n ? common : n - 1;
    const struct state *state = states_find(&s->states, most);
    if (pos <= most && (!state || state->pos <= pos)) return pos;
    lily_err err;
    if (state && states_restore(&s->states, state, s->backend, &err) == 0) {
        return state->pos;
    }
    if (state) engine_log(s->engine, "state checkpoint at token %d: %s", state->pos, err.msg);
    session_empty(s);
    return 0;
}

/* One call of the backend, which reads some of step's tokens. */
static int prefill(lily_session *s, struct prefill_step *step, lily_err *err) {
    const struct backend *b = s->engine->backend;
    int rc = b->prefill(s->backend, step, err);
    if (rc || (step->done >= 1 && step->done <= step->n)) return rc;
    return ERR(err, LILY_EBACKEND, "backend %s: read %d of %d tokens", b->name, step->done,
               step->n);
}

/* Reads one chunk of ids[n] from pos; returns a code, and the new position in *pos. */
static int read_chunk(lily_session *s, const int32_t *ids, int32_t n, int32_t *pos, lily_err *err) {
    int32_t stop = next_stop(s, *pos, n);
    struct prefill_step step = {
        .ids = ids + *pos, .n = stop - *pos, .logits = stop == n ? s->logits : NULL};
    truncate(s, *pos);
    int rc = prefill(s, &step, err);
    if (rc) return fail(s, rc);
    memcpy(s->tokens + *pos, ids + *pos, (size_t)step.done * sizeof *ids);
    s->held = *pos += step.done;
    if (is_stop(s, *pos)) take_checkpoint(s, *pos, false);
    return 0;
}

int session_sync(lily_session *s, const int32_t *ids, size_t count, session_progress_fn progress,
                 void *arg, int32_t *cached, lily_err *err) {
    int rc = check_ids(s, ids, count, err);
    if (rc) return rc;
    int32_t n = (int32_t)count;
    find_forks(s, ids, n);
    int32_t pos = *cached = go_back(s, ids, n);
    heed_pressure(s);
    if (pressure(s) == BACKEND_PRESSURE_NONE) states_regain(&s->states);
    if (progress && progress(arg, pos, n)) goto cancelled;
    while (pos < n) {
        if (session_cancelled(s)) goto cancelled;
        if ((rc = read_chunk(s, ids, n, &pos, err))) return rc;
        if (pos == n && (rc = accept_logits(s, err))) return rc;
        if (progress && progress(arg, pos, n)) goto cancelled;
    }
    return 0;
cancelled:
    return ERR(err, LILY_ECANCELED, "prompt: cancelled after %d of %d tokens", pos, n);
}

/* ---- decoding -------------------------------------------------------------------------------- */

/* Starts the step that appends id to the pos tokens so far; -1: the token that the step before
 * sampled. */
static int submit(lily_session *s, int32_t pos, int32_t id, lily_err *err) {
    if (pos >= s->context) {
        return ERR(err, LILY_ECONTEXT, "context: full with %d tokens; ask for a larger one", pos);
    }
    struct decode_slot slot = {.session = s->backend, .token = id};
    if (s->on_device) {
        slot.sampling = &s->sampling;
        slot.pick = s->pick++;
    } else {
        slot.logits = s->logits;
    }
    truncate(s, pos);
    s->has_logits = false;
    int rc = s->engine->backend->decode_submit(s->engine->model, &slot, 1, err);
    if (!rc) s->in_flight++;
    return rc;
}

/* Ends the oldest step in flight. */
static int wait(lily_session *s, struct decode_result *result, lily_err *err) {
    s->in_flight--;
    return s->engine->backend->decode_wait(s->engine->model, result, 1, err);
}

/* Ends the steps in flight after an error, whatever becomes of them. */
static void abandon(lily_session *s) {
    struct decode_result result;
    lily_err ignored;
    while (s->in_flight > 0) wait(s, &result, &ignored);
}

/* Ends the oldest step in flight, which appends id to the pos tokens so far. */
static int complete(lily_session *s, int32_t pos, int32_t id, struct decode_result *result,
                    lily_err *err) {
    int rc = wait(s, result, err);
    if (rc) {
        abandon(s);
        return fail(s, rc);
    }
    s->tokens[pos++] = id;
    s->held = pos;
    if (!result->finite) {
        abandon(s);
        return not_finite(s, pos, err);
    }
    if (!s->on_device && (rc = accept_logits(s, err))) return rc;
    if (pos % BACKEND_GRID == 0) take_checkpoint(s, pos, true);
    return 0;
}

int session_step(lily_session *s, int32_t id, lily_err *err) {
    struct decode_result result;
    int32_t pos = session_position(s);
    int rc = submit(s, pos, id, err);
    if (rc) return rc == LILY_ECONTEXT ? rc : fail(s, rc);
    return complete(s, pos, id, &result, err);
}

int session_begin(lily_session *s, const int32_t *prompt, size_t n, lily_err *err) {
    const lily_engine *e = s->engine;
    s->on_device =
        e->backend->sample_begin && sampler_for_device(s->sampler, &s->sampling, &s->pick);
    if (!s->on_device) return 0;
    bool counted = s->sampling.repetition != 1;
    int rc = e->backend->sample_begin(s->backend, counted ? prompt : NULL, counted ? (int32_t)n : 0,
                                      err);
    return rc ? fail(s, rc) : 0;
}

int session_next(lily_session *s, int32_t id, int32_t wanted, int32_t *next, lily_err *err) {
    if (!s->on_device) {
        int rc = session_step(s, id, err);
        if (!rc) *next = sampler_pick(s->sampler, s->logits);
        return rc;
    }
    struct decode_result result;
    int32_t pos = session_position(s) - s->in_flight; /* id's own */
    int rc = s->in_flight ? 0 : submit(s, pos, id, err);
    /* No step starts where a checkpoint is to be taken, nor one whose token nobody wants. */
    if (!rc && wanted > 1 && (pos + 1) % BACKEND_GRID != 0) rc = submit(s, pos + 1, -1, err);
    if (rc) {
        abandon(s);
        return fail(s, rc);
    }
    if ((rc = complete(s, pos, id, &result, err))) return rc;
    *next = result.token;
    return 0;
}

void session_settle(lily_session *s) {
    struct decode_result result;
    lily_err err;
    if (s->in_flight) { /* the step that appends the token picked last */
        int rc = wait(s, &result, &err);
        if (!rc && !result.finite) rc = ERR(&err, LILY_ENUMERIC, "found non-finite values");
        if (!rc) rc = s->engine->backend->rewind(s->backend, &err);
        if (rc) { /* the answer is good; what follows it is read again */
            session_empty(s);
            engine_log(s->engine, "taking back a step: %s; the session was emptied", err.msg);
        }
    }
    s->on_device = false;
}

int lily_session_sync(lily_session *s, const int32_t *ids, size_t n, lily_err *err) {
    int32_t cached;
    int rc = session_enter(s, err);
    return rc ? rc : session_leave(s, session_sync(s, ids, n, NULL, NULL, &cached, err));
}

int lily_session_step(lily_session *s, int32_t id, lily_err *err) {
    int32_t vocab = s->engine->weights->shape->vocab;
    if (id < 0 || id >= vocab) {
        return ERR(err, LILY_EINVAL, "step: found token id %d, expected 0 to %d", id, vocab - 1);
    }
    int rc = session_enter(s, err);
    return rc ? rc : session_leave(s, session_step(s, id, err));
}

/* ---- evaluation ------------------------------------------------------------------------------ */

static int score(lily_session *s, const int32_t *ids, size_t n, lily_logits_fn row, void *arg,
                 lily_err *err) {
    enum { ROWS = 64 }; /* logits rows held at once: 64 MB at 248,320 */
    size_t vocab = (size_t)s->engine->weights->shape->vocab;
    int rc = check_ids(s, ids, n, err);
    if (rc) return rc;
    float *logits = malloc(ROWS * vocab * sizeof *logits);
    if (!logits) return ERR_NOMEM(err, "evaluation");
    session_empty(s);
    for (size_t pos = 0; pos < n && !rc;) {
        size_t rest = n - pos;
        struct prefill_step step = {
            .ids = ids + pos, .n = rest < ROWS ? (int32_t)rest : ROWS, .all_logits = logits};
        if ((rc = prefill(s, &step, err))) break;
        memcpy(s->tokens + pos, ids + pos, (size_t)step.done * sizeof *ids);
        s->held += step.done;
        for (int32_t i = 0; i < step.done && !rc; i++, pos++) {
            memcpy(s->logits, logits + (size_t)i * vocab, vocab * sizeof *logits);
            if (!all_finite(s->logits, (int32_t)vocab)) {
                rc = ERR(err, LILY_ENUMERIC, "logits: found non-finite values after token %zu",
                         pos + 1);
            } else if (session_cancelled(s) || (row && row(arg, pos, s->logits))) {
                rc = ERR(err, LILY_ECANCELED, "evaluation: cancelled after token %zu", pos + 1);
            }
        }
    }
    if (rc) {
        session_empty(s);
    } else {
        s->has_logits = true;
    }
    free(logits);
    return rc;
}

int lily_session_score(lily_session *s, const int32_t *ids, size_t n, lily_logits_fn row, void *arg,
                       lily_err *err) {
    int rc = session_enter(s, err);
    return rc ? rc : session_leave(s, score(s, ids, n, row, arg, err));
}

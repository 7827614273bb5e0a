/* Prefill and decode: a step is recorded, encoded into one command buffer and committed; the host
 * waits for a prompt chunk at once, and for a decoded token only after the next one is on its way.
 */
#include <math.h>
#include <string.h>

#include "backend/metal/encode.h"
#include "backend/metal/metal.h"

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_slot(const struct decode_slot *slot, lily_err *err) {
    const struct backend_session *s = slot->session;
    if (slot->token == -1 && !s->has_token) {
        return ERR(err, LILY_EINVAL,
                   "decode: found no token sampled by the step before, expected one; pass a token");
    }
    int rc =
        slot->token == -1 ? LILY_OK : backend_check_token(s->model->layout.shape, slot->token, err);
    if (rc == LILY_OK) rc = backend_check_room(s->position, s->context, err);
    if (rc == LILY_OK && slot->sampling) rc = backend_check_sampling(slot->sampling, err);
    return rc;
}

static bool distinct(const struct decode_slot *slots, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            if (slots[i].session == slots[j].session) return false;
        }
    }
    return true;
}

static int check_submit(const struct backend_model *m, const struct decode_slot *slots, int32_t n,
                        lily_err *err) {
    if (m->flights == METAL_FLIGHTS) {
        return ERR(err, LILY_EBUSY,
                   "decode: found %d steps in flight, expected fewer; wait for one", METAL_FLIGHTS);
    }
    if (n < 1 || n > m->options.max_sessions || !distinct(slots, n)) {
        return ERR(err, LILY_EINVAL, "decode: found %d slots, expected 1 to %d distinct sessions",
                   n, m->options.max_sessions);
    }
    int rc = LILY_OK;
    for (int32_t i = 0; i < n && rc == LILY_OK; i++) rc = check_slot(&slots[i], err);
    return rc;
}

/* ---- errors of the GPU ----------------------------------------------------------------------- */

/* After an error the queue may refuse everything: once nothing is in flight there is a new one, and
 * the next request works. The sessions of the failed steps are spoilt; the engine empties them. */
static void after_error(struct backend_model *m) {
    lily_err ignored;
    m->failed = true;
    if (m->flights > 0) return;
    m->failed = metal_device_new_queue(&m->device, &ignored) != LILY_OK;
}

static int check_queue(struct backend_model *m, lily_err *err) {
    if (!m->failed || m->flights > 0) return LILY_OK;
    int rc = metal_device_new_queue(&m->device, err);
    m->failed = rc != LILY_OK;
    return rc;
}

/* ---- decode ---------------------------------------------------------------------------------- */

static struct decode_sampling_args sampling_args(const struct decode_slot *slot) {
    const struct backend_sampling *p = slot->sampling;
    if (!p) return decode_no_sampling;
    return (struct decode_sampling_args){
        .temperature = p->temperature,
        .top_p = p->top_p,
        .min_p = p->min_p,
        .repetition = p->repetition,
        .frequency = p->frequency,
        .presence = p->presence,
        .penalties = p->repetition != 1 || p->frequency != 0 || p->presence != 0,
        .top_k = (uint32_t)p->top_k,
        .stream_low = (uint32_t)p->stream,
        .stream_high = (uint32_t)(p->stream >> 32),
        .pick_low = (uint32_t)slot->pick,
        .pick_high = (uint32_t)(slot->pick >> 32),
    };
}

/* Records and encodes one slot's token, and moves its session on; an error leaves it where it was.
 */
static int encode_slot(struct backend_model *m, const struct metal_flight *f,
                       const struct decode_slot *slot, lily_err *err) {
    struct backend_session *s = slot->session;
    const struct decode_record r = {.session = session_view(s),
                                    .token = slot->token,
                                    .count = slot->sampling != NULL,
                                    .result_set = f->set,
                                    .sampling = sampling_args(slot)};
    graph_clear(m->graph);
    decode_record(m->graph, &m->layout, &r);
    int rc = graph_check(m->graph, err);
    if (rc != LILY_OK) return rc;
    if (m->trace) {
        rc = metal_trace_run(m, &r.session, 1, false, f->set, err);
    } else {
        rc = metal_encode(&m->device, m->graph, 0, m->graph->dispatches, m->buffers.buffer,
                          f->command[f->commands - 1].buffer, err);
    }
    if (rc != LILY_OK) return rc;
    s->position++;
    s->kv_rows = s->position; /* later rows, if any, belonged to another continuation */
    s->parity = 1 - s->parity;
    s->token_parity = 1 - s->token_parity;
    s->has_token = slot->sampling != NULL;
    s->can_rewind = true;
    return LILY_OK;
}

/* Opens the next command buffer and closes that of the slots so far. On an error that one stays
 * open: submit commits the last of them, and Metal allows no second commit. */
static int next_command(struct backend_model *m, struct metal_flight *f, lily_err *err) {
    int rc = metal_command_begin(&m->device, "decode", &f->command[f->commands], err);
    if (rc != LILY_OK) return rc;
    if (f->commands > 0) metal_command_commit(&f->command[f->commands - 1]);
    f->commands++;
    return LILY_OK;
}

/* Waits for all command buffers of a step; the first error counts. */
static int wait_flight(struct metal_flight *f, lily_err *err) {
    int rc = LILY_OK;
    double seconds;
    for (int32_t i = 0; i < f->commands; i++) {
        int one = metal_command_wait(&f->command[i], &seconds, rc == LILY_OK ? err : NULL);
        if (rc == LILY_OK) rc = one;
    }
    return rc;
}

/* Ends a step of which only the first n slots could be encoded. Their command buffers may have run:
 * they wrote the state of the other parity, so that the sessions stand where they stood, but cannot
 * go back a token any more. */
static void take_back(struct backend_model *m, struct metal_flight *f, int32_t n) {
    lily_err ignored;
    if (wait_flight(f, &ignored) != LILY_OK) after_error(m);
    for (int32_t i = 0; i < n; i++) {
        struct backend_session *s = f->slot[i].session;
        s->kv_rows = --s->position;
        s->parity = 1 - s->parity;
        s->token_parity = 1 - s->token_parity;
        s->has_token = f->slot[i].had_token;
        s->can_rewind = false;
    }
}

static int submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                  lily_err *err) {
    struct metal_flight *f = &m->flight[m->flights];
    int32_t encoded = 0;
    int rc = LILY_OK;
    f->n = n;
    f->commands = 0;
    f->set = m->next_set;
    f->spoilt = m->failed;
    while (encoded < n && rc == LILY_OK) {
        const struct decode_slot *slot = &slots[encoded];
        f->slot[encoded] = (struct metal_flight_slot){
            slot->session, slot->logits, slot->sampling != NULL, slot->session->has_token};
        if (encoded % METAL_SLOTS == 0) rc = next_command(m, f, err);
        if (rc == LILY_OK) rc = encode_slot(m, f, slot, err);
        encoded += rc == LILY_OK;
    }
    if (f->commands > 0) metal_command_commit(&f->command[f->commands - 1]);
    if (rc != LILY_OK) {
        take_back(m, f, encoded);
        return rc;
    }
    m->flights++;
    m->next_set = 1 - m->next_set;
    return LILY_OK;
}

int metal_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                        lily_err *err) {
    int rc = check_submit(m, slots, n, err);
    if (rc != LILY_OK) return rc;
    void *pool = objc_autoreleasePoolPush();
    rc = check_queue(m, err);
    if (rc == LILY_OK) rc = submit(m, slots, n, err);
    objc_autoreleasePoolPop(pool);
    return rc;
}

/* What slot i of a finished step left behind. */
static struct decode_result read_result(const struct backend_model *m, const struct metal_flight *f,
                                        int32_t i) {
    const struct metal_flight_slot *slot = &f->slot[i];
    size_t number = (size_t)slot->session->slot, vocab = (size_t)m->layout.shape->vocab;
    const uint8_t *results = buffers_contents(&m->buffers, METAL_RESULT_0 + f->set);
    const float *logits = buffers_contents(&m->buffers, METAL_LOGITS_0 + f->set);
    uint32_t result[2];
    memcpy(result, results + METAL_SLOT * number, sizeof result);
    if (slot->logits) memcpy(slot->logits, logits + vocab * number, vocab * sizeof *logits);
    return (struct decode_result){.token = slot->sampled ? (int32_t)result[0] : -1,
                                  .finite = result[1] != 0};
}

/* Ends the oldest step; results NULL: they are dropped. */
static int end_oldest(struct backend_model *m, struct decode_result *results, lily_err *err) {
    struct metal_flight oldest = m->flight[0];
    int rc = wait_flight(&oldest, err);
    if (rc == LILY_OK && oldest.spoilt) {
        rc = ERR(err, LILY_EBACKEND,
                 "Metal: found a step that followed one with an error of the GPU, expected none; "
                 "try again");
    }
    for (int32_t i = 0; i < oldest.n && rc == LILY_OK && results; i++) {
        results[i] = read_result(m, &oldest, i);
    }
    m->flight[0] = m->flight[1];
    m->flight[1] = oldest;
    m->flights--;
    for (int32_t i = 0; i < m->flights; i++) m->flight[i].spoilt |= rc != LILY_OK;
    if (rc != LILY_OK) after_error(m);
    return rc;
}

int metal_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                      lily_err *err) {
    if (m->flights == 0 || n != m->flight[0].n) {
        return ERR(err, LILY_EINVAL, "decode: found a wait for %d slots, expected %d as submitted",
                   n, m->flights ? m->flight[0].n : 0);
    }
    void *pool = objc_autoreleasePoolPush();
    int rc = end_oldest(m, results, err);
    objc_autoreleasePoolPop(pool);
    return rc;
}

void metal_drain(struct backend_model *m) {
    void *pool = objc_autoreleasePoolPush();
    lily_err ignored;
    while (m->flights > 0) end_oldest(m, NULL, &ignored);
    objc_autoreleasePoolPop(pool);
}

/* ---- prefill --------------------------------------------------------------------------------- */

static bool all_finite(const float *x, int32_t n) {
    bool finite = true;
    for (int32_t i = 0; i < n; i++) finite = finite && isfinite(x[i]);
    return finite;
}

/* Runs the recorded graph of a prompt chunk and waits. An evaluation comes here for every row: a
 * pool of its own gives back each command buffer at once. */
static int run(struct backend_model *m, const struct metal_view *view, int32_t rows,
               double *seconds, lily_err *err) {
    *seconds = 0;
    int rc = graph_check(m->graph, err);
    if (rc != LILY_OK) return rc;
    void *pool = objc_autoreleasePoolPush();
    if (m->trace) {
        rc = metal_trace_run(m, view, rows, true, 0, err);
    } else {
        rc = metal_run(&m->device, "prompt chunk", m->graph, 0, m->graph->dispatches,
                       m->buffers.buffer, seconds, err);
    }
    if (rc != LILY_OK) after_error(m);
    objc_autoreleasePoolPop(pool);
    return rc;
}

/* Logits of one row of the chunk, recorded behind it (alone: a command buffer of its own). */
static void record_logits(struct backend_model *m, const struct metal_view *view, int32_t row) {
    const struct decode_record r = {.session = *view, .sampling = decode_no_sampling};
    decode_record_head(m->graph, &m->layout, &r, METAL_P_H, (uint64_t)(uint32_t)row);
}

static void copy_logits(const struct backend_model *m, const struct metal_view *view, float *out) {
    size_t vocab = (size_t)m->layout.shape->vocab;
    const float *logits = buffers_contents(&m->buffers, METAL_LOGITS_0);
    memcpy(out, logits + vocab * (size_t)view->slot, vocab * sizeof *out);
}

/* A fault of any row is in the state, and so in the last row's residual stream. */
static int check_finite(const struct backend_session *s, int32_t n, lily_err *err) {
    int32_t hidden = s->model->layout.shape->hidden;
    const float *h = buffers_contents(&s->model->buffers, METAL_P_H);
    if (all_finite(h + (size_t)(n - 1) * (size_t)hidden, hidden)) return LILY_OK;
    return ERR(err, LILY_ENUMERIC,
               "positions %d to %d: found non-finite values in the hidden state, expected finite "
               "numbers; reset the session, and check the checkpoint if this repeats",
               s->position - n, s->position - 1);
}

/* The chunk, its last logits when asked, and for an evaluation those of every row, one by one. */
static int prefill_chunk(struct backend_session *s, const struct prefill_step *step, int32_t n,
                         lily_err *err) {
    struct backend_model *m = s->model;
    const struct prefill_record r = {.session = session_view(s), .n = n};
    float *last = n == step->n && !step->all_logits ? step->logits : NULL;
    size_t vocab = (size_t)m->layout.shape->vocab;
    double seconds, ignored;
    memcpy(buffers_contents(&m->buffers, METAL_P_IDS), step->ids, (size_t)n * sizeof *step->ids);
    graph_clear(m->graph);
    prefill_record(m->graph, &m->layout, &r);
    if (last) record_logits(m, &r.session, n - 1);
    int rc = run(m, &r.session, n, &seconds, err);
    if (rc != LILY_OK) { /* it may have taken too long, and as it is would do so again */
        metal_pace_failed(&m->pace, n);
        return rc;
    }
    metal_pace_took(&m->pace, n, s->position, seconds);
    s->position += n;
    s->kv_rows = s->position; /* later rows, if any, belonged to another continuation */
    s->parity = 1 - s->parity;
    if (last) copy_logits(m, &r.session, last);
    for (int32_t i = 0; i < n && step->all_logits && rc == LILY_OK; i++) {
        graph_clear(m->graph);
        record_logits(m, &r.session, i);
        rc = run(m, &r.session, i + 1, &ignored, err);
        if (rc == LILY_OK) copy_logits(m, &r.session, step->all_logits + (size_t)i * vocab);
    }
    return rc == LILY_OK ? check_finite(s, n, err) : rc;
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* Rows of the next chunk: it ends on the grid of state checkpoints, or on a part of it, unless the
 * prompt ends before. */
static int32_t chunk_rows(const struct backend_session *s, int32_t wanted) {
    int32_t rows = metal_pace_rows(&s->model->pace, s->position);
    int32_t n = rows - s->position % smaller(rows, BACKEND_GRID);
    return smaller(smaller(wanted, n), s->context - s->position);
}

int metal_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err) {
    struct backend_model *m = s->model;
    step->done = 0;
    if (step->n < 1) {
        return ERR(err, LILY_EINVAL, "prefill: found %d tokens, expected at least 1", step->n);
    }
    if (m->flights > 0) {
        return ERR(err, LILY_EBUSY, "prefill: found a step in flight, expected none; wait for it");
    }
    int rc = backend_check_room(s->position, s->context, err);
    int32_t n = chunk_rows(s, step->n);
    for (int32_t i = 0; i < n && rc == LILY_OK; i++)
        rc = backend_check_token(m->layout.shape, step->ids[i], err);
    if (rc != LILY_OK) return rc;
    s->has_token = s->can_rewind = false;
    void *pool = objc_autoreleasePoolPush();
    rc = check_queue(m, err);
    if (rc == LILY_OK) rc = prefill_chunk(s, step, n, err);
    objc_autoreleasePoolPop(pool);
    if (rc != LILY_OK) return rc;
    if (step->all_logits && step->logits && n == step->n) {
        size_t vocab = (size_t)m->layout.shape->vocab;
        memcpy(step->logits, step->all_logits + (size_t)(n - 1) * vocab, vocab * sizeof(float));
    }
    step->done = n;
    return LILY_OK;
}

/* A chunk of a prompt: its tokens through all layers at once. The state is read from one buffer and
 * written to the other, as by a decode step. */
#include <string.h>

#include "backend/cuda/cuda.h"
#include "base/clock.h"

void cuda_slot_of(const struct backend_session *s, struct cuda_slot *out) {
    int now = s->parity, next = s->parity ^ 1;
    *out = (struct cuda_slot){.state_in = s->state[now],
                              .state_out = s->state[next],
                              .conv_in = s->conv[now],
                              .conv_out = s->conv[next],
                              .keys = s->keys,
                              .values = s->values,
                              .token = s->token,
                              .counts = s->counts,
                              .pos = s->position,
                              .capacity = s->capacity};
}

static int check_prompt(const struct backend_session *s, const struct prefill_step *step, int32_t n,
                        lily_err *err) {
    const struct backend_model *m = s->model;
    if (m->n_steps) {
        return ERR(err, LILY_EBUSY,
                   "prefill: found a decode step in flight, expected none; wait for it");
    }
    int rc = backend_check_room(s->position, s->context, err);
    for (int32_t i = 0; i < n && rc == LILY_OK; i++) {
        rc = backend_check_token(model_shape(m), step->ids[i], err);
    }
    return rc;
}

/* Queues what the kernels read: tokens, the slot, a flag that says finite. */
static int send(struct backend_session *s, const int32_t *ids, int32_t n, lily_err *err) {
    struct backend_model *m = s->model;
    const struct cuda_driver *d = m->d;
    size_t bytes = (size_t)n * sizeof *ids;
    CUdeviceptr flag = m->x.finite + (size_t)m->options.max_sessions * sizeof(int32_t);
    memcpy(m->prompt_ids, ids, bytes);
    cuda_slot_of(s, m->prompt_slot);
    CUresult r = d->to_device(m->x.ids, m->prompt_ids, bytes, m->stream);
    if (r == 0) {
        r = d->to_device(m->prompt_slot_device, m->prompt_slot, sizeof *m->prompt_slot, m->stream);
    }
    if (r == 0) r = d->fill8(flag, 1, sizeof(int32_t), m->stream);
    return cuda_check(d, r, "prompt", err);
}

/* Queues logits of rows [first, first + n) of the chunk; out has them when the stream was waited
 * for. */
static int head(struct backend_model *m, const struct cuda_run *run, int32_t first, int32_t n,
                float *out, lily_err *err) {
    int32_t vocab = model_shape(m)->vocab, flag = m->options.max_sessions;
    for (int32_t at = 0; at < n; at += CUDA_HEAD_ROWS) {
        int32_t part = n - at < CUDA_HEAD_ROWS ? n - at : CUDA_HEAD_ROWS;
        size_t row = (size_t)vocab * sizeof(float);
        int rc = cuda_run_head(m, run, first + at, part, err);
        if (rc == LILY_OK) rc = cuda_check_rows(m, run->x->logits, part, vocab, part, flag, err);
        if (rc != LILY_OK) return rc;
        CUresult r = m->d->to_host(out + (size_t)at * (size_t)vocab, run->x->logits,
                                   (size_t)part * row, m->stream);
        rc = cuda_check(m->d, r, "logits", err);
        if (rc != LILY_OK) return rc;
    }
    return LILY_OK;
}

/* Queues the step's first n tokens and waits for them; last: the last one's logits are wanted. */
static int run_chunk(struct backend_session *s, const struct prefill_step *step, int32_t n,
                     bool last, lily_err *err) {
    struct backend_model *m = s->model;
    const struct cuda_driver *d = m->d;
    int32_t flag = m->options.max_sessions, hidden = model_shape(m)->hidden;
    struct cuda_run run = {.x = &m->chunk,
                           .slots = m->prompt_slot,
                           .slots_device = m->prompt_slot_device,
                           .n_slots = 1,
                           .rows_per_slot = n,
                           .prompt = true,
                           .matrix = true};
    int rc = send(s, step->ids, n, err);
    if (rc == LILY_OK) {
        rc = m->prompt ? cuda_prompt_layers(m, &run, err) : cuda_run_layers(m, &run, err);
    }
    if (rc == LILY_OK) rc = cuda_check_rows(m, run.x->x, n, hidden, n, flag, err);
    if (rc == LILY_OK && step->all_logits) rc = head(m, &run, 0, n, step->all_logits, err);
    if (rc == LILY_OK && last && step->logits && !step->all_logits) {
        rc = head(m, &run, n - 1, 1, step->logits, err);
    }
    if (rc != LILY_OK) return rc;
    CUdeviceptr finite = m->x.finite + (size_t)flag * sizeof(int32_t);
    CUresult r = d->to_host(m->prompt_finite, finite, sizeof(int32_t), m->stream);
    if (r == 0) r = d->stream_wait(m->stream);
    return cuda_check(d, r, "prompt", err);
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* How many of the next n tokens go one by one through the persistent decode step: those behind the
 * last point of the grid where they are few, and a few that begin between two points. So no cut on
 * the grid changes what a token goes through. Alone, six steps take as long as the smallest chunk;
 * behind a chunk, which could have taken these tokens along, they come on top of it. */
static int32_t tail_of(const struct backend_session *s, int32_t n) {
    enum { ALONE = 6, BEHIND = 3 };
    const struct backend_model *m = s->model;
    if (!m->prompt || !m->decode || m->options.trace) return 0;
    int32_t end = s->position + n, behind = end % BACKEND_GRID;
    int32_t most = end < BACKEND_GRID ? ALONE : BEHIND;
    if (s->position % BACKEND_GRID && n <= most) return n;
    return behind <= most ? smaller(behind, n) : 0;
}

static int not_finite(int32_t first, int32_t last, lily_err *err) {
    return ERR(err, LILY_ENUMERIC,
               "positions %d to %d: found non-finite values, expected finite numbers; reset the "
               "session, and check the checkpoint if this repeats",
               first, last);
}

/* The step's first n tokens as one chunk; last: the last one's logits are wanted. */
static int read_rows(struct backend_session *s, const struct prefill_step *step, int32_t n,
                     bool last, lily_err *err) {
    struct backend_model *m = s->model;
    double began = clock_seconds();
    int rc = run_chunk(s, step, n, last, err);
    if (rc != LILY_OK) { /* what was queued still reads the ids that the next chunk overwrites */
        m->d->stream_wait(m->stream);
        return rc;
    }
    int32_t first = s->position;
    if (!step->all_logits) cuda_chunk_took(m, first, n, clock_seconds() - began);
    s->parity ^= 1;
    s->position += n;
    s->kv_rows = s->position; /* later rows, if any, belonged to another continuation */
    s->can_rewind = s->sampled = false;
    return *m->prompt_finite ? LILY_OK : not_finite(first, s->position - 1, err);
}

/* Waits for the oldest decode step; its logits are finite. */
static int take_step(struct backend_session *s, lily_err *err) {
    struct decode_result result;
    int32_t at = s->position - s->model->n_steps;
    int rc = cuda_decode_wait(s->model, &result, 1, err);
    return rc != LILY_OK || result.finite ? rc : not_finite(at, at, err);
}

/* Tokens [at, at + n) of the step as decode steps, two in flight. */
static int read_tail(struct backend_session *s, const struct prefill_step *step, int32_t at,
                     int32_t n, lily_err *err) {
    struct backend_model *m = s->model;
    size_t vocab = (size_t)model_shape(m)->vocab;
    int rc = LILY_OK;
    for (int32_t i = at; i < at + n && rc == LILY_OK; i++) {
        struct decode_slot slot = {.session = s, .token = step->ids[i]};
        if (i == step->n - 1) slot.logits = step->logits;
        if (step->all_logits) slot.logits = step->all_logits + (size_t)i * vocab;
        rc = cuda_decode_submit(m, &slot, 1, err);
        if (rc == LILY_OK && m->n_steps == CUDA_IN_FLIGHT) rc = take_step(s, err);
    }
    while (m->n_steps) {
        int waited = take_step(s, rc == LILY_OK ? err : NULL);
        if (rc == LILY_OK) rc = waited;
    }
    s->can_rewind = s->sampled = false;
    return rc;
}

/* One chunk, ending on the grid of state checkpoints unless the prompt ends before. */
int cuda_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err) {
    struct backend_model *m = s->model;
    step->done = 0;
    if (step->n < 1) {
        return ERR(err, LILY_EINVAL, "prefill: found %d tokens, expected at least 1", step->n);
    }
    int32_t most = cuda_chunk_rows(m, s->position);
    int32_t n = smaller(step->n, most - s->position % BACKEND_GRID);
    n = smaller(n, s->context - s->position);
    int32_t tail = tail_of(s, n);
    int rc = check_prompt(s, step, n, err);
    if (rc == LILY_OK) rc = cuda_enter(m, err);
    if (rc == LILY_OK && n > tail) {
        rc = read_rows(s, step, n - tail, n == step->n && !tail, err);
    }
    if (rc == LILY_OK && tail) rc = read_tail(s, step, n - tail, tail, err);
    if (rc != LILY_OK) return rc;
    size_t vocab = (size_t)model_shape(m)->vocab;
    if (step->all_logits && step->logits && n == step->n) {
        memcpy(step->logits, step->all_logits + (size_t)(n - 1) * vocab, vocab * sizeof(float));
    }
    step->done = n;
    return LILY_OK;
}

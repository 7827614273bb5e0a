/* Decode steps: slots are checked and sent, a path queues the work, and the results come back when
 * they are waited for. Up to two steps are in flight: the second reads on the device the token that
 * the first samples there. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"

/* Device memory of slots and results, for the steps in flight and a prompt. */
size_t cuda_steps_bytes(const struct backend_model *m) {
    size_t n = (size_t)m->options.max_sessions;
    return CUDA_IN_FLIGHT * (cuda_aligned(n * sizeof(struct cuda_slot)) +
                             cuda_aligned(n * sizeof(struct cuda_result))) +
           cuda_aligned(sizeof(struct cuda_slot));
}

static void *pinned(struct backend_model *m, size_t bytes, int *rc, lily_err *err) {
    void *memory = NULL;
    if (*rc != LILY_OK) return NULL;
    *rc = cuda_pinned(m, bytes, &memory, err);
    return memory;
}

int cuda_steps_open(struct backend_model *m, lily_err *err) {
    size_t n = (size_t)m->options.max_sessions;
    size_t row = (size_t)model_shape(m)->vocab * sizeof(float);
    CUdeviceptr at;
    int rc = cuda_memory(m, cuda_steps_bytes(m), "steps", &at, err);
    if (rc != LILY_OK) return rc;
    m->steps_block = at;
    for (int i = 0; i < CUDA_IN_FLIGHT && rc == LILY_OK; i++) {
        struct cuda_step *step = &m->steps[i];
        step->slots_device = at;
        step->results_device = at + cuda_aligned(n * sizeof *step->slots);
        at = step->results_device + cuda_aligned(n * sizeof *step->results);
        step->slots = pinned(m, n * sizeof *step->slots, &rc, err);
        step->results = pinned(m, n * sizeof *step->results, &rc, err);
        step->logits = pinned(m, n * row, &rc, err);
        step->wanted = calloc(n, sizeof *step->wanted);
        if (rc == LILY_OK && !step->wanted) rc = ERR_NOMEM(err, "CUDA steps");
        if (rc == LILY_OK) {
            rc = cuda_check(m->d, m->d->event_new(&step->done, CU_EVENT_DISABLE_TIMING), "event",
                            err);
        }
    }
    m->prompt_slot_device = at;
    m->prompt_slot = pinned(m, sizeof *m->prompt_slot, &rc, err);
    m->prompt_ids = pinned(m, (size_t)m->rows * sizeof *m->prompt_ids, &rc, err);
    m->prompt_finite = pinned(m, sizeof *m->prompt_finite, &rc, err);
    return rc;
}

void cuda_steps_close(struct backend_model *m) {
    const struct cuda_driver *d = m->d;
    for (int i = 0; i < CUDA_IN_FLIGHT; i++) {
        struct cuda_step *step = &m->steps[i];
        if (step->slots) d->host_free(step->slots);
        if (step->results) d->host_free(step->results);
        if (step->logits) d->host_free(step->logits);
        if (step->done) d->event_free(step->done);
        free(step->wanted);
    }
    if (m->prompt_slot) d->host_free(m->prompt_slot);
    if (m->prompt_ids) d->host_free(m->prompt_ids);
    if (m->prompt_finite) d->host_free(m->prompt_finite);
    if (m->steps_block) d->memory_free(m->steps_block);
}

/* ---- submit ---------------------------------------------------------------------------------- */

static int check_slot(const struct decode_slot *slot, lily_err *err) {
    const struct backend_session *s = slot->session;
    if (slot->token == -1 && !s->sampled) {
        return ERR(err, LILY_EINVAL,
                   "decode: found no token sampled by the step before, expected one; pass a token");
    }
    int rc =
        slot->token == -1 ? LILY_OK : backend_check_token(model_shape(s->model), slot->token, err);
    if (rc == LILY_OK) rc = backend_check_room(s->position, s->context, err);
    if (rc == LILY_OK && slot->sampling) rc = backend_check_sampling(slot->sampling, err);
    return rc;
}

static int check_slots(const struct backend_model *m, const struct decode_slot *slots, int32_t n,
                       lily_err *err) {
    if (m->n_steps == CUDA_IN_FLIGHT) {
        return ERR(err, LILY_EBUSY,
                   "decode: found %d steps in flight, expected fewer; wait for one",
                   CUDA_IN_FLIGHT);
    }
    bool distinct = true;
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) distinct = distinct && slots[i].session != slots[j].session;
    }
    if (n < 1 || n > m->options.max_sessions || !distinct) {
        return ERR(err, LILY_EINVAL,
                   "decode: found %d slots, expected 1 to %d distinct sessions; open the model for "
                   "more, and give each session one slot",
                   n, m->options.max_sessions);
    }
    int rc = LILY_OK;
    for (int32_t i = 0; i < n && rc == LILY_OK; i++) rc = check_slot(&slots[i], err);
    return rc;
}

static void fill_slot(const struct decode_slot *from, struct cuda_slot *to) {
    const struct backend_sampling *p = from->sampling;
    cuda_slot_of(from->session, to);
    to->input = from->token;
    to->want_logits = from->logits != NULL;
    if (!p) return;
    to->sample = 1;
    to->temperature = p->temperature;
    to->top_p = p->top_p;
    to->min_p = p->min_p;
    to->repetition = p->repetition;
    to->frequency = p->frequency;
    to->presence = p->presence;
    to->top_k = p->top_k;
    to->stream = p->stream;
    to->pick = from->pick;
}

int cuda_step_send(struct backend_model *m, const struct cuda_step *step, lily_err *err) {
    const struct cuda_driver *d = m->d;
    size_t n = (size_t)step->n;
    CUresult r = d->to_device(step->slots_device, step->slots, n * sizeof *step->slots, m->stream);
    if (r == 0) r = d->fill8(m->x.finite, 1, n * sizeof(int32_t), m->stream);
    return cuda_check(d, r, "decode", err);
}

int cuda_step_fetch(struct backend_model *m, const struct cuda_step *step, lily_err *err) {
    size_t bytes = (size_t)step->n * sizeof *step->results;
    return cuda_check(m->d, m->d->to_host(step->results, step->results_device, bytes, m->stream),
                      "decode", err);
}

/* Queues slots, work, results and logits. */
static int queue(struct backend_model *m, struct cuda_step *step, lily_err *err) {
    const struct cuda_driver *d = m->d;
    size_t n = (size_t)step->n, row = (size_t)model_shape(m)->vocab * sizeof(float);
    const struct cuda_path *path = NULL;
    for (int32_t i = 0; i < m->n_paths && !path; i++) {
        if (m->paths[i]->takes(m, step)) path = m->paths[i];
    }
    int rc = path->lean ? LILY_OK : cuda_step_send(m, step, err);
    if (rc == LILY_OK) rc = path->queue(m, step, err);
    if (rc == LILY_OK && !path->lean) rc = cuda_step_fetch(m, step, err);
    if (rc != LILY_OK) return rc;
    CUresult r = 0;
    for (size_t i = 0; i < n && r == 0; i++) {
        if (!step->wanted[i].logits) continue;
        r = d->to_host((char *)step->logits + i * row, m->x.logits + i * row, row, m->stream);
    }
    if (r == 0) r = d->event_record(step->done, m->stream);
    return cuda_check(d, r, "decode", err);
}

int cuda_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                       lily_err *err) {
    int rc = check_slots(m, slots, n, err);
    if (rc == LILY_OK) rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    struct cuda_step *step = &m->steps[(m->first_step + m->n_steps) % CUDA_IN_FLIGHT];
    step->n = n;
    step->any_logits = false;
    for (int32_t i = 0; i < n; i++) {
        step->wanted[i] = slots[i];
        step->any_logits = step->any_logits || slots[i].logits;
        fill_slot(&slots[i], &step->slots[i]);
    }
    rc = queue(m, step, err);
    if (rc != LILY_OK) { /* what was queued still reads the slots that the next step fills */
        m->d->stream_wait(m->stream);
        return rc;
    }
    for (int32_t i = 0; i < n; i++) {
        struct backend_session *s = slots[i].session;
        s->parity ^= 1;
        s->kv_rows = ++s->position; /* later rows, if any, belonged to another continuation */
        s->can_rewind = true;
        s->sampled = slots[i].sampling != NULL;
    }
    m->n_steps++;
    return LILY_OK;
}

int cuda_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                     lily_err *err) {
    struct cuda_step *step = &m->steps[m->first_step];
    if (!m->n_steps || n != step->n) {
        return ERR(err, LILY_EINVAL,
                   "decode: found a wait for %d slots, expected %d; wait for a step as it was "
                   "submitted",
                   n, m->n_steps ? step->n : 0);
    }
    m->first_step = (m->first_step + 1) % CUDA_IN_FLIGHT;
    m->n_steps--;
    int rc = cuda_enter(m, err);
    if (rc == LILY_OK) rc = cuda_check(m->d, m->d->event_wait(step->done), "decode", err);
    if (rc != LILY_OK) return rc;
    size_t vocab = (size_t)model_shape(m)->vocab;
    for (int32_t i = 0; i < n; i++) {
        float *logits = step->wanted[i].logits;
        if (logits) memcpy(logits, step->logits + (size_t)i * vocab, vocab * sizeof *logits);
        results[i].token = step->results[i].token;
        results[i].finite = step->results[i].finite != 0;
    }
    return LILY_OK;
}

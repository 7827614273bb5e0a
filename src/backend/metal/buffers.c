#include "backend/metal/buffers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* ---- preflight ------------------------------------------------------------------------------- */

static uint64_t window_bytes(const struct metal_layout *l) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < l->tensors.windows; i++) {
        bytes += l->tensors.window[i].end - l->tensors.window[i].begin;
    }
    return bytes;
}

uint64_t buffers_need(const struct metal_layout *l) {
    return window_bytes(l) + l->bytes[METAL_SMALL] + layout_scratch_bytes(l) +
           (uint64_t)l->sessions * layout_session_bytes(l, l->context);
}

/* Largest context, in thousands, for which all sessions fit into that much; 0: for none. */
static int32_t context_within(const struct metal_layout *l, uint64_t bytes) {
    uint64_t sessions = (uint64_t)l->sessions, empty = layout_session_bytes(l, 0);
    uint64_t fixed = window_bytes(l) + l->bytes[METAL_SMALL] + layout_scratch_bytes(l);
    uint64_t token = layout_session_bytes(l, 1) - empty;
    if (bytes < fixed + sessions * empty) return 0;
    return (int32_t)((bytes - fixed - sessions * empty) / (sessions * token) / 1024);
}

/* What helps on a machine of d's memory, appended to the message. */
static void add_remedy(const struct metal_device *d, const struct metal_layout *l, lily_err *err) {
    enum { SYSTEM_MIB = 2048, SLACK_MIB = 256 }; /* what macOS keeps; libraries, command buffers */
    const uint64_t need_mib = (buffers_need(l) >> 20) + SLACK_MIB + 1, memory_mib = d->memory >> 20;
    const uint64_t ours =
        memory_mib > SYSTEM_MIB + SLACK_MIB ? (memory_mib - SYSTEM_MIB - SLACK_MIB) << 20 : 0;
    int32_t thousands = context_within(l, ours);
    size_t n = strlen(err->msg), room = sizeof err->msg - n;
    if (need_mib + SYSTEM_MIB <= memory_mib) {
        snprintf(err->msg + n, room,
                 "; raise the limit until the next start with: sudo sysctl "
                 "iogpu.wired_limit_mb=%llu",
                 (unsigned long long)need_mib);
    } else if (thousands > 0) {
        snprintf(err->msg + n, room,
                 "; ask for a context of at most %d tokens, or fewer sessions: the machine's %.0f "
                 "GiB hold no more",
                 thousands * 1024, (double)d->memory / GIB);
    } else {
        snprintf(err->msg + n, room,
                 "; the machine's %.0f GiB cannot hold this model: use one with more memory",
                 (double)d->memory / GIB);
    }
}

int buffers_preflight(const struct metal_device *d, const struct metal_layout *l, lily_err *err) {
    uint64_t weights = window_bytes(l) + l->bytes[METAL_SMALL], scratch = layout_scratch_bytes(l);
    uint64_t sessions = (uint64_t)l->sessions * layout_session_bytes(l, l->context);
    uint64_t need = buffers_need(l);
    if (need <= d->working_set) return LILY_OK;
    int rc = ERR(err, LILY_ENOMEM,
                 "Metal: found room for %.2f GiB on the GPU, expected %.2f GiB (weights %.2f, %d "
                 "session(s) of %d tokens %.2f, scratch %.2f)",
                 (double)d->working_set / GIB, (double)need / GIB, (double)weights / GIB,
                 l->sessions, l->context, (double)sessions / GIB, (double)scratch / GIB);
    if (err) add_remedy(d, l, err);
    return rc;
}

/* ---- making ---------------------------------------------------------------------------------- */

static int no_memory(const struct metal_buffers *b, int32_t number, uint64_t bytes, lily_err *err) {
    return ERR(err, LILY_ENOMEM,
               "Metal: found no memory for the buffer \"%s\" of %.2f GiB; close other programs, or "
               "ask for a shorter context",
               layout_label(b->layout, number), (double)bytes / GIB);
}

static int new_buffer(struct metal_buffers *b, const struct metal_device *d, int32_t number,
                      uint64_t bytes, void *existing, lily_err *err) {
    id made = existing
                  ? mtl_new_buffer_no_copy(d->device, existing, bytes, MTLResourceStorageModeShared)
                  : mtl_new_buffer(d->device, bytes, MTLResourceStorageModeShared);
    if (!made) return no_memory(b, number, bytes, err);
    mtl_set_label(made, ns_string(layout_label(b->layout, number)));
    b->buffer[number] = made;
    b->bytes[number] = bytes;
    return LILY_OK;
}

static int new_windows(struct metal_buffers *b, const struct metal_device *d, lily_err *err) {
    const struct metal_tensors *t = &b->layout->tensors;
    int rc = LILY_OK;
    for (int32_t i = 0; i < t->windows && rc == LILY_OK; i++) {
        const struct metal_window *w = &t->window[i];
        void *existing = t->in_place ? (void *)(uintptr_t)w->begin : NULL;
        rc = new_buffer(b, d, b->layout->first_window + i, w->end - w->begin, existing, err);
    }
    return rc;
}

/* ---- filling --------------------------------------------------------------------------------- */

static void copy_mat(struct metal_buffers *b, const struct metal_mat *m) {
    uint8_t *base = buffers_contents(b, m->buffer);
    for (int32_t i = 0; i < m->items; i++) {
        uint8_t *item = base + (uint64_t)i * m->stride;
        memcpy(item + m->codes, m->source[i].data, mat_code_bytes(m));
        memcpy(item + m->scales, m->source[i].scales, mat_scale_bytes(m));
        memcpy(item + m->biases, m->source[i].biases, mat_scale_bytes(m));
    }
    b->copied += (uint64_t)m->items * (mat_code_bytes(m) + 2 * mat_scale_bytes(m));
}

static int copy_weights(struct metal_buffers *b, const struct backend_options *o, lily_err *err) {
    const struct metal_tensors *t = &b->layout->tensors;
    for (int32_t i = 0; i < t->units; i++) {
        if (o->progress && o->progress(o->progress_arg, b->copied, t->mat_bytes) != 0) {
            return ERR(err, LILY_ECANCELED, "Metal: interrupted while copying weights");
        }
        for (int32_t j = 0; j < t->unit[i].mats; j++) copy_mat(b, t->unit[i].mat[j]);
    }
    if (o->progress) o->progress(o->progress_arg, b->copied, t->mat_bytes);
    return LILY_OK;
}

static void copy_vector(void *small, struct metal_vector *v) {
    if (v->source) memcpy((uint8_t *)small + v->at, v->source, 4 * (size_t)v->n);
}

/* The rotation of plane i for each position, theta^(-2i / rotary_dim): a rounded power, then a
 * rounded reciprocal, as in ref. */
static void fill_frequencies(const struct shape *s, float *out) {
    for (int32_t i = 0; i < s->rotary_dim / 2; i++) {
        out[i] = 1.0f / (float)pow(s->rope_theta, 2.0 * i / s->rotary_dim);
    }
}

static void fill_small(struct metal_buffers *b, const struct weights *w,
                       const struct backend_options *options) {
    struct metal_tensors *t = (struct metal_tensors *)&b->layout->tensors;
    uint8_t *small = buffers_contents(b, METAL_SMALL);
    memset(small, 0, t->small_bytes);
    tensors_each_vector(t, copy_vector, small);
    fill_frequencies(t->shape, (float *)(void *)(small + t->inv_freq.at));
    backend_sampled(w, options, buffers_contents(b, METAL_MASK));
}

int buffers_new(const struct metal_device *d, const struct metal_layout *l, const struct weights *w,
                const struct backend_options *options, struct metal_buffers *out, lily_err *err) {
    *out = (struct metal_buffers){.layout = l};
    out->buffer = calloc((size_t)l->buffers, sizeof *out->buffer);
    out->bytes = calloc((size_t)l->buffers, sizeof *out->bytes);
    int rc = out->buffer && out->bytes ? LILY_OK : ERR_NOMEM(err, "Metal buffers");
    for (int32_t i = 0; i < METAL_FIXED && rc == LILY_OK; i++) {
        rc = new_buffer(out, d, i, l->bytes[i], NULL, err);
    }
    if (rc == LILY_OK) rc = new_windows(out, d, err);
    if (rc == LILY_OK) fill_small(out, w, options);
    if (rc == LILY_OK && !l->tensors.in_place) rc = copy_weights(out, options, err);
    if (rc != LILY_OK) buffers_free(out);
    return rc;
}

void buffers_free(struct metal_buffers *b) {
    for (int32_t i = 0; b->buffer && i < b->layout->buffers; i++) objc_release(b->buffer[i]);
    free(b->buffer);
    free(b->bytes);
    *b = (struct metal_buffers){0};
}

/* ---- sessions -------------------------------------------------------------------------------- */

int buffers_new_session(struct metal_buffers *b, const struct metal_device *d, int32_t slot,
                        int32_t context, lily_err *err) {
    const struct metal_layout *l = b->layout;
    int32_t first = l->first_session + slot * l->per_session;
    int rc = LILY_OK;
    for (int32_t k = 0; k < l->per_session && rc == LILY_OK; k++) {
        rc = new_buffer(b, d, first + k, layout_session_buffer(l, k, context), NULL, err);
    }
    if (rc != LILY_OK) buffers_free_session(b, slot);
    return rc;
}

void buffers_free_session(struct metal_buffers *b, int32_t slot) {
    const struct metal_layout *l = b->layout;
    int32_t first = l->first_session + slot * l->per_session;
    for (int32_t i = first; i < first + l->per_session; i++) {
        objc_release(b->buffer[i]);
        b->buffer[i] = NULL;
        b->bytes[i] = 0;
    }
}

bool buffers_list(const struct metal_buffers *b, struct buf *out) {
    bool whole = true;
    for (int32_t i = 0; i < b->layout->buffers && whole; i++) {
        if (!b->buffer[i]) continue;
        whole = buf_printf(out, "%s %llu\n", layout_label(b->layout, i),
                           (unsigned long long)b->bytes[i]);
    }
    return whole;
}

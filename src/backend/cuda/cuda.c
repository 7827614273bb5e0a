/* Opening a model: device, kernels, memory preflight, upload; statistics; the backend's table. */
#include "backend/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;
/* What the driver takes beside our allocations: for a context with the smallest stack (292 MB on an
 * H200), then for kernels (about 30 MB) and their stack (0.27 MB a byte of a thread there, at most
 * 272 bytes). */
static const size_t DRIVER_CONTEXT = (size_t)288 << 20, DRIVER_RESERVE = (size_t)128 << 20;
enum { LEAST_STACK = 64 };

/* ---- small services -------------------------------------------------------------------------- */

int cuda_enter(const struct backend_model *m, lily_err *err) {
    return cuda_check(m->d, m->d->context_set(m->context), "context", err);
}

static int no_memory(const struct backend_model *m, size_t bytes, const char *what, lily_err *err) {
    size_t free_now = 0, total = 0;
    m->d->memory_info(&free_now, &total);
    return ERR(err, LILY_ENOMEM,
               "CUDA %s: found %.2f GiB of free memory (of %.2f) on %s, expected %.2f GiB; ask for "
               "a shorter context or fewer sessions, or close other programs on this GPU",
               what, (double)free_now / GIB, (double)total / GIB, m->name, (double)bytes / GIB);
}

int cuda_memory(const struct backend_model *m, size_t bytes, const char *what, CUdeviceptr *out,
                lily_err *err) {
    CUresult r = m->d->memory_new(out, bytes);
    if (r == CU_ERROR_OUT_OF_MEMORY) return no_memory(m, bytes, what, err);
    return cuda_check(m->d, r, what, err);
}

int cuda_pinned(const struct backend_model *m, size_t bytes, void **out, lily_err *err) {
    CUresult r = m->d->host_new(out, bytes, CU_HOST_PORTABLE);
    if (r != CU_ERROR_OUT_OF_MEMORY) return cuda_check(m->d, r, "pinned memory", err);
    return ERR(err, LILY_ENOMEM,
               "CUDA pinned memory: found no %.1f MiB of this machine's memory to lock, expected "
               "them; close other programs, or raise the limit of locked memory (ulimit -l)",
               (double)bytes / (1024 * 1024));
}

int cuda_launch(const struct backend_model *m, CUfunction f, unsigned gx, unsigned gy, unsigned gz,
                unsigned threads, size_t shared, void **arguments, lily_err *err) {
    CUresult r =
        m->d->launch(f, gx, gy, gz, threads, 1, 1, (unsigned)shared, m->stream, arguments, NULL);
    return cuda_check(m->d, r, "kernel launch", err);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* What the kernels are written for; the shape itself is compiled in. */
static int check_shape(const struct shape *s, lily_err *err) {
    if (!cuda_kernels_embedded(s->name)) {
        return ERR(err, LILY_EBACKEND,
                   "CUDA: found no kernels for shape %s in the program, expected them; build it "
                   "where nvcc is found (make deps), or use the CPU backend",
                   s->name);
    }
    bool fits = s->group == 64 && s->head_dim == 256 && s->gdn_head_dim == 128 &&
                s->q_heads == 8 * s->kv_heads && s->gdn_v_heads == 2 * s->gdn_k_heads &&
                s->conv_taps == 4 && s->rotary_dim == 64 && s->top_k == 8 && s->experts <= 512 &&
                s->hidden <= 4096 && s->q_dim <= 4096 && s->gdn_v_dim <= 4096;
    if (fits) return LILY_OK;
    return ERR(err, LILY_EMODEL,
               "shape %s: found sizes the CUDA kernels are not made for; use the cpu backend, or "
               "extend src/backend/cuda/kernels",
               s->name);
}

static int check_options(const struct weights *w, const struct backend_options *o, lily_err *err) {
    bool fits = o->max_sessions >= 1 && o->max_sessions <= CUDA_MOST_SESSIONS &&
                o->max_context >= 1 && o->max_context <= w->shape->max_context;
    if (fits) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "CUDA backend: found %d session(s) of %d tokens, expected 1 to %d of 1 to %d; ask "
               "for fewer",
               o->max_sessions, o->max_context, CUDA_MOST_SESSIONS, w->shape->max_context);
}

/* ---- the device ------------------------------------------------------------------------------ */

/* Name, capability and sizes of the first device the driver shows. */
static int look_at_device(struct backend_model *m, lily_err *err) {
    const struct cuda_driver *d = m->d;
    int major = 0, minor = 0, processors = 0, shared = 0, devices = 0;
    int rc = cuda_check(d, d->device_count(&devices), "device", err);
    if (rc == LILY_OK && devices < 1) rc = cuda_check(d, CU_ERROR_NO_DEVICE, "device", err);
    if (rc == LILY_OK) rc = cuda_check(d, d->device_get(&m->device, 0), "device", err);
    if (rc != LILY_OK) return rc;
    CUresult r = d->device_name(m->name, (int)sizeof m->name, m->device);
    if (r == 0) r = d->device_attribute(&major, CU_CAPABILITY_MAJOR, m->device);
    if (r == 0) r = d->device_attribute(&minor, CU_CAPABILITY_MINOR, m->device);
    if (r == 0) r = d->device_attribute(&processors, CU_MULTIPROCESSORS, m->device);
    if (r == 0) r = d->device_attribute(&shared, CU_SHARED_PER_BLOCK_OPTIN, m->device);
    m->capability = major * 10 + minor;
    m->processors = processors;
    m->shared_limit = shared;
    rc = cuda_check(d, r, "device", err);
    if (rc != LILY_OK || m->capability >= CUDA_MIN_CAPABILITY) return rc;
    return ERR(
        err, LILY_EBACKEND,
        "CUDA: found %s of compute capability %d.%d, expected 8.0 or newer; choose another GPU "
        "with CUDA_VISIBLE_DEVICES, or use the CPU backend",
        m->name, major, minor);
}

static int enter_device(struct backend_model *m, lily_err *err) {
    const struct cuda_driver *d = m->d;
    int rc = cuda_check(d, d->context_retain(&m->context, m->device), "context", err);
    if (rc == LILY_OK) rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    /* Every thread the card can hold has a stack, of 1,024 bytes at first: 0.26 GB more on an H200
     * than these. A driver that refuses costs that memory alone. */
    d->context_limit(CU_LIMIT_STACK, LEAST_STACK);
    return cuda_check(d, d->stream_new(&m->stream, CU_STREAM_NON_BLOCKING), "stream", err);
}

/* The stack of the kernels that were found, now rather than at some launch. */
static int grow_stack(const struct backend_model *m, lily_err *err) {
    size_t stack = cuda_modules_stack(m->modules);
    if (stack <= LEAST_STACK) return LILY_OK;
    return cuda_check(m->d, m->d->context_limit(CU_LIMIT_STACK, stack), "stack", err);
}

/* ---- memory ---------------------------------------------------------------------------------- */

void cuda_set_sizes(struct backend_model *m) {
    const struct shape *s = model_shape(m);
    const struct backend_options *o = &m->options;
    m->attention_layers = shape_attention_layers(s, m->w->layers);
    m->gdn_layers = m->w->layers - m->attention_layers;
    /* A chunk may begin between two points of the grid and must then end on one. */
    int32_t rows = (o->max_context + BACKEND_GRID - 1) / BACKEND_GRID * BACKEND_GRID;
    m->rows = rows < CUDA_CHUNK ? rows : CUDA_CHUNK;
    int32_t gdn = s->conv_dim + s->gdn_v_dim, full = 2 * s->q_dim + 2 * s->kv_dim;
    m->proj_width = gdn > full ? gdn : full;
}

struct cuda_need cuda_need(const struct backend_model *m) {
    size_t session = cuda_session_bytes(m, m->options.max_context);
    return (struct cuda_need){.weights = m->dw.bytes,
                              .scratch = cuda_scratch_bytes(m) + cuda_steps_bytes(m) +
                                         cuda_decode_bytes(m),
                              .sessions = (size_t)m->options.max_sessions * session,
                              .reserve = DRIVER_RESERVE,
                              .context = DRIVER_CONTEXT};
}

/* Takes half as many rows for a prompt step, which costs speed alone; false: they are few. */
static bool fewer_rows(struct backend_model *m) {
    int32_t rows = m->rows / 2 / BACKEND_GRID * BACKEND_GRID;
    if (rows < CUDA_LEAST_ROWS) return false;
    m->rows = rows;
    return true;
}

/* The weights must fit the device at all. */
static int check_total(const struct backend_model *m, lily_err *err) {
    size_t total = 0, need = m->dw.bytes + DRIVER_CONTEXT + DRIVER_RESERVE;
    int rc = cuda_check(m->d, m->d->device_memory(&total, m->device), "memory", err);
    if (rc != LILY_OK || need <= total) return rc;
    return ERR(err, LILY_ENOMEM,
               "%s: found %.2f GiB of memory, expected %.2f GiB for the weights and the driver; "
               "this GPU is too small for the model: use the CPU backend",
               m->name, (double)total / GIB, (double)need / GIB);
}

/* Everything must fit what is free on the device now, with fewer rows a step if need be. */
static int preflight(struct backend_model *m, lily_err *err) {
    size_t free_now = 0, total = 0;
    int rc = cuda_check(m->d, m->d->memory_info(&free_now, &total), "memory", err);
    if (rc != LILY_OK) return rc;
    struct cuda_need need;
    size_t all;
    do {
        need = cuda_need(m);
        all = need.weights + need.scratch + need.sessions + need.reserve;
        if (all <= free_now) return LILY_OK;
    } while (fewer_rows(m));
    return ERR(err, LILY_ENOMEM,
               "%s: found %.2f GiB of free memory (of %.2f), expected %.2f GiB: %.2f for weights, "
               "%.2f for scratch, %.2f for %d session(s) of %d tokens, %.2f for the driver; "
               "ask for a shorter context or fewer sessions, or close other programs on this GPU",
               m->name, (double)free_now / GIB, (double)total / GIB, (double)all / GIB,
               (double)need.weights / GIB, (double)need.scratch / GIB, (double)need.sessions / GIB,
               m->options.max_sessions, m->options.max_context, (double)need.reserve / GIB);
}

/* Which ids may be sampled: nearly always all below a limit, which kernels test for at no cost. */
static int place_sampled(struct backend_model *m, lily_err *err) {
    size_t n = ((size_t)model_shape(m)->vocab + 31) / 32;
    uint32_t *bits = malloc(n * sizeof *bits);
    if (!bits) return ERR_NOMEM(err, "CUDA sampling");
    backend_sampled(m->w, &m->options, bits);
    int32_t last = model_shape(m)->vocab - 1;
    while (last >= 0 && !(bits[last / 32] >> last % 32 & 1)) last--;
    m->sampled_below = last + 1;
    m->has_holes = false;
    for (int32_t i = 0; i < last; i++) m->has_holes |= !(bits[i / 32] >> i % 32 & 1);
    CUresult r = m->d->to_device(m->x.sampled, bits, n * sizeof *bits, m->stream);
    if (r == 0) r = m->d->stream_wait(m->stream);
    free(bits);
    return cuda_check(m->d, r, "sampling", err);
}

int cuda_allocate(struct backend_model *m, lily_err *err) {
    int rc = cuda_memory(m, cuda_scratch_bytes(m), "scratch", &m->scratch_block, err);
    if (rc != LILY_OK) return rc;
    cuda_place_scratch(m, m->prompt != NULL, m->scratch_block, &m->x, &m->chunk);
    rc = place_sampled(m, err);
    if (rc != LILY_OK) return rc;
    if (m->options.trace) {
        m->trace_rows = malloc((size_t)model_shape(m)->vocab * sizeof(float));
        if (!m->trace_rows) return ERR_NOMEM(err, "CUDA trace");
    }
    return cuda_steps_open(m, err);
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Where the context cannot be entered the driver frees nothing, and the host's memory still is. */
void cuda_close(struct backend_model *m) {
    if (!m) return;
    const struct cuda_driver *d = m->d;
    if (m->context) cuda_enter(m, NULL);
    if (m->stream) d->stream_wait(m->stream);
    for (int32_t i = 0; i < m->n_paths; i++) m->paths[i]->close(m);
    cuda_prompt_close(m);
    cuda_portable_close(m);
    cuda_steps_close(m);
    if (m->scratch_block) d->memory_free(m->scratch_block);
    cuda_weights_free(m);
    cuda_modules_free(d, m->modules);
    if (m->stream) d->stream_free(m->stream);
    if (m->context) d->context_release(m->device);
    free(m->trace_rows);
    free(m);
}

/* Whether the model goes on without what could not be opened: only a device that still answers
 * does. */
static bool can_do_without(const struct backend_model *m, int rc) {
    return (rc == LILY_ENOMEM || rc == LILY_EBACKEND) && m->d->stream_wait(m->stream) == 0;
}

/* The last path is always to be had: its kernels are open. */
int cuda_open_paths(struct backend_model *m, lily_err *err) {
    for (int i = 0; cuda_paths[i] && m->n_paths < CUDA_MAX_PATHS; i++) {
        bool usable = false;
        int rc = cuda_paths[i]->open(m, &usable, err);
        if (rc != LILY_OK && !can_do_without(m, rc)) return rc;
        if (rc == LILY_OK && usable) m->paths[m->n_paths++] = cuda_paths[i];
    }
    return LILY_OK;
}

int cuda_open_prompts(struct backend_model *m, lily_err *err) {
    int rc = cuda_prompt_open(m, err);
    if (rc == LILY_OK) return LILY_OK;
    cuda_prompt_close(m);
    m->prompt_missing = true;
    return can_do_without(m, rc) ? LILY_OK : rc;
}

static int open_on(struct backend_model *m, lily_err *err) {
    int rc = look_at_device(m, err);
    if (rc == LILY_OK) rc = cuda_weights_plan(m, err);
    if (rc == LILY_OK) rc = check_total(m, err); /* before a context is made, which takes long */
    if (rc == LILY_OK) rc = enter_device(m, err);
    if (rc == LILY_OK) rc = preflight(m, err);
    if (rc == LILY_OK) {
        rc = cuda_modules_load(m->d, model_shape(m), m->capability, &m->modules, err);
    }
    if (rc == LILY_OK) rc = cuda_portable_open(m, err);
    if (rc == LILY_OK) rc = cuda_open_prompts(m, err);
    if (rc == LILY_OK) rc = cuda_allocate(m, err); /* before the upload, which takes longest */
    if (rc == LILY_OK) rc = cuda_upload(m, err);
    if (rc == LILY_OK) rc = cuda_open_paths(m, err);
    return rc == LILY_OK ? grow_stack(m, err) : rc;
}

static int cuda_open(const struct weights *w, const struct backend_options *options,
                     struct backend_model **out, lily_err *err) {
    int rc = check_options(w, options, err);
    if (rc == LILY_OK) rc = check_shape(w->shape, err);
    if (rc == LILY_OK) rc = cuda_check_weights(w, err);
    if (rc != LILY_OK) return rc;
    const struct cuda_driver *d = cuda_driver_open(err);
    if (!d) return LILY_EBACKEND;
    struct backend_model *m = calloc(1, sizeof *m);
    if (!m) return ERR_NOMEM(err, "CUDA backend");
    m->w = w;
    m->d = d;
    m->options = *options;
    cuda_set_sizes(m);
    rc = open_on(m, err);
    if (rc != LILY_OK) {
        cuda_close(m);
        return rc;
    }
    *out = m;
    return LILY_OK;
}

/* "NVIDIA H200, 132 multiprocessors, 139.8 GiB" */
static void describe(const struct backend_model *m, char *out, size_t size) {
    size_t total = 0;
    m->d->device_memory(&total, m->device);
    snprintf(out, size, "%.80s, %d multiprocessors, %.1f GiB", m->name, m->processors,
             (double)total / GIB);
}

static void cuda_probe(struct backend_probe *out) {
    struct backend_model m = {0};
    lily_err err;
    *out = (struct backend_probe){0};
    if (!cuda_kernels_embedded(NULL)) {
        snprintf(out->reason, sizeof out->reason,
                 "this program was built without CUDA kernels: no nvcc was found (make deps)");
        return;
    }
    m.d = cuda_driver_open(&err);
    if (!m.d || look_at_device(&m, &err) != LILY_OK) {
        snprintf(out->reason, sizeof out->reason, "%.*s", (int)sizeof out->reason - 1, err.msg);
        return;
    }
    describe(&m, out->device, sizeof out->device);
    out->usable = true;
    snprintf(out->reason, sizeof out->reason,
             "an NVIDIA GPU of compute capability %d.%d with a driver for CUDA %d.%d",
             m.capability / 10, m.capability % 10, m.d->version / 1000, m.d->version % 1000 / 10);
}

/* Two transfers a clock over the whole width; 0 where the driver does not say. */
static double bandwidth(const struct backend_model *m) {
    int khz = 0, bits = 0;
    m->d->device_attribute(&khz, CU_MEMORY_KHZ, m->device);
    m->d->device_attribute(&bits, CU_MEMORY_BITS, m->device);
    return 2.0 * 1e3 * khz * bits / 8;
}

static void cuda_stats(const struct backend_model *m, struct backend_stats *out) {
    const struct plan_query token = {.layers = m->w->layers, .tokens = 1};
    struct backend_plan plan = {0};
    cuda_step_bytes(m, &token, 1, &plan);
    *out = (struct backend_stats){
        .weight_bytes = m->dw.bytes,
        .session_bytes = cuda_session_bytes(m, m->options.max_context),
        .scratch_bytes = cuda_need(m).scratch,
        .bytes_per_token = plan.weight_bytes + plan.state_bytes,
        .kv_bytes_per_depth = cuda_kv_bytes(m, 1),
        .bandwidth = bandwidth(m),
    };
    int used = snprintf(out->kernels, sizeof out->kernels, "%s, prompts %s", m->paths[0]->name,
                        m->prompt ? "sm_90a" : "portable");
    if (m->rows < CUDA_CHUNK && m->rows < m->options.max_context) { /* memory was short */
        snprintf(out->kernels + used, sizeof out->kernels - (size_t)used, " by %d rows", m->rows);
    }
    describe(m, out->device, sizeof out->device);
}

const struct backend backend_cuda = {
    .name = "cuda",
    .probe = cuda_probe,
    .open = cuda_open,
    .close = cuda_close,
    .session_new = cuda_session_new,
    .session_free = cuda_session_free,
    .position = cuda_position,
    .reset = cuda_reset,
    .prefill = cuda_prefill,
    .decode_submit = cuda_decode_submit,
    .decode_wait = cuda_decode_wait,
    .sample_begin = cuda_sample_begin,
    .rewind = cuda_rewind,
    .state_bytes = cuda_state_bytes,
    .state_new = cuda_state_new,
    .state_free = cuda_state_free,
    .state_save = cuda_state_save,
    .state_restore = cuda_state_restore,
    .state_export = cuda_state_export,
    .state_import = cuda_state_import,
    .kv_bytes = cuda_kv_bytes,
    .kv_export = cuda_kv_export,
    .kv_import = cuda_kv_import,
    .stats = cuda_stats,
    .plan = cuda_plan,
    .selftest = cuda_selftest,
};

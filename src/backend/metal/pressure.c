#include "backend/metal/pressure.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "backend/metal/darwin.h"

/* The source's handlers run on the system's threads: what they touch is this block, which the last
 * of them frees. */
struct metal_pressure {
    dispatch_source_t source;
    atomic_int level; /* enum backend_pressure */
};

static enum backend_pressure level_of(uintptr_t events) {
    if (events & DISPATCH_MEMORYPRESSURE_CRITICAL) return BACKEND_PRESSURE_CRITICAL;
    if (events & DISPATCH_MEMORYPRESSURE_WARN) return BACKEND_PRESSURE_WARN;
    return BACKEND_PRESSURE_NONE;
}

uint64_t metal_machine_memory(void) {
    uint64_t bytes = 0;
    size_t n = sizeof bytes;
    return sysctlbyname("hw.memsize", &bytes, &n, NULL, 0) == 0 ? bytes : 0;
}

/* A source tells changes only. The kernel numbers its levels as the source does. */
static enum backend_pressure level_now(void) {
    int level = DISPATCH_MEMORYPRESSURE_NORMAL;
    size_t n = sizeof level;
    if (sysctlbyname("kern.memorystatus_vm_pressure_level", &level, &n, NULL, 0) != 0) {
        return BACKEND_PRESSURE_NONE;
    }
    return level_of((uintptr_t)level);
}

static void on_event(void *context) {
    struct metal_pressure *p = context;
    atomic_store(&p->level, (int)level_of(dispatch_source_get_data(p->source)));
}

static void on_cancel(void *context) {
    struct metal_pressure *p = context;
    dispatch_release(p->source);
    free(p);
}

int metal_pressure_begin(struct metal_pressure **out, lily_err *err) {
    struct metal_pressure *p = *out = calloc(1, sizeof *p);
    if (!p) return ERR_NOMEM(err, "memory-pressure source");
    p->source =
        dispatch_source_create(&_dispatch_source_type_memorypressure, 0,
                               DISPATCH_MEMORYPRESSURE_NORMAL | DISPATCH_MEMORYPRESSURE_WARN |
                                   DISPATCH_MEMORYPRESSURE_CRITICAL,
                               NULL);
    if (!p->source) {
        free(p);
        *out = NULL;
        return ERR(err, LILY_EBACKEND,
                   "Metal: found no memory-pressure source, expected one of macOS 10.9 or newer; "
                   "restart the program");
    }
    atomic_init(&p->level, (int)level_now());
    dispatch_set_context(p->source, p);
    dispatch_source_set_event_handler_f(p->source, on_event);
    dispatch_source_set_cancel_handler_f(p->source, on_cancel);
    dispatch_resume(p->source);
    return LILY_OK;
}

void metal_pressure_end(struct metal_pressure *p) {
    if (p) dispatch_source_cancel(p->source);
}

enum backend_pressure metal_pressure_level(const struct metal_pressure *p) {
    return (enum backend_pressure)atomic_load(&p->level);
}

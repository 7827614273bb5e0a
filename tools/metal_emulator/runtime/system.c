/* What the host asks of macOS beside Metal: memory-pressure sources of libdispatch and two numbers
 * of sysctl. Handlers run on a thread of their own, as on a Mac; the test waits for it. */
#include "../../../src/backend/metal/darwin.h"
#include "internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct dispatch_source_type_s {
    const char *name;
};
const dispatch_source_type _dispatch_source_type_memorypressure = {"memory pressure"};

struct dispatch_source_s {
    dispatch_source_t next; /* of all living ones */
    atomic_int references;
    uintptr_t mask, data;
    void *context;
    void (*on_event)(void *), (*on_cancel)(void *);
    bool resumed, cancelled;
};

static dispatch_source_t sources;
static int level = DISPATCH_MEMORYPRESSURE_NORMAL;

dispatch_source_t dispatch_source_create(const dispatch_source_type *type, uintptr_t handle,
                                         uintptr_t mask, dispatch_queue_t queue) {
    if (emu_inject_nil("dispatch_source_create")) return NULL;
    if (type != &_dispatch_source_type_memorypressure || handle != 0 || queue) {
        emu_find(METAL_EMU_ARGUMENT, "dispatch_source_create: only memory pressure is known here");
        return NULL;
    }
    dispatch_source_t source = calloc(1, sizeof *source);
    if (!source) abort();
    source->mask = mask;
    atomic_init(&source->references, 1);
    emu_lock();
    source->next = sources;
    sources = source;
    emu_unlock();
    return source;
}

void dispatch_set_context(dispatch_source_t source, void *context) {
    source->context = context;
}

void dispatch_source_set_event_handler_f(dispatch_source_t source, void (*handler)(void *)) {
    source->on_event = handler;
}

void dispatch_source_set_cancel_handler_f(dispatch_source_t source, void (*handler)(void *)) {
    source->on_cancel = handler;
}

void dispatch_resume(dispatch_source_t source) {
    source->resumed = true;
}

uintptr_t dispatch_source_get_data(dispatch_source_t source) {
    return source->data;
}

void dispatch_release(dispatch_source_t source) {
    if (atomic_fetch_sub(&source->references, 1) > 1) return;
    if (!source->cancelled) emu_fatal("a dispatch source was released before it was cancelled");
    dispatch_source_t *at = &sources;
    emu_lock();
    while (*at != source) at = &(*at)->next;
    *at = source->next;
    emu_unlock();
    free(source);
}

/* ---- handlers -------------------------------------------------------------------------------- */

struct call {
    void (*handler)(void *);
    void *context;
};

static void *run_call(void *arg) {
    const struct call *c = arg;
    c->handler(c->context);
    return NULL;
}

static void call_elsewhere(void (*handler)(void *), void *context) {
    struct call c = {handler, context};
    pthread_t thread;
    if (!handler) return;
    if (pthread_create(&thread, NULL, run_call, &c) != 0) abort();
    pthread_join(thread, NULL);
}

void dispatch_source_cancel(dispatch_source_t source) {
    if (!source->resumed) emu_fatal("a suspended dispatch source was cancelled: no handler runs");
    source->cancelled = true;
    call_elsewhere(source->on_cancel, source->context);
}

void metal_emu_memory_pressure(int new_level) {
    level = new_level;
    for (dispatch_source_t s = sources; s; s = s->next) {
        if (!s->resumed || s->cancelled || !(s->mask & (uintptr_t)new_level)) continue;
        s->data = (uintptr_t)new_level;
        call_elsewhere(s->on_event, s->context);
    }
}

size_t metal_emu_live_sources(void) {
    size_t n = 0;
    for (dispatch_source_t s = sources; s; s = s->next) n++;
    return n;
}

/* ---- sysctl ---------------------------------------------------------------------------------- */

static int answer(const void *value, size_t bytes, void *old, size_t *size) {
    if (*size < bytes) return -1;
    memcpy(old, value, bytes);
    *size = bytes;
    return 0;
}

int sysctlbyname(const char *name, void *old, size_t *size, void *new_value, size_t new_size) {
    uint64_t memory = (uint64_t)emu_options.profile.memory_gib << 30;
    if (new_value || new_size) return -1;
    if (strcmp(name, "hw.memsize") == 0) return answer(&memory, sizeof memory, old, size);
    if (strcmp(name, "kern.memorystatus_vm_pressure_level") == 0) {
        return answer(&level, sizeof level, old, size);
    }
    return -1;
}

/* A driver without a card: every call succeeds, device memory is addresses alone, and what a step
 * would queue is counted. The code that runs on a card runs on it unchanged, so that `lily plan`
 * tells of the launches that are made. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/decode.h"

static _Thread_local struct cuda_record *record;

/* Most calls do nothing. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define ACCEPT(field, symbol, parameters)                                                          \
    static CUresult accept_##field parameters {                                                    \
        return 0;                                                                                  \
    }
CUDA_DRIVER_MAP(ACCEPT)
#undef ACCEPT

static CUresult new_context(CUcontext *out, CUdevice device) {
    *out = (CUcontext)record;
    return 0;
}

static CUresult function_of(CUfunction *out, CUmodule module, const char *name) {
    *out = (CUfunction)(uintptr_t)name; /* a literal of the code that asks */
    return 0;
}

static CUresult all_free(size_t *free_now, size_t *total) {
    *free_now = *total = SIZE_MAX / 2;
    return 0;
}

static CUresult new_memory(CUdeviceptr *out, size_t bytes) {
    if (record->refuse && record->refuse == bytes) return CU_ERROR_OUT_OF_MEMORY;
    *out = record->next;
    record->next += cuda_aligned(bytes);
    return 0;
}

static CUresult new_host(void **out, size_t bytes, unsigned flags) {
    *out = calloc(1, bytes);
    return *out ? 0 : CU_ERROR_OUT_OF_MEMORY;
}

static CUresult free_host(void *memory) {
    free(memory);
    return 0;
}

/* Ones: every flag that comes back says that all is well. */
static CUresult fill_host(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    memset(to, 1, bytes);
    return 0;
}

static CUresult wait_stream(CUstream stream) {
    record->waits++;
    return 0;
}

static CUresult wait_event(CUevent event) {
    record->waits++;
    return 0;
}

static CUresult one_block(int *blocks, CUfunction f, int threads, size_t shared) {
    *blocks = 1;
    return 0;
}

static void note(const char *name, unsigned grid_x, void **arguments) {
    record->launches++;
    if (strstr(name, "flash")) record->attention_blocks = (int32_t)grid_x;
    if (strcmp(name, "decode_step") == 0) {
        const struct decode_args *a = arguments[0];
        record->steps++;
        record->arrivals = a->barrier - record->arrived;
        record->arrived = a->barrier;
        /* The kernel hands its result to the host itself, unless it is in device memory. */
        bool on_device = a->result < record->next;
        if (!on_device) memset((void *)(uintptr_t)a->result, 1, sizeof(struct cuda_result));
    }
}

static CUresult note_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                            unsigned by, unsigned bz, unsigned shared, CUstream stream,
                            void **parameters, void **extra) {
    note((const char *)f, gx, parameters);
    return 0;
}

static CUresult note_launch_with(const CUlaunchConfig *config, CUfunction f, void **parameters,
                                 void **extra) {
    note((const char *)f, config->grid_x, parameters);
    return 0;
}
#pragma GCC diagnostic pop

void cuda_record_begin(struct cuda_record *r, struct cuda_driver *d) {
#define FIELD(field, symbol, parameters) .field = accept_##field,
    *d = (struct cuda_driver){CUDA_DRIVER_MAP(FIELD)};
#undef FIELD
    d->context_retain = new_context;
    d->module_function = function_of;
    d->memory_info = all_free;
    d->memory_new = new_memory;
    d->host_new = new_host;
    d->host_free = free_host;
    d->to_host = fill_host;
    d->stream_wait = wait_stream;
    d->event_wait = wait_event;
    d->occupancy = one_block;
    d->launch = note_launch;
    d->launch_with = note_launch_with;
    r->next = CUDA_ALIGN;
    record = r;
}

void cuda_record_end(void) {
    record = NULL;
}

/* A driver without a card, for tests of the host part: the program finds its functions in itself
 * (linked with -rdynamic; cuda_driver_open_from(NULL)). Memory is the program's own and counted,
 * kernels are noted and not run, and any call can be made to fail. With it comes a table of
 * embedded kernels whose images are names. */
#ifndef TESTS_CUDA_FAKE_H
#define TESTS_CUDA_FAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels/decode.h"

enum { OUT_OF_MEMORY = 2, NO_DEVICE = 100, NO_BINARY = 209, NEW_PTX = 222, LAUNCH_FAILED = 719 };

static struct card {
    /* what it is */
    int version, devices, capability, init;
    size_t memory;         /* bytes, free at first */
    size_t context;        /* bytes of them that a context takes */
    size_t refuse;         /* an allocation of so many bytes fails */
    const char *no_module; /* begin of the names of kernel files that do not load: with */
    int module_error;
    long fail_at; /* number of the call that fails, 0: none; with */
    int fail_with;
    bool stays_failed; /* and so do all after it */
    long wait_ms;      /* that the work queued on a stream takes */
    /* what became of it */
    atomic_long calls;
    atomic_long live;    /* allocations, streams, events, modules, contexts */
    atomic_size_t taken; /* bytes of device memory */
    long launches;
    char kernel[64]; /* launched last */
    char names[256][64];
    int n_names;
    size_t stack;  /* of a thread, as set last */
    uint64_t mask; /* what `candidates` was last told */
} card;

/* The card that everything works on; what it holds already stays counted. */
static inline void card_reset(void) {
    card.version = 13000, card.devices = 1, card.capability = 90, card.init = 0;
    card.memory = (size_t)4 << 30, card.context = 0, card.refuse = 0;
    card.no_module = NULL, card.fail_at = 0, card.stays_failed = false, card.wait_ms = 0;
    atomic_store(&card.calls, 0);
    card.launches = 0, card.mask = 0, card.stack = 1024;
}

struct embedded {
    const char *shape, *file;
    const void *image;
};
extern struct embedded cuda_embedded[];
#define FAKE_FILE(name)                                                                            \
    { "mini", name, name }
struct embedded cuda_embedded[] = {
    FAKE_FILE("portable_attention"), FAKE_FILE("portable_deltanet"),  FAKE_FILE("portable_gemm"),
    FAKE_FILE("portable_matvec"),    FAKE_FILE("portable_moe"),       FAKE_FILE("portable_norm"),
    FAKE_FILE("portable_thin"),      FAKE_FILE("portable_sample"),    FAKE_FILE("portable_small"),
    FAKE_FILE("portable_batch"),     FAKE_FILE("portable_batch_mix"), FAKE_FILE("batch_tiles"),
    FAKE_FILE("decode_step"),        FAKE_FILE("prefill_norm"),       FAKE_FILE("prefill_route"),
    FAKE_FILE("prefill_deltanet"),   FAKE_FILE("prefill_attention"),  FAKE_FILE("prefill_gemm"),
    FAKE_FILE("prefill_small"),      FAKE_FILE("decode_fuse"),        {NULL, NULL, NULL}};

/* Every driver call that can fail begins with this. */
static inline int fake_call(void) {
    long n = atomic_fetch_add(&card.calls, 1) + 1;
    bool fails = card.fail_at && (card.stays_failed ? n >= card.fail_at : n == card.fail_at);
    return fails ? card.fail_with : 0;
}
#define CALL()                                                                                     \
    do {                                                                                           \
        int error_ = fake_call();                                                                  \
        if (error_) return error_;                                                                 \
    } while (0)
#define FAKE __attribute__((visibility("default")))
#define FAKE_FUNCTION(name, ...)                                                                   \
    FAKE int name(__VA_ARGS__);                                                                    \
    FAKE int name(__VA_ARGS__)

/* Something that is to be given back. */
static inline int fake_new(void **out, const char *name) {
    *out = malloc(strlen(name) + 1);
    if (!*out) abort();
    memcpy(*out, name, strlen(name) + 1);
    atomic_fetch_add(&card.live, 1);
    return 0;
}
static inline int fake_free(void *thing) {
    if (!thing) abort();
    free(thing);
    atomic_fetch_sub(&card.live, 1);
    return 0;
}

static inline void fake_wait(void) {
    nanosleep(&(struct timespec){card.wait_ms / 1000, card.wait_ms % 1000 * 1000000}, NULL);
}

/* ---- the driver ------------------------------------------------------------------------------ */

FAKE_FUNCTION(cuInit, unsigned flags) {
    (void)flags;
    return card.init;
}
FAKE_FUNCTION(cuDriverGetVersion, int *version) {
    *version = card.version;
    return 0;
}
FAKE_FUNCTION(cuDeviceGetCount, int *n) {
    CALL();
    *n = card.devices;
    return 0;
}
FAKE_FUNCTION(cuDeviceGet, int *device, int ordinal) {
    CALL();
    *device = ordinal;
    return 0;
}
FAKE_FUNCTION(cuDeviceGetName, char *name, int size, int device) {
    (void)device;
    CALL();
    snprintf(name, (size_t)size, "fake card");
    return 0;
}
FAKE_FUNCTION(cuDeviceTotalMem_v2, size_t *bytes, int device) {
    (void)device;
    CALL();
    *bytes = card.memory;
    return 0;
}
FAKE_FUNCTION(cuDeviceGetAttribute, int *value, int attribute, int device) {
    (void)device;
    CALL();
    *value = attribute == CU_MULTIPROCESSORS          ? 132
             : attribute == CU_MEMORY_KHZ             ? 3201000
             : attribute == CU_MEMORY_BITS            ? 6144
             : attribute == CU_CAPABILITY_MAJOR       ? card.capability / 10
             : attribute == CU_CAPABILITY_MINOR       ? card.capability % 10
             : attribute == CU_SHARED_PER_BLOCK_OPTIN ? 227 << 10
                                                      : 0;
    return 0;
}
FAKE_FUNCTION(cuDevicePrimaryCtxRetain, void **out, int device) {
    (void)device;
    CALL();
    *out = &card;
    atomic_fetch_add(&card.live, 1);
    atomic_fetch_add(&card.taken, card.context);
    return 0;
}
FAKE_FUNCTION(cuDevicePrimaryCtxRelease_v2, int device) {
    (void)device;
    atomic_fetch_sub(&card.live, 1);
    atomic_fetch_sub(&card.taken, card.context);
    return 0;
}
FAKE_FUNCTION(cuCtxSetCurrent, void *context) {
    (void)context;
    CALL();
    return 0;
}
FAKE_FUNCTION(cuCtxSetLimit, int limit, size_t value) {
    CALL();
    if (limit == CU_LIMIT_STACK) card.stack = value;
    return 0;
}
FAKE_FUNCTION(cuGetErrorName, int error, const char **text) {
    *text = error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
    return 0;
}
FAKE_FUNCTION(cuGetErrorString, int error, const char **text) {
    *text = error == LAUNCH_FAILED ? "unspecified launch failure" : NULL;
    return 0;
}
FAKE_FUNCTION(cuModuleLoadData, void **module, const void *image) {
    CALL();
    const char *name = image;
    if (card.no_module && strncmp(name, card.no_module, strlen(card.no_module)) == 0) {
        return card.module_error;
    }
    return fake_new(module, name);
}
FAKE_FUNCTION(cuModuleUnload, void *module) {
    return fake_free(module);
}
/* A kernel is its name, kept for good. */
FAKE_FUNCTION(cuModuleGetFunction, void **out, void *module, const char *name) {
    (void)module;
    CALL();
    int i = 0;
    while (i < card.n_names && strcmp(card.names[i], name) != 0) i++;
    if (i == 256) abort();
    if (i == card.n_names) snprintf(card.names[card.n_names++], sizeof card.names[0], "%s", name);
    *out = card.names[i];
    return 0;
}
FAKE_FUNCTION(cuFuncSetAttribute, void *f, int attribute, int value) {
    (void)f, (void)attribute, (void)value;
    CALL();
    return 0;
}
/* One kernel has a large stack, as on a card. */
FAKE_FUNCTION(cuFuncGetAttribute, int *value, int attribute, void *f) {
    CALL();
    *value = attribute == CU_FUNC_LOCAL_BYTES ? strcmp(f, "pick") == 0 ? 256 : 32 : 0;
    return 0;
}
FAKE_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *n, void *f, int threads, size_t b) {
    (void)f, (void)threads, (void)b;
    *n = 1;
    return 0;
}
FAKE_FUNCTION(cuMemGetInfo_v2, size_t *available, size_t *total) {
    CALL();
    *total = card.memory;
    *available = card.memory - atomic_load(&card.taken);
    return 0;
}
/* Sizes stand before what is given out. */
FAKE_FUNCTION(cuMemAlloc_v2, uint64_t *out, size_t bytes) {
    CALL();
    if (bytes == card.refuse || bytes > card.memory - atomic_load(&card.taken)) {
        return OUT_OF_MEMORY;
    }
    char *p = aligned_alloc(256, 256 + (bytes + 255) / 256 * 256);
    if (!p) abort();
    memcpy(p, &bytes, sizeof bytes);
    memset(p + 256, 0, bytes);
    *out = (uint64_t)(uintptr_t)(p + 256);
    atomic_fetch_add(&card.taken, bytes);
    atomic_fetch_add(&card.live, 1);
    return 0;
}
FAKE_FUNCTION(cuMemFree_v2, uint64_t memory) {
    size_t bytes;
    char *p = (char *)(uintptr_t)memory - 256;
    memcpy(&bytes, p, sizeof bytes);
    atomic_fetch_sub(&card.taken, bytes);
    return fake_free(p);
}
FAKE_FUNCTION(cuMemHostAlloc, void **out, size_t bytes, unsigned flags) {
    (void)flags;
    CALL();
    *out = calloc(1, bytes);
    if (!*out) abort();
    atomic_fetch_add(&card.live, 1);
    return 0;
}
FAKE_FUNCTION(cuMemFreeHost, void *memory) {
    return fake_free(memory);
}
FAKE_FUNCTION(cuMemcpyHtoDAsync_v2, uint64_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    CALL();
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}
FAKE_FUNCTION(cuMemcpyDtoHAsync_v2, void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    CALL();
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
FAKE_FUNCTION(cuMemcpyDtoDAsync_v2, uint64_t to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    CALL();
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return 0;
}
FAKE_FUNCTION(cuMemsetD8Async, uint64_t to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    CALL();
    memset((void *)(uintptr_t)to, value, bytes);
    return 0;
}
FAKE_FUNCTION(cuStreamCreate, void **out, unsigned flags) {
    (void)flags;
    CALL();
    return fake_new(out, "stream");
}
FAKE_FUNCTION(cuStreamDestroy_v2, void *stream) {
    return fake_free(stream);
}
FAKE_FUNCTION(cuStreamSynchronize, void *stream) {
    (void)stream;
    CALL();
    fake_wait();
    return 0;
}
FAKE_FUNCTION(cuEventCreate, void **out, unsigned flags) {
    (void)flags;
    CALL();
    return fake_new(out, "event");
}
FAKE_FUNCTION(cuEventDestroy_v2, void *event) {
    return fake_free(event);
}
FAKE_FUNCTION(cuEventRecord, void *event, void *stream) {
    (void)event, (void)stream;
    CALL();
    return 0;
}
FAKE_FUNCTION(cuEventSynchronize, void *event) {
    (void)event;
    CALL();
    fake_wait();
    return 0;
}
/* Steps pick token 0 from values that are finite. */
static inline void fake_results(uint64_t address, unsigned n) {
    struct cuda_result *results = (struct cuda_result *)(uintptr_t)address;
    for (unsigned i = 0; i < n; i++) results[i] = (struct cuda_result){.token = 0, .finite = 1};
}

static inline int fake_launch(void *f, unsigned grid_x, void **arguments) {
    CALL();
    card.launches++;
    snprintf(card.kernel, sizeof card.kernel, "%s", (const char *)f);
    if (strcmp(card.kernel, "candidates") == 0) memcpy(&card.mask, arguments[3], sizeof card.mask);
    if (strcmp(card.kernel, "pick") == 0) fake_results(*(uint64_t *)arguments[3], grid_x);
    if (strcmp(card.kernel, "decode_step") == 0) {
        fake_results(((const struct decode_args *)arguments[0])->result, 1);
    }
    return 0;
}
FAKE_FUNCTION(cuLaunchKernel, void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
              unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments,
              void **extra) {
    (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    return fake_launch(f, gx, arguments);
}
FAKE_FUNCTION(cuLaunchKernelEx, const CUlaunchConfig *config, void *f, void **arguments,
              void **extra) {
    (void)extra;
    return fake_launch(f, config->grid_x, arguments);
}

#endif

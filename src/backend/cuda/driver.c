/* libcuda.so.1, which comes with the NVIDIA driver and not with the toolkit. */
#include "backend/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum { MIN_VERSION = 13000 }; /* of the toolkit that compiles the kernels */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cuda_driver driver;
static bool opened;

static int load(const char *library, struct cuda_driver *d, lily_err *err) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        return ERR(
            err, LILY_EBACKEND,
            "CUDA: found no %s, expected the NVIDIA driver; install it where there is such a "
            "GPU, or use the CPU backend",
            library);
    }
    const char *missing = NULL;
    /* POSIX promises that an object pointer holds a function's address; C does not. */
#define LOAD(field, symbol, parameters)                                                            \
    {                                                                                              \
        void *address = dlsym(handle, symbol);                                                     \
        if (!address && !missing) missing = symbol;                                                \
        memcpy(&d->field, &address, sizeof address);                                               \
    }
    CUDA_DRIVER_MAP(LOAD)
#undef LOAD
    if (missing) {
        dlclose(handle);
        return ERR(err, LILY_EBACKEND,
                   "CUDA: found %s without %s, expected a driver for CUDA %d.%d or newer; update "
                   "the NVIDIA driver",
                   library, missing, MIN_VERSION / 1000, MIN_VERSION % 1000 / 10);
    }
    return LILY_OK;
}

/* The version is known without a device; cuInit fails where there is none. */
static int check(struct cuda_driver *d, lily_err *err) {
    int rc = cuda_check(d, d->driver_version(&d->version), "driver version", err);
    if (rc != LILY_OK) return rc;
    if (d->version < MIN_VERSION) {
        return ERR(
            err, LILY_EBACKEND,
            "CUDA: found a driver for CUDA %d.%d, expected %d.%d or newer; update the NVIDIA "
            "driver (580 or newer)",
            d->version / 1000, d->version % 1000 / 10, MIN_VERSION / 1000, MIN_VERSION % 1000 / 10);
    }
    return cuda_check(d, d->init(0), "initialisation", err);
}

const struct cuda_driver *cuda_driver_open_from(const char *library, lily_err *err) {
    pthread_mutex_lock(&lock);
    if (!opened) {
        struct cuda_driver d = {0};
        int rc = load(library, &d, err);
        if (rc == LILY_OK) rc = check(&d, err);
        if (rc == LILY_OK) driver = d;
        opened = rc == LILY_OK;
    }
    bool usable = opened;
    pthread_mutex_unlock(&lock);
    return usable ? &driver : NULL;
}

const struct cuda_driver *cuda_driver_open(lily_err *err) {
    return cuda_driver_open_from("libcuda.so.1", err);
}

int cuda_check(const struct cuda_driver *d, CUresult result, const char *what, lily_err *err) {
    if (result == 0) return LILY_OK;
    const char *name = NULL, *text = NULL;
    d->error_name(result, &name);
    d->error_text(result, &text);
    if (!name) name = "unknown";
    if (!text) text = "no description";
    switch (result) {
    case CU_ERROR_OUT_OF_MEMORY:
        return ERR(err, LILY_ENOMEM,
                   "CUDA %s: found too little device memory; ask for a shorter context or fewer "
                   "sessions, or close other programs on this GPU (nvidia-smi lists them)",
                   what);
    case CU_ERROR_NO_DEVICE:
        return ERR(err, LILY_EBACKEND,
                   "CUDA %s: found no GPU, expected one that the driver shows; check "
                   "nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU backend",
                   what);
    case CU_ERROR_NO_BINARY:
        return ERR(err, LILY_EBACKEND,
                   "CUDA %s: found no kernels for this GPU in the program, expected some; "
                   "build with `make release`, or use the CPU backend",
                   what);
    case CU_ERROR_NEW_PTX:
        return ERR(err, LILY_EBACKEND,
                   "CUDA %s: found kernels that the driver is too old to compile; update the "
                   "NVIDIA driver, or build with `make release`",
                   what);
    case CU_ERROR_MISMATCH:
        return ERR(err, LILY_EBACKEND,
                   "CUDA %s: found a driver library unlike the driver that runs; restart the "
                   "machine after an update of the NVIDIA driver",
                   what);
    default:
        return ERR(err, LILY_EBACKEND,
                   "CUDA %s: found error %d (%s: %s), expected success; restart, and use the CPU "
                   "backend if it repeats",
                   what, result, name, text);
    }
}

/* The part of the CUDA driver API that is used, declared here and found at run time, so that one
 * binary runs with and without a GPU and needs no toolkit to build. Names and signatures are those
 * of the CUDA Driver API reference (13.0); every function is there since 11.0 or named otherwise.
 */
#ifndef LILY_CUDA_DRIVER_H
#define LILY_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef uint64_t CUdeviceptr;
typedef int CUdevice;
typedef int CUresult; /* 0: success */
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

enum { /* CUdevice_attribute */
       CU_SHARED_PER_BLOCK_OPTIN = 97,
       CU_MULTIPROCESSORS = 16,
       CU_MEMORY_KHZ = 36,
       CU_MEMORY_BITS = 37,
       CU_CAPABILITY_MAJOR = 75,
       CU_CAPABILITY_MINOR = 76,
       /* CUlimit */
       CU_LIMIT_STACK = 0,
       /* CUfunction_attribute */
       CU_FUNC_LOCAL_BYTES = 3, /* a thread's stack */
       CU_FUNC_MAX_DYNAMIC_SHARED = 8,
       CU_FUNC_CARVEOUT = 9, /* preferred share of shared memory, in percent */
       /* CUresult values that are told apart */
       CU_ERROR_OUT_OF_MEMORY = 2,
       CU_ERROR_NO_DEVICE = 100,
       CU_ERROR_NO_BINARY = 209,
       CU_ERROR_NEW_PTX = 222,
       CU_ERROR_MISMATCH = 803,
       /* flags */
       CU_STREAM_NON_BLOCKING = 1,
       CU_LAUNCH_COOPERATIVE = 2,  /* CUlaunchAttributeID: all blocks run at once, or none */
       CU_LAUNCH_PROGRAMMATIC = 6, /* the same: may begin before its predecessor ends */
       CU_EVENT_DISABLE_TIMING = 2,
       CU_HOST_PORTABLE = 1
};

/* Launches with attributes (since 11.8). */
typedef struct {
    int id;
    int reserved;
    union {
        int number;
        uint64_t room[8];
    } value;
} CUlaunchAttribute;
typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned n_attributes;
} CUlaunchConfig;

/* return type, name in the table, symbol, parameters */
#define CUDA_DRIVER_MAP(XX)                                                                        \
    XX(init, "cuInit", (unsigned flags))                                                           \
    XX(driver_version, "cuDriverGetVersion", (int *version))                                       \
    XX(device_count, "cuDeviceGetCount", (int *count))                                             \
    XX(device_get, "cuDeviceGet", (CUdevice * device, int ordinal))                                \
    XX(device_name, "cuDeviceGetName", (char *name, int size, CUdevice device))                    \
    XX(device_memory, "cuDeviceTotalMem_v2", (size_t * bytes, CUdevice device))                    \
    XX(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))     \
    XX(context_retain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))         \
    XX(context_release, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                         \
    XX(context_set, "cuCtxSetCurrent", (CUcontext context))                                        \
    XX(context_limit, "cuCtxSetLimit", (int limit, size_t value))                                  \
    XX(error_name, "cuGetErrorName", (CUresult error, const char **text))                          \
    XX(error_text, "cuGetErrorString", (CUresult error, const char **text))                        \
    XX(module_load, "cuModuleLoadData", (CUmodule * module, const void *image))                    \
    XX(module_unload, "cuModuleUnload", (CUmodule module))                                         \
    XX(module_function, "cuModuleGetFunction",                                                     \
       (CUfunction * function, CUmodule module, const char *name))                                 \
    XX(func_set, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))            \
    XX(func_get, "cuFuncGetAttribute", (int *value, int attribute, CUfunction function))           \
    XX(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                                   \
       (int *blocks, CUfunction function, int threads, size_t shared))                             \
    XX(memory_info, "cuMemGetInfo_v2", (size_t * free, size_t * total))                            \
    XX(memory_new, "cuMemAlloc_v2", (CUdeviceptr * out, size_t bytes))                             \
    XX(memory_free, "cuMemFree_v2", (CUdeviceptr memory))                                          \
    XX(host_new, "cuMemHostAlloc", (void **out, size_t bytes, unsigned flags))                     \
    XX(host_free, "cuMemFreeHost", (void *memory))                                                 \
    XX(to_device, "cuMemcpyHtoDAsync_v2",                                                          \
       (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                          \
    XX(to_host, "cuMemcpyDtoHAsync_v2",                                                            \
       (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                                \
    XX(on_device, "cuMemcpyDtoDAsync_v2",                                                          \
       (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                          \
    XX(fill8, "cuMemsetD8Async",                                                                   \
       (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                       \
    XX(stream_new, "cuStreamCreate", (CUstream * out, unsigned flags))                             \
    XX(stream_free, "cuStreamDestroy_v2", (CUstream stream))                                       \
    XX(stream_wait, "cuStreamSynchronize", (CUstream stream))                                      \
    XX(event_new, "cuEventCreate", (CUevent * out, unsigned flags))                                \
    XX(event_free, "cuEventDestroy_v2", (CUevent event))                                           \
    XX(event_record, "cuEventRecord", (CUevent event, CUstream stream))                            \
    XX(event_wait, "cuEventSynchronize", (CUevent event))                                          \
    XX(launch, "cuLaunchKernel",                                                                   \
       (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,   \
        void **extra))                                                                             \
    XX(launch_with, "cuLaunchKernelEx",                                                            \
       (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))

struct cuda_driver {
#define CUDA_DRIVER_FIELD(field, symbol, parameters) CUresult(*field) parameters;
    CUDA_DRIVER_MAP(CUDA_DRIVER_FIELD)
#undef CUDA_DRIVER_FIELD
    int version; /* 13000: 13.0 */
};

/* The driver, opened once per process and never closed; NULL with err filled when there is none, it
 * lacks a function or is older than the kernels need. */
const struct cuda_driver *cuda_driver_open(lily_err *err);
/* The same from another library, before anything else asked for the driver (tests). */
const struct cuda_driver *cuda_driver_open_from(const char *library, lily_err *err);

/* LILY_OK, or the error of a driver call: "<what>: cuda error 700 (...): ...; <remedy>". Out of
 * memory is LILY_ENOMEM, everything else LILY_EBACKEND. */
int cuda_check(const struct cuda_driver *d, CUresult result, const char *what, lily_err *err);

#endif

/* The Metal device: what it is and can hold, its queue, and the pipelines of every kernel compiled
 * for one shape. Nothing else of the backend makes libraries or pipelines. */
#ifndef LILY_METAL_DEVICE_H
#define LILY_METAL_DEVICE_H

#include "backend/metal/kernels.h"
#include "backend/metal/mtl.h"
#include "base/err.h"
#include "model/shape.h"

struct metal_device {
    id device, queue; /* owned */
    char name[64];
    uint64_t memory;            /* bytes installed in the machine */
    uint64_t working_set;       /* bytes the GPU may keep resident */
    uint64_t max_buffer;        /* bytes of one buffer */
    int32_t family;             /* of Apple's GPUs: 7 is M1, 9 is M3 and M4, 10 is M5 */
    bool metal4;                /* the system has Metal 4 */
    id pipeline[METAL_KERNELS]; /* owned; all set after metal_device_compile */
};

/* Fills name and limits; LILY_EBACKEND with the reason when there is no device that will do. The
 * caller ends *out with metal_device_close. */
int metal_device_open(struct metal_device *out, lily_err *err);
void metal_device_close(struct metal_device *d); /* a zeroed one is fine */

/* Compiles every kernel for the shape, and checks that each pipeline takes the threads it is given.
 * A message of the compiler names file and line. */
int metal_device_compile(struct metal_device *d, const struct shape *shape, lily_err *err);

/* Its parts: the library of one file in a language version, and one of its kernels, which takes so
 * many threads. Both are the caller's to release. An autorelease pool is in place. */
int metal_device_library(const struct metal_device *d, const char *file, NSUInteger version,
                         const struct shape *shape, id *out, lily_err *err);
int metal_device_pipeline(const struct metal_device *d, id library, const char *name,
                          uint32_t threads, id *out, lily_err *err);

/* A new queue in the place of one that an error may have spoilt. Nothing is in flight. */
int metal_device_new_queue(struct metal_device *d, lily_err *err);

#endif

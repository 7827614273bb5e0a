#include "backend/metal/device.h"

#include <stdio.h>
#include <string.h>

#include "backend/metal/pressure.h"
#include "backend/metal/source.h"

/* ---- the device ------------------------------------------------------------------------------ */

static int32_t apple_family(id device) {
    int32_t found = 0;
    for (int32_t family = 7; family <= 15; family++) {
        if (mtl_device_supports_family(device, 1000 + family)) found = family;
    }
    return found;
}

/* simdgroup_matrix and bfloat need the first Apple silicon Mac. */
static int check_family(const struct metal_device *d, lily_err *err) {
    if (d->family >= 7) return LILY_OK;
    return ERR(err, LILY_EBACKEND,
               "Metal: found the GPU \"%s\", expected Apple silicon (M1 or newer); use the cpu "
               "backend",
               d->name);
}

int metal_device_open(struct metal_device *out, lily_err *err) {
    *out = (struct metal_device){.device = MTLCreateSystemDefaultDevice()};
    if (!out->device) {
        return ERR(err, LILY_EBACKEND,
                   "Metal: found no device, expected a GPU; a process without a window session "
                   "(ssh, launchd) may see none: log in at the machine, or use the cpu backend");
    }
    const char *name = mtl_device_name(out->device);
    snprintf(out->name, sizeof out->name, "%s", name ? name : "GPU");
    out->memory = metal_machine_memory();
    out->working_set = mtl_device_recommended_working_set(out->device);
    out->max_buffer = mtl_device_max_buffer_length(out->device);
    out->family = apple_family(out->device);
    out->metal4 = mtl_device_supports_family(out->device, MTLGPUFamilyMetal4);
    int rc = check_family(out, err);
    if (rc == LILY_OK) rc = metal_device_new_queue(out, err);
    if (rc != LILY_OK) metal_device_close(out);
    return rc;
}

void metal_device_close(struct metal_device *d) {
    for (int32_t i = 0; i < METAL_KERNELS; i++) objc_release(d->pipeline[i]);
    objc_release(d->queue);
    objc_release(d->device);
    *d = (struct metal_device){0};
}

int metal_device_new_queue(struct metal_device *d, lily_err *err) {
    objc_release(d->queue);
    d->queue = mtl_new_queue(d->device);
    if (d->queue) return LILY_OK;
    return ERR(err, LILY_EBACKEND,
               "Metal: found no command queue, expected one; restart the program, and the machine "
               "if that does not help");
}

/* ---- libraries ------------------------------------------------------------------------------- */

/* The first line of the compiler's complaint: the rest is notes and carets. */
static int compile_error(const char *file, id error, lily_err *err) {
    const char *text = ns_error_text(error);
    return ERR(err, LILY_EBACKEND,
               "%s: found an error of Metal's compiler, expected none: %.300s; report it with the "
               "macOS version, or use the cpu backend",
               file, text ? text : "no text");
}

/* The library of one file, the caller's to release. */
static int new_library(struct metal_device *d, const char *file, const struct shape *shape,
                       id *library, lily_err *err) {
    struct buf text = {0};
    int rc = metal_source_library(file, shape, &text, err);
    id error = NULL, options = mtl_new_compile_options();
    if (rc == LILY_OK) {
        /* bfloat needs 3.1; sums and comparisons are to mean what they say, so no fast math. */
        mtl_options_set_language_version(options, MTLLanguageVersion3_1);
        if (objc_responds(options, "setMathMode:")) {
            mtl_options_set_math_mode(options, MTLMathModeSafe);
        } else {
            mtl_options_set_fast_math(options, false);
        }
        *library = mtl_new_library(d->device, ns_string(text.data), options, &error);
        if (!*library) rc = compile_error(file, error, err);
    }
    objc_release(options);
    buf_free(&text);
    return rc;
}

static int check_pipeline(const struct metal_kernel *k, uint32_t needed, id pipeline,
                          lily_err *err) {
    NSUInteger threads = mtl_pipeline_max_threads(pipeline);
    NSUInteger width = mtl_pipeline_simd_width(pipeline);
    if (threads >= needed && width == 32) return LILY_OK;
    return ERR(err, LILY_EBACKEND,
               "%s: found %lu threads of simdgroups of %lu, expected %u of 32; report it with the "
               "machine's name, or use the cpu backend",
               k->name, threads, width, needed);
}

static int new_pipeline(struct metal_device *d, id library, int32_t kernel,
                        const struct shape *shape, lily_err *err) {
    const struct metal_kernel *k = &metal_kernels[kernel];
    id error = NULL, function = mtl_new_function(library, ns_string(k->name));
    if (!function) {
        return ERR(err, LILY_EBACKEND, "%s: found no kernel %s, expected one; build again", k->file,
                   k->name);
    }
    d->pipeline[kernel] = mtl_new_pipeline(d->device, function, &error);
    objc_release(function);
    if (!d->pipeline[kernel]) return compile_error(k->name, error, err);
    return check_pipeline(k, metal_kernel_threads(kernel, shape), d->pipeline[kernel], err);
}

/* Kernels of one file follow each other in the table. */
int metal_device_compile(struct metal_device *d, const struct shape *shape, lily_err *err) {
    int rc = LILY_OK;
    for (int32_t i = 0; i < METAL_KERNELS && rc == LILY_OK;) {
        const char *file = metal_kernels[i].file;
        void *pool = objc_autoreleasePoolPush();
        id library = NULL;
        rc = new_library(d, file, shape, &library, err);
        for (; i < METAL_KERNELS && strcmp(metal_kernels[i].file, file) == 0; i++) {
            if (rc == LILY_OK) rc = new_pipeline(d, library, i, shape, err);
        }
        objc_release(library);
        objc_autoreleasePoolPop(pool);
    }
    return rc;
}

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

/* As much of the compiler's complaint as leaves room for what to do: its first lines name the
 * place. */
static int compile_error(const char *file, id error, lily_err *err) {
    const char *text = ns_error_text(error);
    return ERR(err, LILY_EBACKEND,
               "%s: found an error of Metal's compiler, expected none: %.300s; report it with the "
               "macOS version, or use the cpu backend",
               file, text ? text : "no text");
}

/* Sums and comparisons mean what they say, and exp, sqrt and the like are the precise ones. Before
 * macOS 15 one switch stands for both. */
static void set_math(id options) {
    if (!objc_responds(options, "setMathMode:")) {
        mtl_options_set_fast_math(options, false);
        return;
    }
    mtl_options_set_math_mode(options, MTLMathModeSafe);
    if (objc_responds(options, "setMathFloatingPointFunctions:")) {
        mtl_options_set_math_functions(options, MTLMathFloatingPointFunctionsPrecise);
    }
}

static int compile_text(const struct metal_device *d, const char *file, const char *text,
                        NSUInteger version, id *out, lily_err *err) {
    id error = NULL, source = ns_string(text), options = mtl_new_compile_options();
    int rc = LILY_OK;
    if (!source || !options) { /* without options Metal would take its own, which are fast */
        rc = ERR(err, LILY_EBACKEND,
                 "%s: found no %s, expected an object of Foundation or Metal; restart the program, "
                 "or use the cpu backend",
                 file, source ? "compile options" : "text in UTF-8");
    } else {
        mtl_options_set_language_version(options, version);
        set_math(options);
        *out = mtl_new_library(d->device, source, options, &error);
        if (!*out) rc = compile_error(file, error, err);
    }
    objc_release(options);
    return rc;
}

int metal_device_library(const struct metal_device *d, const char *file, NSUInteger version,
                         const struct shape *shape, id *out, lily_err *err) {
    struct buf text = {0};
    int rc = metal_source_library(file, shape, &text, err);
    if (rc == LILY_OK) rc = compile_text(d, file, text.data, version, out, err);
    buf_free(&text);
    return rc;
}

static int check_pipeline(const char *name, uint32_t needed, id pipeline, lily_err *err) {
    NSUInteger threads = mtl_pipeline_max_threads(pipeline);
    NSUInteger width = mtl_pipeline_simd_width(pipeline);
    if (threads >= needed && width == 32) return LILY_OK;
    return ERR(err, LILY_EBACKEND,
               "%s: found %lu threads of simdgroups of %lu, expected %u of 32; report it with the "
               "machine's name, or use the cpu backend",
               name, threads, width, needed);
}

int metal_device_pipeline(const struct metal_device *d, id library, const char *name,
                          uint32_t threads, id *out, lily_err *err) {
    id error = NULL, function = mtl_new_function(library, ns_string(name));
    if (!function) {
        return ERR(err, LILY_EBACKEND, "%s: found no such kernel, expected one; build again", name);
    }
    *out = mtl_new_pipeline(d->device, function, &error);
    objc_release(function);
    return *out ? check_pipeline(name, threads, *out, err) : compile_error(name, error, err);
}

/* Kernels of one file follow each other in the table. bfloat needs version 3.1. */
int metal_device_compile(struct metal_device *d, const struct shape *shape, lily_err *err) {
    int rc = LILY_OK;
    for (int32_t i = 0; i < METAL_KERNELS && rc == LILY_OK;) {
        const char *file = metal_kernels[i].file;
        void *pool = objc_autoreleasePoolPush();
        id library = NULL;
        rc = metal_device_library(d, file, MTLLanguageVersion3_1, shape, &library, err);
        for (; i < METAL_KERNELS && strcmp(metal_kernels[i].file, file) == 0; i++) {
            if (rc != LILY_OK) continue;
            rc = metal_device_pipeline(d, library, metal_kernels[i].name,
                                       metal_kernel_threads(i, shape), &d->pipeline[i], err);
        }
        objc_release(library);
        objc_autoreleasePoolPop(pool);
    }
    return rc;
}

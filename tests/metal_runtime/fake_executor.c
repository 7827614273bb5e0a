/* An executor with two kernels written in C, so that the runtime is tested without a compiler.
 *
 *   copy(device const float *from [[buffer(0)]], device float *to [[buffer(1)]],
 *        constant copy_args &args [[buffer(2)]]): to[first .. first + count) = from[the same]
 *   scale(device float *x [[buffer(0)]], constant uint &count [[buffer(1)]],
 *         threadgroup float *scratch [[threadgroup(0)]]): x[i] *= function constant 0
 *
 * A source that contains "broken" does not compile. Exact bytes are reported, as by the real one,
 * and a copy beyond its target is a fault. */
#include "fake_executor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct msl_library {
    bool checked;
};

struct msl_pipeline {
    const msl_kernel *kernel;
    float factor;
};

struct report { /* a report and the memory that it points to */
    msl_report report;
    msl_usage usage[2];
    msl_range read, written;
    msl_fault fault;
};

static const msl_binding copy_bindings[] = {
    {MSL_BIND_DEVICE, MSL_READ, 0, 4, false, "from"},
    {MSL_BIND_DEVICE, MSL_READ_WRITE, 1, 4, false, "to"},
    {MSL_BIND_CONSTANT, MSL_READ, 2, sizeof(struct copy_args), true, "args"},
};
static const msl_binding scale_bindings[] = {
    {MSL_BIND_DEVICE, MSL_READ_WRITE, 0, 4, false, "x"},
    {MSL_BIND_CONSTANT, MSL_READ, 1, 4, true, "count"},
    {MSL_BIND_THREADGROUP, MSL_READ_WRITE, 0, 4, false, "scratch"},
};
static const msl_kernel kernels[] = {
    {"copy", copy_bindings, 3, 1024},
    {"scale", scale_bindings, 3, 512},
};

char fake_order[256];

int msl_library_compile(const char *source, const msl_compile_options *options,
                        msl_library **library, char *msg) {
    if (strstr(source, "broken")) {
        snprintf(msg, MSL_MESSAGE_MAX, "line 1: broken");
        return -1;
    }
    *library = calloc(1, sizeof **library);
    (*library)->checked = options->checked;
    return 0;
}

void msl_library_free(msl_library *library) {
    free(library);
}

const msl_kernel *msl_library_find(const msl_library *library, const char *name) {
    (void)library;
    for (size_t i = 0; i < 2; i++) {
        if (strcmp(kernels[i].name, name) == 0) return &kernels[i];
    }
    return NULL;
}

int msl_pipeline_create(msl_library *library, const char *kernel, const msl_constant_value *values,
                        size_t count, msl_pipeline **pipeline, char *msg) {
    if (count > 0 && values[0].size != 4) {
        snprintf(msg, MSL_MESSAGE_MAX, "constant 0: %u bytes, expected 4", values[0].size);
        return -1;
    }
    *pipeline = calloc(1, sizeof **pipeline);
    (*pipeline)->kernel = msl_library_find(library, kernel);
    (*pipeline)->factor = 1;
    if (count > 0) memcpy(&(*pipeline)->factor, values[0].value, 4);
    return 0;
}

void msl_pipeline_free(msl_pipeline *pipeline) {
    free(pipeline);
}

static void note_order(char letter) {
    size_t n = strlen(fake_order);
    if (n + 1 < sizeof fake_order) fake_order[n] = letter;
}

static void run_copy(const msl_dispatch *d, struct report *r) {
    struct copy_args args;
    memcpy(&args, (char *)d->buffers[2].base + d->buffers[2].offset, sizeof args);
    size_t at = 4 * (size_t)args.first, bytes = 4 * (size_t)args.count;
    if (d->buffers[1].offset + at + bytes > d->buffers[1].length) {
        r->fault = (msl_fault){.kind = MSL_FAULT_OUT_OF_BOUNDS, .text = "copy"};
        r->report.faults = &r->fault;
        r->report.fault_count = 1;
        return;
    }
    memmove((char *)d->buffers[1].base + d->buffers[1].offset + at,
            (char *)d->buffers[0].base + d->buffers[0].offset + at, bytes);
    r->read = (msl_range){d->buffers[0].offset + at, d->buffers[0].offset + at + bytes};
    r->written = (msl_range){d->buffers[1].offset + at, d->buffers[1].offset + at + bytes};
    r->usage[0] = (msl_usage){.index = 0, .read = &r->read, .read_count = 1, .unique_read = bytes};
    r->usage[1] = (msl_usage){
        .index = 1, .written = &r->written, .written_count = 1, .unique_written = bytes};
    r->report.usage_count = 2;
    note_order((char)('a' + args.first));
}

static void run_scale(const msl_pipeline *p, const msl_dispatch *d, struct report *r) {
    uint32_t count;
    memcpy(&count, (char *)d->buffers[1].base + d->buffers[1].offset, 4);
    float *x = (float *)((char *)d->buffers[0].base + d->buffers[0].offset);
    for (uint32_t i = 0; i < count; i++) x[i] *= p->factor;
    r->read = (msl_range){d->buffers[0].offset, d->buffers[0].offset + 4 * (size_t)count};
    r->usage[0] = (msl_usage){.index = 0,
                              .read = &r->read,
                              .read_count = 1,
                              .written = &r->read,
                              .written_count = 1,
                              .unique_read = 4 * (uint64_t)count,
                              .unique_written = 4 * (uint64_t)count};
    r->report.usage_count = 1;
    note_order('s');
}

int msl_dispatch_run(msl_pipeline *pipeline, const msl_dispatch *dispatch, msl_report **report,
                     char *msg) {
    (void)msg;
    struct report *r = calloc(1, sizeof *r);
    r->report.usage = r->usage;
    r->report.threads = (uint64_t)dispatch->grid.x * dispatch->grid.y * dispatch->grid.z;
    if (pipeline->kernel == &kernels[0]) {
        run_copy(dispatch, r);
    } else {
        run_scale(pipeline, dispatch, r);
    }
    *report = &r->report;
    return 0;
}

void msl_report_free(msl_report *report) {
    free(report); /* the first member of struct report */
}

const char *msl_fault_name(msl_fault_kind kind) {
    return kind == MSL_FAULT_OUT_OF_BOUNDS ? "out of bounds" : "another fault";
}

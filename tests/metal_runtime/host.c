#include "host.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct host *host;

static id new_pipeline(struct host *h, const char *name, id constants) {
    id error = NULL;
    id function = mtl_new_function_specialised(h->library, ns_string(name), constants, &error);
    assert_non_null(function);
    id pipeline = mtl_new_pipeline(h->device, function, &error);
    assert_non_null(pipeline);
    objc_release(function);
    return pipeline;
}

static id safe_options(NSUInteger version) {
    id options = mtl_new_compile_options();
    mtl_options_set_language_version(options, version);
    mtl_options_set_math_mode(options, MTLMathModeSafe);
    mtl_options_set_math_functions(options, MTLMathFloatingPointFunctionsPrecise);
    return options;
}

struct host *host_open(const struct metal_emu_options *options) {
    metal_emu_reset();
    metal_emu_configure(options);
    memset(fake_order, 0, sizeof fake_order);
    struct host *h = calloc(1, sizeof *h);
    h->pool = objc_autoreleasePoolPush();
    h->device = MTLCreateSystemDefaultDevice();
    h->queue = mtl_new_queue(h->device);
    id compile = safe_options(MTLLanguageVersion3_1), error = NULL;
    h->library = mtl_new_library(h->device, ns_string("kernels"), compile, &error);
    objc_release(compile);
    id constants = mtl_new_function_constants();
    float factor = 2;
    mtl_constants_set(constants, &factor, MTLDataTypeFloat, 0);
    h->copy = new_pipeline(h, "copy", NULL);
    h->scale = new_pipeline(h, "scale", constants);
    objc_release(constants);
    id *buffers[] = {&h->x, &h->y, &h->z};
    const char *labels[] = {"x", "y", "z"};
    for (size_t i = 0; i < 3; i++) {
        *buffers[i] = mtl_new_buffer(h->device, BYTES, MTLResourceStorageModeShared);
        mtl_set_label(*buffers[i], ns_string(labels[i]));
    }
    float *x = mtl_buffer_contents(h->x);
    for (size_t i = 0; i < FLOATS; i++) x[i] = (float)i;
    return h;
}

void host_close(struct host *h) {
    id owned[] = {h->x, h->y, h->z, h->copy, h->scale, h->library, h->queue, h->device};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) objc_release(owned[i]);
    objc_autoreleasePoolPop(h->pool);
    free(h);
}

int host_setup(void **state) {
    (void)state;
    struct metal_emu_options options = metal_emu_defaults();
    options.quiet = true;
    host = host_open(&options);
    return 0;
}

int host_teardown(void **state) {
    (void)state;
    host_close(host);
    size_t live = metal_emu_live_objects();
    metal_emu_reset();
    return live == 0 ? 0 : -1;
}

void host_begin(struct host *h, NSUInteger dispatch_type) {
    h->commands = mtl_command_buffer(h->queue);
    h->encoder = mtl_compute_encoder(h->commands, dispatch_type);
}

void host_copy(struct host *h, id from, id to, uint32_t first, uint32_t count) {
    struct copy_args args = {first, count};
    mtl_set_pipeline(h->encoder, h->copy);
    mtl_set_buffer(h->encoder, from, 0, 0);
    mtl_set_buffer(h->encoder, to, 0, 1);
    mtl_set_bytes(h->encoder, &args, sizeof args, 2);
    mtl_dispatch(h->encoder, (MTLSize){4, 1, 1}, (MTLSize){256, 1, 1});
}

void host_scale(struct host *h, id buffer, uint32_t count) {
    mtl_set_pipeline(h->encoder, h->scale);
    mtl_set_buffer(h->encoder, buffer, 0, 0);
    mtl_set_bytes(h->encoder, &count, sizeof count, 1);
    mtl_set_threadgroup_memory(h->encoder, 64, 0);
    mtl_dispatch(h->encoder, (MTLSize){1, 1, 1}, (MTLSize){32, 1, 1});
}

void host_commit(struct host *h) {
    mtl_end_encoding(h->encoder);
    mtl_commit(h->commands);
}

void host_run(struct host *h) {
    host_commit(h);
    mtl_wait_completed(h->commands);
}

void expect_findings(enum metal_emu_kind kind, size_t count) {
    for (size_t i = 0; i < metal_emu_finding_count(); i++) {
        if (metal_emu_finding(i)->kind != kind) {
            fail_msg("expected only '%s', found '%s'", metal_emu_kind_name(kind),
                     metal_emu_finding(i)->text);
        }
    }
    assert_int_equal(metal_emu_finding_count(), count);
    metal_emu_reset();
}

void expect_nothing(void) {
    if (metal_emu_finding_count() > 0) fail_msg("found '%s'", metal_emu_finding(0)->text);
}

int in_child(void (*body)(void), char text[4096]) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        signal(SIGSEGV, SIG_DFL); /* not the test framework's, which would go on with the tests */
        body();
        exit(0);
    }
    close(ends[1]);
    size_t n = 0;
    ssize_t got;
    while (n < 4095 && (got = read(ends[0], text + n, 4095 - n)) > 0) n += (size_t)got;
    text[n] = 0;
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int64_t graph_field(const char *name) {
    char *text = metal_emu_graph_json(metal_emu_graph_count() - 1);
    json_t *graph = json_loads(text, 0, NULL);
    assert_non_null(graph);
    int64_t value = json_integer_value(json_object_get(graph, name));
    json_decref(graph);
    free(text);
    return value;
}

int main(void) {
    return run_rule_tests() + run_order_tests() + run_memory_tests();
}

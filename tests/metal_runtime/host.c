#include "host.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static id new_pipeline(struct host *host, const char *name, id constants) {
    id error = NULL;
    id function = mtl_new_function_specialised(host->library, ns_string(name), constants, &error);
    assert_non_null(function);
    id pipeline = mtl_new_pipeline(host->device, function, &error);
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
    struct host *host = calloc(1, sizeof *host);
    host->pool = objc_autoreleasePoolPush();
    host->device = MTLCreateSystemDefaultDevice();
    host->queue = mtl_new_queue(host->device);
    id compile = safe_options(MTLLanguageVersion3_1), error = NULL;
    host->library = mtl_new_library(host->device, ns_string("kernels"), compile, &error);
    objc_release(compile);
    id constants = mtl_new_function_constants();
    float factor = 2;
    mtl_constants_set(constants, &factor, MTLDataTypeFloat, 0);
    host->copy = new_pipeline(host, "copy", NULL);
    host->scale = new_pipeline(host, "scale", constants);
    objc_release(constants);
    id *buffers[] = {&host->x, &host->y, &host->z};
    const char *labels[] = {"x", "y", "z"};
    for (size_t i = 0; i < 3; i++) {
        *buffers[i] = mtl_new_buffer(host->device, BYTES, MTLResourceStorageModeShared);
        mtl_set_label(*buffers[i], ns_string(labels[i]));
    }
    float *x = mtl_buffer_contents(host->x);
    for (size_t i = 0; i < FLOATS; i++) x[i] = (float)i;
    return host;
}

void host_close(struct host *host) {
    id owned[] = {host->x,     host->y,       host->z,     host->copy,
                  host->scale, host->library, host->queue, host->device};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) objc_release(owned[i]);
    objc_autoreleasePoolPop(host->pool);
    free(host);
}

void host_begin(struct host *host, NSUInteger dispatch_type) {
    host->commands = mtl_command_buffer(host->queue);
    host->encoder = mtl_compute_encoder(host->commands, dispatch_type);
}

void host_copy(struct host *host, id from, id to, uint32_t first, uint32_t count) {
    struct copy_args args = {first, count};
    mtl_set_pipeline(host->encoder, host->copy);
    mtl_set_buffer(host->encoder, from, 0, 0);
    mtl_set_buffer(host->encoder, to, 0, 1);
    mtl_set_bytes(host->encoder, &args, sizeof args, 2);
    mtl_dispatch(host->encoder, (MTLSize){4, 1, 1}, (MTLSize){256, 1, 1});
}

void host_scale(struct host *host, id buffer, uint32_t count) {
    mtl_set_pipeline(host->encoder, host->scale);
    mtl_set_buffer(host->encoder, buffer, 0, 0);
    mtl_set_bytes(host->encoder, &count, sizeof count, 1);
    mtl_set_threadgroup_memory(host->encoder, 64, 0);
    mtl_dispatch(host->encoder, (MTLSize){1, 1, 1}, (MTLSize){32, 1, 1});
}

void host_commit(struct host *host) {
    mtl_end_encoding(host->encoder);
    mtl_commit(host->commands);
}

void host_run(struct host *host) {
    host_commit(host);
    mtl_wait_completed(host->commands);
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

/* Rules told while encoding: each fires on a program that is wrong in one place. */
#include "host.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void right_program_is_silent(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->x, host->y, 0, FLOATS);
    mtl_barrier_scope(host->encoder, MTLBarrierScopeBuffers);
    host_scale(host, host->y, FLOATS);
    host_run(host);
    assert_int_equal(mtl_status(host->commands), MTLCommandBufferStatusCompleted);
    assert_null(mtl_error(host->commands));
    assert_true(mtl_gpu_end_time(host->commands) >= mtl_gpu_start_time(host->commands));
    assert_true(mtl_gpu_start_time(host->commands) > 0);
    const float *y = mtl_buffer_contents(host->y);
    for (int i = 0; i < FLOATS; i++) assert_true(y[i] == 2.0f * (float)i);
    expect_nothing();
}

static void bindings(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeSerial);
    struct copy_args args = {0, 4};
    MTLSize one = {1, 1, 1}, simd = {32, 1, 1};
    mtl_dispatch(host->encoder, one, simd);
    expect_findings(METAL_EMU_PIPELINE_MISSING, 1);
    mtl_set_pipeline(host->encoder, host->copy);
    mtl_set_buffer(host->encoder, host->x, 0, 0);
    mtl_set_bytes(host->encoder, &args, sizeof args, 2);
    mtl_dispatch(host->encoder, one, simd);
    expect_findings(METAL_EMU_BINDING_MISSING, 1);
    mtl_set_buffer(host->encoder, host->y, 0, 1);
    mtl_set_buffer(host->encoder, host->z, 0, 1);
    expect_findings(METAL_EMU_BINDING_DUPLICATE, 1);
    mtl_set_buffer(host->encoder, host->z, 0, 7);
    mtl_dispatch(host->encoder, one, simd);
    expect_findings(METAL_EMU_BINDING_UNKNOWN, 1);
    mtl_set_bytes(host->encoder, &args, 4, 2);
    mtl_dispatch(host->encoder, one, simd);
    mtl_set_buffer(host->encoder, host->x, BYTES - 4, 2);
    mtl_dispatch(host->encoder, one, simd);
    const struct copy_args two[2] = {{0, 4}, {0, 4}};
    mtl_set_bytes(host->encoder, two, sizeof two, 2);
    mtl_dispatch(host->encoder, one, simd);
    expect_findings(METAL_EMU_BINDING_SIZE, 3);
    mtl_set_buffer(host->encoder, host->x, 0, 31);
    expect_findings(METAL_EMU_INDEX, 1);
    host_run(host);
    expect_nothing();
}

static void offsets_and_lengths(void **state) {
    (void)state;
    static const char large[4100];
    host_begin(host, MTLDispatchTypeSerial);
    mtl_set_buffer(host->encoder, host->x, BYTES - 4, 0);
    expect_nothing();
    mtl_set_pipeline(host->encoder, host->copy);
    mtl_set_buffer(host->encoder, host->x, BYTES, 1);
    expect_findings(METAL_EMU_OFFSET, 1);
    mtl_set_buffer(host->encoder, host->x, 2, 1);
    expect_findings(METAL_EMU_OFFSET, 1);
    mtl_set_bytes(host->encoder, large, 4096, 2);
    expect_nothing();
    mtl_set_bytes(host->encoder, large, 4097, 3);
    expect_findings(METAL_EMU_BYTES, 1);
    mtl_set_bytes(host->encoder, large, 0, 3);
    expect_findings(METAL_EMU_BYTES, 1);
    host_run(host);
    assert_null(mtl_new_buffer(host->device, 0, 0));
    assert_null(mtl_new_buffer(host->device, mtl_device_max_buffer_length(host->device) + 1, 0));
    assert_null(mtl_new_buffer_no_copy(host->device, (void *)4096, 16384, 0));
    assert_null(mtl_new_buffer_no_copy(host->device, (void *)16384, 4096, 0));
    expect_findings(METAL_EMU_BUFFER_ARGUMENT, 4);
}

static void threadgroups(void **state) {
    (void)state;
    MTLSize one = {1, 1, 1}, simd = {32, 1, 1};
    uint32_t count = 1;
    host_begin(host, MTLDispatchTypeSerial);
    mtl_set_pipeline(host->encoder, host->scale);
    mtl_set_buffer(host->encoder, host->x, 0, 0);
    mtl_set_bytes(host->encoder, &count, sizeof count, 1);
    mtl_dispatch(host->encoder, one, simd); /* threadgroup memory not set */
    mtl_set_threadgroup_memory(host->encoder, 24, 0);
    mtl_set_threadgroup_memory(host->encoder, 32768 + 16, 0);
    expect_findings(METAL_EMU_THREADGROUP_MEMORY, 3);
    mtl_set_threadgroup_memory(host->encoder, 32768, 0);
    mtl_dispatch(host->encoder, one, (MTLSize){512, 1, 1});
    expect_nothing();
    mtl_dispatch(host->encoder, one, (MTLSize){544, 1, 1}); /* scale allows 512 */
    mtl_dispatch(host->encoder, one, (MTLSize){33, 1, 1});
    mtl_dispatch(host->encoder, one, (MTLSize){0, 1, 1});
    expect_findings(METAL_EMU_THREADS, 3);
    mtl_dispatch(host->encoder, (MTLSize){0, 1, 1}, simd);
    expect_findings(METAL_EMU_GRID, 1);
    host_run(host);
    expect_nothing();
}

static void pipeline_limit_is_configurable(void **state) {
    (void)state;
    struct metal_emu_options options = metal_emu_defaults();
    options.quiet = true;
    options.pipeline_threads = 128;
    struct host *limited = host_open(&options);
    assert_int_equal(mtl_pipeline_max_threads(limited->copy), 128);
    assert_int_equal(mtl_pipeline_simd_width(limited->copy), 32);
    host_begin(limited, MTLDispatchTypeSerial);
    host_copy(limited, limited->x, limited->y, 0, 4);
    expect_findings(METAL_EMU_THREADS, 1);
    host_run(limited);
    host_close(limited);
}

static void encoder_life(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeSerial);
    mtl_commit(host->commands);
    assert_null(mtl_compute_encoder(host->commands, MTLDispatchTypeSerial));
    expect_findings(METAL_EMU_ENCODER_OPEN, 2);
    mtl_end_encoding(host->encoder);
    mtl_end_encoding(host->encoder);
    host_copy(host, host->x, host->y, 0, 4);
    expect_findings(METAL_EMU_ENCODER_ENDED, 6);
    mtl_wait_completed(host->commands);
    expect_findings(METAL_EMU_NEVER_COMMITTED, 1);
    mtl_commit(host->commands);
    expect_nothing();
    mtl_commit(host->commands);
    assert_null(mtl_compute_encoder(host->commands, MTLDispatchTypeSerial));
    expect_findings(METAL_EMU_COMMITTED, 2);
    mtl_wait_completed(host->commands);
    expect_nothing();
}

static void abandoned_objects(void **state) {
    (void)state;
    void *pool = objc_autoreleasePoolPush();
    mtl_command_buffer(host->queue);
    objc_autoreleasePoolPop(pool);
    expect_findings(METAL_EMU_NEVER_COMMITTED, 1);
    pool = objc_autoreleasePoolPush();
    mtl_compute_encoder(mtl_command_buffer(host->queue), MTLDispatchTypeSerial);
    objc_autoreleasePoolPop(pool);
    assert_int_equal(metal_emu_count_of(METAL_EMU_ENCODER_OPEN), 1);
    assert_int_equal(metal_emu_count_of(METAL_EMU_NEVER_COMMITTED), 1);
    metal_emu_reset();
}

static void barriers_that_order_nothing(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeConcurrent);
    mtl_barrier_scope(host->encoder, MTLBarrierScopeBuffers);
    expect_findings(METAL_EMU_BARRIER, 1);
    host_copy(host, host->x, host->y, 0, 4);
    mtl_barrier_resources(host->encoder, &host->y, 0);
    expect_findings(METAL_EMU_BARRIER, 1);
    mtl_barrier_scope(host->encoder, 2);
    expect_findings(METAL_EMU_BARRIER, 1);
    host_run(host);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, 0, 4);
    mtl_barrier_scope(host->encoder, MTLBarrierScopeBuffers);
    expect_findings(METAL_EMU_BARRIER, 1);
    host_run(host);
    expect_nothing();
}

static void compilation(void **state) {
    (void)state;
    id error = NULL, options = mtl_new_compile_options();
    id library = mtl_new_library(host->device, ns_string("k"), options, &error);
    expect_findings(METAL_EMU_COMPILE_OPTIONS, 2);
    objc_release(library);
    mtl_options_set_language_version(options, MTLLanguageVersion3_1);
    mtl_options_set_fast_math(options, true);
    objc_release(mtl_new_library(host->device, ns_string("k"), options, &error));
    expect_findings(METAL_EMU_COMPILE_OPTIONS, 1);
    mtl_options_set_math_mode(options, MTLMathModeSafe);
    objc_release(mtl_new_library(host->device, ns_string("k"), options, &error));
    expect_findings(METAL_EMU_COMPILE_OPTIONS, 1); /* exp and the like are still the fast ones */
    mtl_options_set_math_functions(options, MTLMathFloatingPointFunctionsPrecise);
    assert_null(mtl_new_library(host->device, ns_string("broken"), options, &error));
    assert_string_equal(ns_error_text(error), "line 1: broken");
    mtl_options_set_language_version(options, MTLLanguageVersion4_0);
    error = NULL;
    assert_null(mtl_new_library(host->device, ns_string("k"), options, &error)); /* an M1 */
    assert_non_null(strstr(ns_error_text(error), "4.0"));
    objc_release(options);
    assert_null(mtl_new_function(host->library, ns_string("absent")));
    id constants = mtl_new_function_constants();
    mtl_constants_set(constants, &error, 999, 0);
    expect_findings(METAL_EMU_CONSTANT, 1);
    bool flag = true; /* 1 byte, where the kernel wants 4 */
    mtl_constants_set(constants, &flag, MTLDataTypeBool, 0);
    id function = mtl_new_function_specialised(host->library, ns_string("scale"), constants, NULL);
    assert_null(mtl_new_pipeline(host->device, function, &error));
    objc_release(function);
    objc_release(constants);
    expect_nothing();
}

static void profiles(void **state) {
    (void)state;
    assert_string_equal(mtl_device_name(host->device), "M1 8 GB");
    assert_int_equal(mtl_device_recommended_working_set(host->device) >> 20, 5461);
    assert_int_equal(mtl_device_max_threadgroup_memory(host->device), 32768);
    assert_true(mtl_device_supports_family(host->device, MTLGPUFamilyApple7));
    assert_false(mtl_device_supports_family(host->device, MTLGPUFamilyApple8));
    assert_false(mtl_device_supports_family(host->device, MTLGPUFamilyMetal4));
    assert_int_equal(mtl_device_allocated(host->device), 3 * BYTES);
    assert_null(metal_emu_profile("M0"));
    id compile_options = mtl_new_compile_options();
    assert_true(objc_responds(compile_options, "setMathMode:"));
    objc_release(compile_options);
    struct metal_emu_options options = metal_emu_defaults();
    options.profile = *metal_emu_profile("M5 Max 128 GB");
    struct host *large = host_open(&options);
    assert_int_equal(mtl_device_recommended_working_set(large->device) >> 30, 96);
    assert_true(mtl_device_supports_family(large->device, MTLGPUFamilyMetal4));
    assert_true(mtl_device_supports_family(large->device, MTLGPUFamilyApple10));
    host_close(large);
    expect_nothing();
}

/* The compiler's answer to a text of language 4.0 on a machine; NULL when it is compiled. */
static const char *answer_of(const char *machine, const char *text) {
    static char answer[200];
    struct metal_emu_options options = metal_emu_defaults();
    options.profile = *metal_emu_profile(machine);
    struct host *other = host_open(&options);
    id error = NULL, how = mtl_new_compile_options();
    mtl_options_set_language_version(how, MTLLanguageVersion4_0);
    mtl_options_set_math_mode(how, MTLMathModeSafe);
    mtl_options_set_math_functions(how, MTLMathFloatingPointFunctionsPrecise);
    id library = mtl_new_library(other->device, ns_string(text), how, &error);
    if (!library) snprintf(answer, sizeof answer, "%s", ns_error_text(error));
    objc_release(how);
    bool compiled = library != NULL;
    objc_release(library);
    host_close(other);
    return compiled ? NULL : answer;
}

static void systems(void **state) {
    (void)state;
    const char *text = "#include <metal_tensor>\nbfloat";
    assert_non_null(strstr(answer_of("M3 Max 128 GB", "k"), "4.0"));
    assert_null(answer_of("M1 Max 64 GB", text)); /* by the system, not by the chip */
    assert_null(answer_of("M5 32 GB", text));
    assert_non_null(strstr(answer_of("M5 24 GB, macOS 26.0", text), "bfloat"));
    assert_null(answer_of("M5 24 GB, macOS 26.0", "half"));
    expect_nothing();
}

static void unknown_selector(void) {
    OBJC_SEND(void)(host->device, sel_registerName("explode"));
}

static void unknown_class_selector(void) {
    OBJC_SEND(void)((id)objc_getClass("NSString"), sel_registerName("new"));
}

static void selectors(void **state) {
    (void)state;
    char text[4096];
    assert_int_equal(in_child(unknown_selector, text), -SIGABRT);
    assert_non_null(strstr(text, "unknown selector -[MTLDevice explode]"));
    assert_int_equal(in_child(unknown_class_selector, text), -SIGABRT);
    assert_non_null(strstr(text, "unknown selector +[NSString new]"));
    assert_false(objc_responds(host->device, "explode"));
    assert_true(objc_responds(host->device, "newSharedEvent"));
    assert_null(objc_getClass("MTLTexture"));
    /* nil answers everything with zero, as a pointer, a number and a double */
    assert_null(mtl_new_queue(NULL));
    assert_int_equal(mtl_event_value(NULL), 0);
    assert_true(mtl_gpu_end_time(NULL) == 0.0);
}

static void argument_classes(void **state) {
    (void)state;
    id error = NULL;
    assert_null(mtl_new_pipeline(host->device, NULL, &error));
    assert_null(mtl_new_library(host->device, host->x, NULL, &error));
    host_begin(host, MTLDispatchTypeConcurrent);
    mtl_set_pipeline(host->encoder, host->x);
    mtl_set_buffer(host->encoder, host->copy, 0, 0);
    mtl_set_buffer(host->encoder, NULL, 0, 0);
    mtl_dispatch_indirect(host->encoder, host->queue, 0, (MTLSize){32, 1, 1});
    expect_findings(METAL_EMU_ARGUMENT, 6);
    host_copy(host, host->x, host->y, 0, 4);
    mtl_barrier_resources(host->encoder, &host->queue, 1);
    mtl_end_encoding(host->encoder);
    mtl_encode_wait(host->commands, NULL, 1);
    mtl_commit(host->commands);
    mtl_wait_completed(host->commands);
    expect_findings(METAL_EMU_ARGUMENT, 2);
}

static void kernel_faults(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, FLOATS - 4, 4);
    host_copy(host, host->x, host->y, FLOATS - 4, 5); /* beyond the buffer */
    host_run(host);
    assert_non_null(strstr(metal_emu_finding(0)->text, "out of bounds: copy"));
    expect_findings(METAL_EMU_KERNEL, 1);
}

/* tools/metal_emulator/macho/every_method.c, which calls all of mtl.h */
extern int every_method_main(void);

static void every_method_is_known(void **state) {
    (void)state;
    size_t live = metal_emu_live_objects();
    assert_int_equal(every_method_main(), 0);
    assert_int_equal(metal_emu_live_objects(), live);
    expect_nothing();
}

int run_rule_tests(void) {
#define RULE(test) cmocka_unit_test_setup_teardown(test, host_setup, host_teardown)
    const struct CMUnitTest tests[] = {
        RULE(right_program_is_silent),
        RULE(bindings),
        RULE(offsets_and_lengths),
        RULE(threadgroups),
        RULE(encoder_life),
        RULE(barriers_that_order_nothing),
        RULE(abandoned_objects),
        RULE(compilation),
        RULE(profiles),
        RULE(systems),
        RULE(selectors),
        RULE(argument_classes),
        RULE(every_method_is_known),
        RULE(kernel_faults),
        RULE(pipeline_limit_is_configurable),
    };
    return cmocka_run_group_tests_name("rules", tests, NULL, NULL);
}

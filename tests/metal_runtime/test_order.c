/* Hazards between dispatches, barriers, stages, recorded graphs, events and injected errors. */
#include "host.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* x -> y, then y -> z, with what `between` does in the middle. */
static void two_copies(void (*between)(void), uint32_t first, uint32_t second, uint32_t count) {
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->x, host->y, first, count);
    if (between) between();
    host_copy(host, host->y, host->z, second, count);
    host_run(host);
}

static void full_barrier(void) {
    mtl_barrier_scope(host->encoder, MTLBarrierScopeBuffers);
}
static void barrier_on_y(void) {
    mtl_barrier_resources(host->encoder, &host->y, 1);
}
static void barrier_on_others(void) {
    const id others[] = {host->x, host->z};
    mtl_barrier_resources(host->encoder, others, 2);
}

static void hazards_are_exact(void **state) {
    (void)state;
    two_copies(NULL, 0, 0, 8);
    expect_findings(METAL_EMU_HAZARD, 1);
    two_copies(NULL, 0, 7, 8); /* one float in common */
    assert_non_null(strstr(metal_emu_finding(0)->text, "bytes 28 to 32 of y"));
    expect_findings(METAL_EMU_HAZARD, 1);
    two_copies(NULL, 0, 8, 8); /* neighbours */
    two_copies(full_barrier, 0, 0, 8);
    two_copies(barrier_on_y, 0, 0, 8);
    expect_nothing();
    two_copies(barrier_on_others, 0, 0, 8); /* orders only what it lists */
    expect_findings(METAL_EMU_HAZARD, 1);
}

static void every_kind_of_hazard(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->x, host->y, 0, 8);
    host_copy(host, host->z, host->y, 0, 8);
    host_run(host);
    assert_non_null(strstr(metal_emu_finding(0)->text, "writes what the later writes"));
    expect_findings(METAL_EMU_HAZARD, 1);
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->y, host->z, 0, 8);
    host_copy(host, host->x, host->y, 0, 8);
    host_run(host);
    assert_non_null(strstr(metal_emu_finding(0)->text, "reads what the later writes"));
    expect_findings(METAL_EMU_HAZARD, 1);
    host_begin(host, MTLDispatchTypeConcurrent); /* two readers are no hazard */
    host_copy(host, host->x, host->y, 0, 8);
    host_copy(host, host->x, host->z, 0, 8);
    host_run(host);
    host_begin(host, MTLDispatchTypeSerial); /* a serial encoder orders all */
    host_copy(host, host->x, host->y, 0, 8);
    host_copy(host, host->y, host->z, 0, 8);
    host_run(host);
    expect_nothing();
}

static void host_scale_indirect(struct host *on, id buffer, id grid) {
    const uint32_t count = 1;
    mtl_set_pipeline(on->encoder, on->scale);
    mtl_set_buffer(on->encoder, buffer, 0, 0);
    mtl_set_bytes(on->encoder, &count, sizeof count, 1);
    mtl_set_threadgroup_memory(on->encoder, 64, 0);
    mtl_dispatch_indirect(on->encoder, grid, 0, (MTLSize){32, 1, 1});
}

static void graphs(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->x, host->y, 0, 16);
    host_copy(host, host->x, host->z, 0, 8);
    mtl_barrier_resources(host->encoder, &host->z, 1);
    host_scale(host, host->z, 4); /* after the second copy only */
    host_scale(host, host->x, 0);
    host_run(host);
    expect_nothing();
    assert_int_equal(graph_field("dispatches"), 4);
    assert_int_equal(graph_field("stages"), 2);
    assert_int_equal(graph_field("barriers"), 1);
    assert_int_equal(graph_field("encoders"), 1);
    assert_int_equal(graph_field("unique_read"), 64 + 16); /* x[0..16), z[0..4) */
    assert_int_equal(graph_field("traffic_read"), 64 + 32 + 16);
    assert_int_equal(graph_field("unique_written"), 64 + 32);
    assert_int_equal(graph_field("traffic_written"), 64 + 32 + 16);
    assert_int_equal(graph_field("status"), MTLCommandBufferStatusCompleted);
    host_begin(host, MTLDispatchTypeSerial);
    for (int i = 0; i < 3; i++) host_scale(host, host->x, 4);
    host_run(host);
    assert_int_equal(graph_field("stages"), 3);
    assert_int_equal(metal_emu_graph_count(), 2);
    host_begin(host, MTLDispatchTypeConcurrent); /* a second encoder follows the first */
    host_scale(host, host->x, 4);
    mtl_end_encoding(host->encoder);
    host->encoder = mtl_compute_encoder(host->commands, MTLDispatchTypeConcurrent);
    host_scale(host, host->y, 4);
    host_run(host);
    assert_int_equal(graph_field("stages"), 2);
    assert_int_equal(graph_field("encoders"), 2);
    host_begin(host, MTLDispatchTypeConcurrent); /* an indirect grid is ordered like an argument */
    host_copy(host, host->x, host->z, 0, 3);
    mtl_barrier_resources(host->encoder, &host->z, 1);
    host_scale_indirect(host, host->y, host->z);
    host_run(host);
    expect_nothing();
    assert_int_equal(graph_field("stages"), 2);
}

static void indirect_grids(void **state) {
    (void)state;
    uint32_t *grid = mtl_buffer_contents(host->z);
    const uint32_t some[3] = {1, 1, 1}, none[3] = {0, 1, 1}, count = 4;
    memcpy(grid, some, sizeof some);
    memcpy(grid + 3, none, sizeof none);
    host_begin(host, MTLDispatchTypeSerial);
    host_scale(host, host->x, count);
    mtl_dispatch_indirect(host->encoder, host->z, 0, (MTLSize){32, 1, 1});
    mtl_dispatch_indirect(host->encoder, host->z, 12, (MTLSize){32, 1, 1});
    expect_nothing();
    mtl_dispatch_indirect(host->encoder, host->z, BYTES - 8, (MTLSize){32, 1, 1});
    expect_findings(METAL_EMU_OFFSET, 1);
    host_run(host);
    assert_true(((float *)mtl_buffer_contents(host->x))[1] == 4.0f); /* scaled twice, not thrice */
    host_begin(host, MTLDispatchTypeConcurrent); /* the grid is written, then read unordered */
    host_copy(host, host->x, host->z, 0, 8);
    host_scale_indirect(host, host->y, host->z);
    host_run(host);
    expect_findings(METAL_EMU_HAZARD, 1);
}

static void seeds_change_only_unordered_work(void **state) {
    (void)state;
    char first[256] = "";
    bool differs = false;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct metal_emu_options options = metal_emu_defaults();
        options.seed = seed;
        struct host *drawn = host_open(&options);
        host_begin(drawn, MTLDispatchTypeConcurrent);
        for (uint32_t i = 0; i < 6; i++) host_copy(drawn, drawn->x, drawn->y, i, 1);
        mtl_barrier_scope(drawn->encoder, MTLBarrierScopeBuffers);
        host_scale(drawn, drawn->y, 6);
        host_run(drawn);
        assert_int_equal(strlen(fake_order), 7);
        assert_int_equal(fake_order[6], 's');
        if (seed == 1) strcpy(first, fake_order);
        differs = differs || strcmp(first, fake_order) != 0;
        expect_nothing();
        host_close(drawn);
    }
    assert_true(differs);
}

static void work_is_late_or_early(void **state) {
    (void)state;
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, 0, 4);
    host_commit(host);
    assert_int_equal(strlen(fake_order), 0);
    for (int i = 0; mtl_status(host->commands) < MTLCommandBufferStatusCompleted; i++) {
        assert_true(i < 10); /* polling gets there */
    }
    assert_int_equal(strlen(fake_order), 1);
    struct metal_emu_options options = metal_emu_defaults();
    options.schedule = METAL_EMU_EARLY;
    struct host *early = host_open(&options);
    host_begin(early, MTLDispatchTypeSerial);
    host_copy(early, early->x, early->y, 0, 4);
    host_commit(early);
    assert_int_equal(strlen(fake_order), 1);
    host_close(early);
    expect_nothing();
}

static void events(void **state) {
    (void)state;
    id event = mtl_new_shared_event(host->device), second = mtl_new_queue(host->device);
    /* the second queue waits for the first, and was committed before it */
    id waits = mtl_command_buffer(second);
    mtl_encode_wait(waits, event, 1);
    mtl_encode_signal(waits, event, 2);
    mtl_commit(waits);
    host_begin(host, MTLDispatchTypeSerial);
    mtl_end_encoding(host->encoder);
    mtl_encode_signal(host->commands, event, 1);
    mtl_commit(host->commands);
    assert_true(mtl_event_wait(event, 2, 1000));
    mtl_wait_completed(waits);
    mtl_wait_completed(host->commands);
    assert_int_equal(mtl_event_value(event), 2);
    expect_nothing();
    id backwards = mtl_command_buffer(second);
    mtl_encode_signal(backwards, event, 2);
    mtl_commit(backwards);
    mtl_wait_completed(backwards);
    mtl_event_set_value(event, 1);
    expect_findings(METAL_EMU_EVENT_ORDER, 2);
    objc_release(second);
    objc_release(event);
}

static void waits_that_nothing_ends(void **state) {
    (void)state;
    id event = mtl_new_shared_event(host->device);
    id waits = mtl_command_buffer(host->queue);
    mtl_encode_wait(waits, event, 5);
    mtl_commit(waits);
    mtl_wait_completed(waits);
    assert_int_equal(mtl_status(waits), MTLCommandBufferStatusError);
    expect_findings(METAL_EMU_EVENT_NEVER, 1);
    assert_false(mtl_event_wait(event, 5, 10));
    expect_findings(METAL_EMU_EVENT_NEVER, 1);
    mtl_event_set_value(event, 5);
    waits = mtl_command_buffer(host->queue);
    mtl_encode_wait(waits, event, 5);
    mtl_commit(waits);
    mtl_wait_completed(waits);
    expect_nothing();
    objc_release(event);
}

static void *signal_later(void *event) {
    usleep(20000);
    mtl_event_set_value(event, 9);
    return NULL;
}

static void another_thread_signals(void **state) {
    (void)state;
    struct metal_emu_options options = metal_emu_defaults();
    options.hang_ms = 60000; /* the other thread may wait for a processor */
    struct host *patient = host_open(&options);
    id event = mtl_new_shared_event(patient->device);
    mtl_event_set_value(event, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, signal_later, event);
    id waits = mtl_command_buffer(patient->queue);
    mtl_encode_wait(waits, event, 9);
    mtl_commit(waits);
    mtl_wait_completed(waits);
    pthread_join(thread, NULL);
    assert_int_equal(mtl_status(waits), MTLCommandBufferStatusCompleted);
    objc_release(event);
    host_close(patient);
    expect_nothing();
}

static void injected_errors(void **state) {
    (void)state;
    metal_emu_inject(1, MTLCommandBufferErrorPageFault, 1, true);
    for (int i = 0; i < 3; i++) {
        host_begin(host, MTLDispatchTypeSerial);
        host_copy(host, host->x, host->y, 0, 4);
        host_copy(host, host->y, host->z, 0, 4);
        host_run(host);
        NSInteger code = ns_error_code(mtl_error(host->commands));
        const NSInteger expected[] = {0, MTLCommandBufferErrorPageFault,
                                      MTLCommandBufferErrorAccessRevoked};
        assert_int_equal(code, expected[i]);
        if (i > 0) assert_non_null(ns_error_text(mtl_error(host->commands)));
    }
    assert_int_equal(strlen(fake_order), 3); /* two, then one before the fault, then none */
    objc_release(host->queue);
    host->queue = mtl_new_queue(host->device); /* the host's remedy */
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, 0, 4);
    host_run(host);
    assert_int_equal(mtl_status(host->commands), MTLCommandBufferStatusCompleted);
    metal_emu_inject_no_memory(1);
    id buffer = mtl_new_buffer(host->device, 64, 0);
    assert_non_null(buffer);
    assert_null(mtl_new_buffer(host->device, 64, 0));
    objc_release(buffer);
    expect_nothing();
}

static void time_and_memory_limits(void **state) {
    (void)state;
    struct metal_emu_options options = metal_emu_defaults();
    options.seconds_per_dispatch = 0.5;
    options.watchdog_seconds = 1.2;
    struct host *slow = host_open(&options);
    double end = 0;
    for (int n = 2; n <= 3; n++) {
        host_begin(slow, MTLDispatchTypeSerial);
        for (int i = 0; i < n; i++) host_scale(slow, slow->x, 1);
        host_run(slow);
        assert_true(mtl_gpu_start_time(slow->commands) >= end); /* one after another */
        end = mtl_gpu_end_time(slow->commands);
        double took = mtl_gpu_end_time(slow->commands) - mtl_gpu_start_time(slow->commands);
        if (n == 2) assert_true(took > 0.99 && took < 1.01);
        assert_int_equal(ns_error_code(mtl_error(slow->commands)),
                         n == 2 ? 0 : MTLCommandBufferErrorTimeout);
    }
    host_close(slow);
    options = metal_emu_defaults();
    options.working_set = 2 * BYTES; /* the host has three buffers */
    struct host *tight = host_open(&options);
    host_begin(tight, MTLDispatchTypeSerial);
    host_run(tight);
    assert_int_equal(ns_error_code(mtl_error(tight->commands)), MTLCommandBufferErrorOutOfMemory);
    host_close(tight);
    expect_nothing();
}

int run_order_tests(void) {
#define ORDER(test) cmocka_unit_test_setup_teardown(test, host_setup, host_teardown)
    const struct CMUnitTest tests[] = {
        ORDER(hazards_are_exact),
        ORDER(every_kind_of_hazard),
        ORDER(graphs),
        ORDER(indirect_grids),
        ORDER(work_is_late_or_early),
        ORDER(seeds_change_only_unordered_work),
        ORDER(events),
        ORDER(waits_that_nothing_ends),
        ORDER(another_thread_signals),
        ORDER(injected_errors),
        ORDER(time_and_memory_limits),
    };
    return cmocka_run_group_tests_name("order", tests, NULL, NULL);
}

/* Ownership, pools, use after release, and the CPU's writes while the GPU works. */
#include "host.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void commit_copy(void) {
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, 0, 4);
    host_commit(host);
}

static void writes_in_flight(void **state) {
    (void)state;
    volatile float *x = mtl_buffer_contents(host->x), *z = mtl_buffer_contents(host->z);
    commit_copy();
    z[3] = 1;               /* not used by the command buffer */
    assert_true(x[2] == 2); /* reading is allowed */
    expect_nothing();
    x[5] = 7;
    assert_true(x[5] == 7); /* it goes through */
    assert_int_equal(metal_emu_finding_count(), 1);
    assert_non_null(strstr(metal_emu_finding(0)->text, "x at byte 20"));
    expect_findings(METAL_EMU_CPU_WRITE, 1);
    mtl_wait_completed(host->commands);
    x[5] = 8;
    expect_nothing();
    commit_copy(); /* two in flight: the first's end does not free the buffer */
    id first = host->commands;
    commit_copy();
    mtl_wait_completed(first);
    x[5] = 9;
    expect_findings(METAL_EMU_CPU_WRITE, 1);
    mtl_wait_completed(host->commands);
    expect_nothing();
}

/* Half done, waiting for an event: still in flight. */
static void writes_between_encoders(void **state) {
    (void)state;
    volatile float *x = mtl_buffer_contents(host->x);
    id event = mtl_new_shared_event(host->device);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, host->y, 0, 4);
    mtl_end_encoding(host->encoder);
    mtl_encode_wait(host->commands, event, 1);
    mtl_commit(host->commands);
    for (int i = 0; i < 4; i++) mtl_status(host->commands);
    assert_true(((volatile float *)mtl_buffer_contents(host->y))[3] == 3); /* the copy ran */
    x[0] = 5;
    expect_findings(METAL_EMU_CPU_WRITE, 1);
    mtl_event_set_value(event, 1);
    mtl_wait_completed(host->commands);
    objc_release(event);
    expect_nothing();
}

static void mapped_memory(void **state) {
    (void)state;
    enum { LENGTH = 2 * 16384 };
    uint8_t *area =
        mmap(NULL, LENGTH + 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *page = (uint8_t *)(((uintptr_t)area + 16383) / 16384 * 16384);
    id buffer = mtl_new_buffer_no_copy(host->device, page, LENGTH, 0);
    assert_ptr_equal(mtl_buffer_contents(buffer), page);
    assert_int_equal(mtl_buffer_length(buffer), LENGTH);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, buffer, host->y, 0, 4);
    host_commit(host);
    page[17] = 3;
    expect_findings(METAL_EMU_CPU_WRITE, 1);
    mtl_wait_completed(host->commands);
    objc_release(buffer);
    page[17] = 4; /* the memory is the host's */
    assert_int_equal(mprotect(page, LENGTH, PROT_READ), 0);
    buffer = mtl_new_buffer_no_copy(host->device, page, LENGTH, 0);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, buffer, host->y, 0, 8);
    host_run(host);
    assert_int_equal(((uint8_t *)mtl_buffer_contents(host->y))[17], 4);
    objc_release(buffer);
    munmap(area, LENGTH + 16384);
    assert_null(mtl_buffer_contents(NULL));
    expect_nothing();
}

/* Two views of the same pages: the GPU's write through one is not taken for the CPU's. */
static void overlapping_views(void **state) {
    (void)state;
    uint8_t *area =
        mmap(NULL, 4 * 16384, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *page = (uint8_t *)(((uintptr_t)area + 16383) / 16384 * 16384);
    id whole = mtl_new_buffer_no_copy(host->device, page, 2 * 16384, 0);
    id half = mtl_new_buffer_no_copy(host->device, page, 16384, 0);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, whole, 0, 8);
    host_commit(host);
    id first = host->commands;
    page[0] = 1; /* opens the pages of the first view, then the second view closes one again */
    expect_findings(METAL_EMU_CPU_WRITE, 1);
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, half, host->y, 0, 8);
    host_commit(host);
    mtl_wait_completed(first);
    mtl_wait_completed(host->commands);
    expect_nothing();
    host_begin(host, MTLDispatchTypeConcurrent);
    host_copy(host, host->x, whole, 0, 8);
    host_copy(host, half, host->y, 0, 8); /* the same bytes under another name */
    host_run(host);
    expect_findings(METAL_EMU_HAZARD, 1);
    objc_release(whole);
    objc_release(half);
    munmap(area, 4 * 16384);
}

static void retained_and_unretained(void **state) {
    (void)state;
    id mine = mtl_new_buffer(host->device, BYTES, 0);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, mine, 0, 4);
    objc_release(mine); /* the command buffer keeps it */
    host_run(host);
    assert_int_equal(mtl_status(host->commands), MTLCommandBufferStatusCompleted);
    expect_nothing();
    for (int before_commit = 0; before_commit < 2; before_commit++) {
        mine = mtl_new_buffer(host->device, BYTES, 0);
        host->commands = mtl_command_buffer_unretained(host->queue);
        host->encoder = mtl_compute_encoder(host->commands, MTLDispatchTypeSerial);
        host_copy(host, host->x, mine, 0, 4);
        if (before_commit) objc_release(mine);
        host_commit(host);
        if (!before_commit) objc_release(mine);
        mtl_wait_completed(host->commands);
        assert_int_equal(ns_error_code(mtl_error(host->commands)),
                         MTLCommandBufferErrorInvalidResource);
        expect_findings(METAL_EMU_BUFFER_RELEASED, 1);
    }
}

static void pools(void **state) {
    (void)state;
    void *outer = objc_autoreleasePoolPush(), *inner = objc_autoreleasePoolPush();
    size_t before = metal_emu_live_objects();
    ns_string("inner");
    objc_autoreleasePoolPop(inner);
    assert_int_equal(metal_emu_live_objects(), before);
    expect_nothing();
    objc_autoreleasePoolPush();
    objc_autoreleasePoolPop(outer); /* pops what is inside too */
    expect_findings(METAL_EMU_POOL, 1);
    objc_autoreleasePoolPop(outer);
    expect_findings(METAL_EMU_POOL, 1);
    inner = objc_autoreleasePoolPush();
    objc_release(ns_string("not mine"));
    objc_autoreleasePoolPop(inner);
    expect_findings(METAL_EMU_OVER_RELEASE, 1);
}

static void send_to_released(void) {
    id buffer = mtl_new_buffer(host->device, 64, 0);
    objc_release(buffer);
    mtl_buffer_length(buffer);
}

static void release_twice(void) {
    id buffer = mtl_new_buffer(host->device, 64, 0);
    objc_release(buffer);
    objc_release(buffer);
}

static void touch_released(void) {
    id buffer = mtl_new_buffer(host->device, 64, 0);
    volatile char *bytes = mtl_buffer_contents(buffer);
    objc_release(buffer);
    bytes[3] = 1;
}

static void write_to_read_only(void) {
    uint8_t *area = mmap(NULL, 3 * 16384, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *page = (uint8_t *)(((uintptr_t)area + 16383) / 16384 * 16384);
    id weights = mtl_new_buffer_no_copy(host->device, page, 16384, 0);
    host_begin(host, MTLDispatchTypeSerial);
    host_copy(host, host->x, weights, 0, 4);
    host_run(host);
}

static void leak_a_queue(void) {
    mtl_new_queue(host->device);
    host_close(host);
}

static void end_cleanly(void) {
    host_close(host);
}

static void no_pool(void) {
    objc_autoreleasePoolPop(host->pool);
    ns_string("lost");
    host->pool = objc_autoreleasePoolPush();
    host_close(host);
}

static void wild_pointer(void) {
    objc_release(mtl_new_buffer(host->device, 64, 0)); /* the emulator's handler is in place */
    volatile int *wild = (int *)8;
    *wild = 1;
}

static void ends_of_programs(void **state) {
    (void)state;
    const struct {
        void (*body)(void);
        int status;
        const char *text;
    } programs[] = {
        {send_to_released, -SIGABRT, "-[MTLBuffer length] sent to a released object"},
        {release_twice, -SIGABRT, "-[MTLBuffer release] sent to a released object"},
        {touch_released, -SIGABRT, "contents of a released buffer"},
        {write_to_read_only, -SIGABRT, "a kernel writes to memory that the host mapped read-only"},
        {end_cleanly, 0, ""},
    };
    char text[4096];
    for (size_t i = 0; i < sizeof programs / sizeof programs[0]; i++) {
        assert_int_equal(in_child(programs[i].body, text), programs[i].status);
        assert_non_null(strstr(text, programs[i].text));
    }
    struct metal_emu_options options = metal_emu_defaults(); /* findings printed */
    metal_emu_configure(&options);
    assert_int_equal(in_child(leak_a_queue, text), METAL_EMU_EXIT);
    assert_non_null(strstr(text, "not released: 1 x MTLCommandQueue"));
    assert_int_equal(in_child(no_pool, text), METAL_EMU_EXIT);
    assert_non_null(strstr(text, "NSString autoreleased with no pool in place"));
    assert_int_not_equal(in_child(wild_pointer, text), 0); /* other faults stay what they are */
    expect_nothing();
}

int run_memory_tests(void) {
#define MEMORY(test) cmocka_unit_test_setup_teardown(test, host_setup, host_teardown)
    const struct CMUnitTest tests[] = {
        MEMORY(writes_in_flight),  MEMORY(writes_between_encoders), MEMORY(mapped_memory),
        MEMORY(overlapping_views), MEMORY(retained_and_unretained), MEMORY(pools),
        MEMORY(ends_of_programs),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}

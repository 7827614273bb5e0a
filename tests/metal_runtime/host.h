/* A small right host program in parts, which each test arranges, mostly wrongly in one place. */
#ifndef LILY_TESTS_METAL_HOST_H
#define LILY_TESTS_METAL_HOST_H

/* cmocka wants these before itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../../src/backend/metal/mtl.h"
#include "../../tools/metal_emulator/runtime/emulator.h"
#include "fake_executor.h"

enum { FLOATS = 1024, BYTES = 4 * FLOATS };

struct host {
    void *pool;
    id device, queue, library, copy, scale;
    id x, y, z;  /* buffers of FLOATS floats; x holds 0, 1, 2, ... */
    id commands; /* the last command buffer */
    id encoder;  /* and its encoder */
};

/* Opens the host on a device with these options; host_close releases everything. */
struct host *host_open(const struct metal_emu_options *options);
void host_close(struct host *host);

/* The host of the running test, whose findings are kept and not printed. The teardown fails unless
 * all objects are released. */
extern struct host *host;
int host_setup(void **state);
int host_teardown(void **state);

/* A new command buffer with an encoder open. */
void host_begin(struct host *host, NSUInteger dispatch_type);
/* Sets every argument of copy and dispatches it for floats [first, first + count). */
void host_copy(struct host *host, id from, id to, uint32_t first, uint32_t count);
void host_scale(struct host *host, id buffer, uint32_t count);
/* Ends the encoder, commits, and host_run waits too. */
void host_commit(struct host *host);
void host_run(struct host *host);

/* Fails unless exactly `count` findings were made, all of this kind; then forgets them. */
void expect_findings(enum metal_emu_kind kind, size_t count);
void expect_nothing(void);

/* Runs `body` in a child; its exit status, or minus the signal that ended it. What it wrote to
 * standard error is in `text`. */
int in_child(void (*body)(void), char text[4096]);

/* A field of the newest recorded graph. */
int64_t graph_field(const char *name);

int run_rule_tests(void);
int run_order_tests(void);
int run_memory_tests(void);

#endif

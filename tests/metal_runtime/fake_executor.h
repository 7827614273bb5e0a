/* What the tests know of the fake executor beyond executor.h. */
#ifndef LILY_TESTS_FAKE_EXECUTOR_H
#define LILY_TESTS_FAKE_EXECUTOR_H

#include "../../tools/metal_emulator/executor/executor.h"

struct copy_args {
    uint32_t first, count; /* floats */
};

/* A letter for each dispatch that ran, oldest first: 's' for scale, 'a' + first for copy. */
extern char fake_order[256];

#endif

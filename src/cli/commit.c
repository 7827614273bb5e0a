#include "cli/commit.h"

#ifndef LILY_COMMIT
#define LILY_COMMIT "unknown"
#endif

const char *const build_commit = LILY_COMMIT;

/* lily_selftest over a given list of backends, for tests. */
#ifndef LILY_ENGINE_SELFTEST_H
#define LILY_ENGINE_SELFTEST_H

#include "backend/backend.h"
#include "lily.h"

int engine_selftest(const struct backend *const *all, const struct backend *reference,
                    const lily_selftest_options *options, char **json, lily_err *err);

#endif

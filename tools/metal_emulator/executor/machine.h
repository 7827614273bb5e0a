// Runs one threadgroup.
#pragma once

#include "internal.h"

namespace msl {

uint64_t next_random(); // only when machine.random is not 0
void prepare_group(unsigned threads);
void run_group(); // contexts are filled in

} // namespace msl

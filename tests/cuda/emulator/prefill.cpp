/* The prompt kernels of sm_90a on a processor: the checks of prefill_bench.cu. They see where
 * operands lie and which threads meet, not what waits and fences are for. */
#define SHAPE_HEADER "emulator/prefill_shape.h"
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulator.h"

#include "prefill_wgmma.cuh"

#include "prefill_device.h"

#include "../prefill_bench.cu"

/* How much memory the machine has, and how short of it the system says it is. */
#ifndef LILY_METAL_PRESSURE_H
#define LILY_METAL_PRESSURE_H

#include <stdint.h>

uint64_t metal_machine_memory(void); /* bytes installed */

#endif
